"""One file of the journal: a header and frames, each of which is found and checked by itself.

    file    = header frame*
    header  = magic (8 bytes, the last is the version) · position (u64: what lies before it is in the database)
    frame   = mark (4) · CRC-32 of all that follows (u32) · payload's length (u32) · kind (u8) · exchange id (16) · payload

All numbers are little-endian. A frame that was hit (a flipped bit, a torn tail) costs itself: the next mark is looked
for, and reading goes on there. The exchange id stands outside of the payload, so that a successor finds what was not
finished without decoding anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import NamedTuple, Self
from zlib import crc32

MAGIC = b"WEIRJNL\x01"
MARK = b"\xf5W\xe1r"
"""Starts with a byte that UTF-8 never has, so that no text looks like it."""
MAX_PAYLOAD = 1 << 20
_WINDOW = 2 * MAX_PAYLOAD
_HEADER = Struct("<8sQ")
_HEAD = Struct("<4sIIB16s")
_CHECKED = 8
"""Where in a frame the part begins that the CRC covers."""

HEADER_BYTES = _HEADER.size


class Kind(IntEnum):
    OPENED = 1
    ADVANCED = 2
    FINISHED = 3


class Frame(NamedTuple):
    """`end`: the offset behind it."""

    kind: int
    exchange_id: bytes
    payload: bytes
    end: int


class Damage(NamedTuple):
    """Bytes from `start` to `end` that are no frame."""

    start: int
    end: int


class NotASegment(Exception):
    """The file does not start with the header of this version."""


def frame(kind: Kind, exchange_id: bytes, payload: bytes) -> bytes:
    """One entry as it is written. ValueError: the payload is larger than MAX_PAYLOAD bytes."""
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"An entry of {len(payload)} bytes is larger than the journal takes ({MAX_PAYLOAD}).")
    body = _HEAD.pack(MARK, 0, len(payload), kind, exchange_id)[_CHECKED:] + payload
    return MARK + crc32(body).to_bytes(4, "little") + body


def frames(data: bytes, *, final: bool, base: int = 0) -> Iterator[Frame | Damage]:
    """The frames of `data`, and what lies damaged between them, as offsets from `base`.

    `final`: nothing follows `data`, so a part of a frame at its end is torn.
    """
    at, broken = 0, -1
    while at < len(data):
        if (found := _frame_at(data, at, base)) is not None:
            if broken >= 0:
                yield Damage(base + broken, base + at)
                broken = -1
            yield found
            at = found.end - base
        elif not final and _may_go_on(data, at):
            break
        else:
            broken = at if broken < 0 else broken
            mark = data.find(MARK, at + 1)
            at = mark if mark >= 0 else len(data) if final else max(at + 1, len(data) - len(MARK) + 1)
    if broken >= 0:
        yield Damage(base + broken, base + at)


def _frame_at(data: bytes, at: int, base: int) -> Frame | None:
    if len(data) - at < _HEAD.size:
        return None
    mark, checksum, length, kind, exchange_id = _HEAD.unpack_from(data, at)
    end = at + _HEAD.size + length
    if mark != MARK or length > MAX_PAYLOAD or end > len(data):
        return None
    if crc32(memoryview(data)[at + _CHECKED : end]) != checksum:
        return None
    return Frame(kind, exchange_id, data[at + _HEAD.size : end], base + end)


def _may_go_on(data: bytes, at: int) -> bool:
    """Whether what starts at `at` may be a frame whose end is not in `data`."""
    if len(data) - at < _HEAD.size:
        return data.startswith(MARK[: len(data) - at], at)
    mark, _, length, _, _ = _HEAD.unpack_from(data, at)
    return bool(mark == MARK and length <= MAX_PAYLOAD and at + _HEAD.size + length > len(data))


class Segment:
    """A segment file. `size`: bytes written, `position`: bytes of which the database has everything, `pending`:
    finished records behind the position, `sealed`: nothing more is written to it."""

    def __init__(self, path: Path, *, size: int, position: int, sealed: bool) -> None:
        self.path = path
        self.size = size
        self.position = position
        self.pending = 0
        self.sealed = sealed

    @classmethod
    def create(cls, path: Path) -> tuple[Self, int]:
        """A new file with its header, and the descriptor to write it with. OSError: there is no such file then."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            write(descriptor, _HEADER.pack(MAGIC, HEADER_BYTES), 0)
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        return cls(path, size=HEADER_BYTES, position=HEADER_BYTES, sealed=False), descriptor

    @classmethod
    def open(cls, path: Path) -> Self:
        """A file that somebody else wrote, sealed. NotASegment: its header is not one of ours."""
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
        if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
            raise NotASegment(f"{path} is no journal segment of version {MAGIC[-1]}.")
        return cls(path, size=size, position=_HEADER.unpack(header)[1], sealed=True)

    def __repr__(self) -> str:
        return f"<Segment {self.path.name} {self.position}/{self.size} pending={self.pending}>"

    def read(self, start: int, end: int) -> Iterator[Frame | Damage]:
        """What lies between two offsets; `start` is where a frame begins. Holds one window of the file in memory."""
        with self.path.open("rb") as file:
            while start < end and (data := os.pread(file.fileno(), min(_WINDOW, end - start), start)):
                final = len(data) < _WINDOW
                for item in frames(data, final=final, base=start):
                    yield item
                    start = item.end
                if final:
                    return

    def move_to(self, position: int) -> None:
        """Notes how far the database has it: also in the file, where it may lag behind."""
        self.position = position
        with self.path.open("r+b") as file:
            os.pwrite(file.fileno(), _HEADER.pack(MAGIC, position), 0)

    def rescue(self, directory: Path, descriptor: int) -> None:
        """Its content, as the descriptor still has it, becomes a file of the same name elsewhere. OSError: it did not."""
        path = directory / self.path.name
        copy = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            write(copy, _HEADER.pack(MAGIC, self.position), 0)
            write(copy, os.pread(descriptor, self.size - HEADER_BYTES, HEADER_BYTES), HEADER_BYTES)
            os.fsync(copy)
            sync_directory(directory)
        finally:
            os.close(copy)
        if leads_to(self.path, descriptor):
            self.path.unlink()
        self.path = path

    def move(self, directory: Path) -> bool:
        """Moves the file; False: it is not there any more, or not to be had."""
        path = directory / self.path.name
        try:
            self.path.rename(path)
        except OSError:
            return False
        self.path = path
        return True


def leads_to(path: Path, descriptor: int) -> bool:
    """Whether this name is still that of the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def write(descriptor: int, data: bytes, offset: int) -> None:
    """All of `data` at `offset`: one system call, more only where the disk took a part of it. OSError: it is full, …"""
    done = os.pwrite(descriptor, data, offset)
    while done < len(data):
        done += os.pwrite(descriptor, memoryview(data)[done:], offset + done)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory outlast a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
