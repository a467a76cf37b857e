"""The directory of one process in the journal's: who has it, what is in it, and some room for the worst moment."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Self

from meter.ledger.segment import Segment, leads_to

SPARE_BYTES = 1024 * 1024
"""About 1,500 records."""

log = logging.getLogger(__name__)


class Home:
    """The directory of one process, this one or one that is gone; ours as long as its lock is held."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.segments: list[Segment] = []
        self.oldest_at: float | None = None
        """When the oldest record that is still to be shipped was finished, in seconds since 1970."""
        self._lock = lock

    @classmethod
    def create(cls, directory: Path) -> Self:
        while True:
            path = directory / f"{os.getpid()}-{secrets.token_hex(6)}"
            path.mkdir(mode=0o700)
            if home := cls.claim(path):
                return home

    @classmethod
    def claim(cls, path: Path) -> Self | None:
        """The directory, if nobody alive has it. OSError: the disk knows no locks."""
        try:
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (path / "lock").stat().st_ino == os.fstat(lock).st_ino:
                return cls(path, lock)
        except (BlockingIOError, FileNotFoundError):  # held by a living process, or removed by one that was faster
            pass
        except OSError:
            os.close(lock)
            raise
        os.close(lock)
        return None

    @classmethod
    def claim_all(cls, directory: Path) -> Iterator[Self]:
        """Every directory of a process that is gone."""
        for path in sorted(directory.glob("[0-9]*-????????????")):
            if path.is_dir() and (home := cls.claim(path)) is not None:
                yield home

    @property
    def pending(self) -> int:
        return sum(segment.pending for segment in self.segments)

    @property
    def bytes(self) -> int:
        return sum(segment.size for segment in self.segments)

    def is_ours(self) -> bool:
        """Whether nobody took the directory away, or its lock."""
        return leads_to(self.path / "lock", self._lock)

    def move(self, other: Self) -> None:
        """Takes the place of another, which is empty. The old one goes, unless there is something in it."""
        for name in ("spare", "lock"):
            with suppress(OSError):
                (self.path / name).unlink()
        with suppress(OSError):
            self.path.rmdir()
        self.let_go()
        self.path, self._lock = other.path, other._lock

    def remove(self) -> None:
        """With all that is in it."""
        rmtree(self.path, ignore_errors=True)
        self.let_go()

    def release(self) -> None:
        """Lets go of it, and removes it if there is no segment in it."""
        if not self.segments:
            try:
                (self.path / "lock").unlink(missing_ok=True)
                self.path.rmdir()
            except OSError as error:  # whoever looks next finds it empty again
                log.debug("The journal's directory %s stays: %s", self.path, error.strerror)
        self.let_go()

    def let_go(self) -> None:
        os.close(self._lock)


class Spare:
    """A file that takes room on the disk, for the moment at which there is none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.held = False

    def take(self) -> bool:
        """Whether there is room for it."""
        try:
            self._path.write_bytes(bytes(SPARE_BYTES))
        except OSError:
            self._remove()
        else:
            self.held = True
        return self.held

    def give_up(self) -> bool:
        """Whether that made room."""
        held, self.held = self.held, False
        self._remove()
        return held

    def _remove(self) -> None:
        with suppress(OSError):  # it, or its directory, was taken away
            self._path.unlink()
