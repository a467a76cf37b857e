"""The last known keys, tiers, teams and prices on local disk, for a start while the database is away. Only hashes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from meter.callers.stored import Known


class SnapshotUnusable(Exception):
    """There is no snapshot, or it cannot be read."""


def write(path: Path, known: Known) -> None:
    """All or nothing: a reader sees the old file or the new one. For the owner's eyes only. Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(known))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()


def read(path: Path) -> Known:
    """What was written last; raises SnapshotUnusable."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Known)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SnapshotUnusable(f"The snapshot of keys and tiers {path} cannot be used: {error}") from error
