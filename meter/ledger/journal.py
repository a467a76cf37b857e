"""Records on local disk: written before the client sees the end of its answer, kept until the database has them.

Every process has a directory of its own in the journal's, `<pid>-<random>/`, and holds the lock of the file `lock` in
it. In it are segments, `000001.journal` and on (`segment.py` has the format). Whoever gets the lock of another
directory knows that its process is gone, and adopts it: what it finished is shipped from where it lies, what it opened
and never finished is handed out to be booked as crashed. Up to where the database has a segment stands in the segment
itself; that may lag behind after a crash, since the ledger takes each exchange once.

An entry is one `write`, which survives the end of this process however it ends; what a loss of power may take is
bounded by `fsync_seconds`. A directory that is taken away from a living process is noticed as often, and made anew with
what was written lately; while that is impossible the journal counts as full, and keeps what it has. What cannot be read is set aside as `*.damaged` beside the directories and never blocks the
rest. All calls are synchronous and may come from any thread.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, TypeVar
from uuid import UUID

import msgspec

from meter.ledger.home import Home, Spare
from meter.ledger.record import Advanced, Opened, UsageRecord, storable
from meter.ledger.segment import (
    HEADER_BYTES,
    Damage,
    Frame,
    Kind,
    NotASegment,
    Segment,
    frame,
    leads_to,
    sync_directory,
    write,
)

SEGMENT_BYTES = 16 * 1024 * 1024
NOTE = "untold"
"""In a process's directory: its note for its successor."""
ROOM_PER_EXCHANGE = 4 * 1024
"""Kept free for every open exchange, so that its end can always be written; a record takes about 700 bytes."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_LOST = (errno.ENOENT, errno.EIO)
"""A file that is gone or whose disk is failing does not come back by trying again."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class JournalError(Exception):
    """An entry could not be written. The message is a plain sentence."""


class JournalFull(JournalError):
    """The journal is at its limit, or the disk is full: nothing new may be opened until the database took its records."""


class JournalBroken(JournalError):
    """The disk does not take the entry for another reason: it is read-only, gone, or failing."""


class Adopted(NamedTuple):
    """What was found of processes that are gone.

    `records`: how many finished records there are to ship; nobody needs to do anything about them. `unfinished`: what
    was open, each `record` as it is to be booked (with `finished`), then its lease is to be settled.
    """

    records: int
    unfinished: list[Opened]


class Left(NamedTuple):
    """What ended processes may have left untold elsewhere: exchanges that they finished a short while ago, and the notes
    that they left (`leave`)."""

    ended: list[UsageRecord]
    notes: list[bytes]


class Batch(NamedTuple):
    """Finished records in the order in which they were written, and where reading ended."""

    home: Home
    segment: Segment
    records: list[UsageRecord]
    end: int


class _Open:
    """An exchange that has begun and not ended, and where that stands."""

    __slots__ = ("advanced", "opened", "segment")

    def __init__(self, opened: Opened, segment: Segment, advanced: Advanced | None = None) -> None:
        self.opened = opened
        self.segment = segment
        self.advanced = advanced

    def as_crashed(self) -> Opened:
        """With what was known last."""
        if self.advanced is None:
            return self.opened
        record = msgspec.structs.replace(
            self.opened.record,
            prompt_tokens=self.advanced.prompt_tokens,
            completion_tokens=self.advanced.completion_tokens,
            engine_prompt_tokens=self.advanced.engine_prompt_tokens,
            engine_completion_tokens=self.advanced.completion_tokens,
            usage_source="counted",
            duration_ms=max(self.opened.record.duration_ms, self.advanced.duration_ms),
        )
        return msgspec.structs.replace(self.opened, record=record)


class Journal:
    """The journal of one process in `directory`, which many may share.

    `fsync_seconds`: how often written entries are flushed to the disk, by a thread; 0: each one, before its call
    returns. `max_bytes`: what this process may keep there, adopted segments included. `clock`: seconds since 1970.
    `lately`: so many seconds what an adopted process finished is told once more (`left`).
    """

    def __init__(
        self,
        directory: Path,
        *,
        fsync_seconds: float,
        max_bytes: int,
        segment_bytes: int = SEGMENT_BYTES,
        clock: Callable[[], float] = time.time,
        lately: float = 0.0,
    ) -> None:
        self.directory = directory
        self.bytes = 0
        """Size of all segments on disk."""
        self.damaged = 0
        """Stretches that could not be read and were set aside."""
        self.failures = 0
        """Entries that could not be written, and flushes that failed."""
        self._fsync_seconds = fsync_seconds
        self._max_bytes = max_bytes
        self._segment_bytes = min(segment_bytes, max_bytes // 4)
        self._clock = clock
        self._lately = lately
        self._left = Left([], [])
        self._encoder = msgspec.msgpack.Encoder(uuid_format="bytes")
        self._opened = msgspec.msgpack.Decoder(Opened)
        self._advanced = msgspec.msgpack.Decoder(Advanced)
        self._finished = msgspec.msgpack.Decoder(UsageRecord)
        self._guard = threading.RLock()
        self._open: dict[UUID, _Open] = {}
        self._homes: deque[Home] = deque()
        self._descriptor: int | None = None
        self._number = 0
        self._retired: list[int] = []
        self._dirty = False
        self._named = True
        self._homeless = False
        self._stopping = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="journal", daemon=True)

    def __repr__(self) -> str:
        state = " full" if self.full else ""
        return (
            f"<Journal {self.directory} bytes={self.bytes}/{self._max_bytes} backlog={self.backlog_rows}"
            f" open={len(self._open)} damaged={self.damaged} failures={self.failures}{state}>"
        )

    def start(self) -> None:
        """Makes this process's directory. JournalFull, JournalBroken: nothing can be written there."""
        try:
            self._home = self._new_home()
        except OSError as error:
            raise self._failed(error) from error
        self._homes.append(self._home)
        self._spare = Spare(self._home.path / "spare")
        if not self._spare.take():
            log.warning(
                "The disk of the journal %s is full: new requests are refused until there is room.", self.directory
            )
        self._keeper.start()

    def stop(self) -> None:
        """Flushes and lets go. What is not shipped stays for whoever adopts it; nothing stays where all is."""
        self._stopping.set()
        self._keeper.join()
        with self._guard:
            if self.backlog_rows or self._open:
                self._housed()
            self._spare.give_up()
            self._seal()
            self._flush_or_tell()
            for home in self._homes:
                self._drop_shipped(home)
                home.release()
            self._homes.clear()

    def opened(self, opened: Opened) -> None:
        """Notes an exchange that was admitted. JournalFull, JournalBroken: it is not noted, so it must not be served."""
        exchange_id = opened.record.exchange_id
        with self._guard:
            if self.full:
                raise self._full()
            segment = self._append(Kind.OPENED, exchange_id, opened)
            self._open[exchange_id] = _Open(opened, segment)

    def advanced(self, advanced: Advanced) -> None:
        """Notes how far an open exchange has come. Never raises for the disk: it only makes a later crash more exact."""
        with self._guard:
            if (known := self._open.get(advanced.exchange_id)) is None:
                return
            known.advanced = advanced
            if not self.full:
                try:
                    self._append(Kind.ADVANCED, advanced.exchange_id, advanced)
                except JournalError as error:  # counted; the end of the exchange will say it aloud
                    log.debug("%s", error)

    def finished(self, record: UsageRecord) -> None:
        """Writes how an exchange ended; from then on it will be booked. There is always room for one that was opened.

        JournalFull: it was not opened here, and there is no room. JournalBroken: the disk takes nothing.
        """
        with self._guard:
            if record.exchange_id not in self._open and self.full:
                raise self._full()
            segment = self._append(Kind.FINISHED, record.exchange_id, record, spare=True)
            self._open.pop(record.exchange_id, None)
            if self._home.oldest_at is None:
                self._home.oldest_at = self._clock()
            segment.pending += 1

    @property
    def full(self) -> bool:
        """Whether a new exchange would be refused."""
        room = ROOM_PER_EXCHANGE * (len(self._open) + 1)
        return self.bytes + room > self._max_bytes or not self._spare.held or self._homeless

    @property
    def backlog_rows(self) -> int:
        """Finished records that the database has not taken yet."""
        with self._guard:
            return sum(home.pending for home in self._homes)

    @property
    def oldest_at(self) -> float | None:
        """About when the oldest of them was finished, never later than it was; None without any."""
        with self._guard:
            return min((home.oldest_at for home in self._homes if home.oldest_at is not None), default=None)

    # reading, for the shipper: one batch at a time

    def read(self, rows: int) -> Batch | None:
        """Up to `rows` finished records that are to be shipped next; None: there are none.

        Directories take turns, so that a long backlog of one does not hold up another. The same batch comes again
        until it is told to be `shipped`. OSError: the disk gives nothing at the moment; ask again.
        """
        with self._guard:
            chosen = next(self._unshipped(), None)
            if chosen is None:
                return None
            home, segment = chosen
            start, end = segment.position, segment.size
        records: list[UsageRecord] = []
        try:
            for item in segment.read(start, end):
                start = item.end
                if (record := self._record(home, segment, item)) is not None:
                    records.append(record)
                if len(records) == rows:
                    return Batch(home, segment, records, start)
        except OSError as error:
            if error.errno not in _LOST or not self._housed():
                raise
            if segment not in home.segments or (error.errno == errno.ENOENT and segment.path.exists()):
                return self.read(rows)  # the directory was made anew in the meantime
            self._set_aside_whole(home, segment.path, f"{segment.path} cannot be read: {error.strerror}.")
        return Batch(home, segment, records, end)

    def shipped(self, batch: Batch) -> None:
        """The database has all of it."""
        home, segment, records, end = batch
        with self._guard:
            segment.pending -= len(records)
            try:
                segment.move_to(end)
            except OSError as error:
                log.warning("%s does not note what is shipped (%s); after a crash it is sent again.", segment, error)
            if end >= segment.size:
                segment.pending = 0
            home.oldest_at = (_ended(records[-1]) if records else home.oldest_at) if home.pending else None
            if not self._spare.held and not self._home.pending:
                self._seal()  # the disk is full, and this can be given back
            for each in list(self._homes):
                self._drop_shipped(each)
            self._homes.rotate(-1)

    def waiting(self, since: float) -> list[UsageRecord]:
        """What is finished, not known to be in the database, and ended after `since` (seconds since 1970).

        A record that the database takes at this moment may be among it.
        """
        with self._guard:
            chosen = [(segment, segment.position, segment.size) for _, segment in self._unshipped()]
        return [record for each in chosen for record in self._finished_in(*each) if _ended(record) > since]

    def running(self) -> list[UsageRecord]:
        """How everything that has begun and not ended would be booked if it ended now."""
        with self._guard:
            return [known.as_crashed().record for known in self._open.values()]

    def _finished_in(self, segment: Segment, start: int, end: int) -> Iterator[UsageRecord]:
        """What can be read of it; a segment that is gone meanwhile is in the database."""
        with suppress(OSError):
            for item in segment.read(start, end):
                if isinstance(item, Frame) and item.kind == Kind.FINISHED:
                    with suppress(msgspec.DecodeError, ValueError):
                        yield self._finished.decode(item.payload)

    def _unshipped(self) -> Iterator[tuple[Home, Segment]]:
        for home in self._homes:
            for segment in home.segments:
                if segment.pending:
                    yield home, segment

    def _record(self, home: Home, segment: Segment, item: Frame | Damage) -> UsageRecord | None:
        if isinstance(item, Damage):
            self._set_aside(home, segment, item)
        elif item.kind == Kind.FINISHED:
            return self._decoded(self._finished, home, segment, item)
        return None

    def _drop_shipped(self, home: Home) -> None:
        """Removes segments of which the database has everything, once what is open in them stands elsewhere too."""
        for segment in [each for each in home.segments if each.sealed and not each.pending]:
            if self._may_go(segment):
                with suppress(OSError):  # it is shipped; where it cannot go, whoever adopts it finds nothing new in it
                    segment.path.unlink(missing_ok=True)
                home.segments.remove(segment)
                self.bytes -= segment.size
        if home is not self._home and not home.segments and not self._stopping.is_set():
            self._homes.remove(home)
            home.release()

    def _may_go(self, segment: Segment) -> bool:
        still_open = [known for known in self._open.values() if known.segment is segment]
        if still_open and (self._stopping.is_set() or not self._spare.held):
            return False
        try:
            for known in still_open:
                self._carry_over(known)
        except JournalError as error:
            log.warning("%s stays: %s", segment, error)
            return False
        return True

    def _carry_over(self, known: _Open) -> None:
        exchange_id = known.opened.record.exchange_id
        segment = self._append(Kind.OPENED, exchange_id, known.opened)
        if known.advanced is not None:
            self._append(Kind.ADVANCED, exchange_id, known.advanced)
        known.segment = segment

    # adoption

    def leave(self, note: bytes) -> None:
        """Leaves a note for whoever adopts this process's directory, in place of the one before; empty: none. OSError."""
        path = self._home.path / NOTE
        if not note:
            path.unlink(missing_ok=True)
            return
        draft = path.with_suffix(".draft")
        draft.write_bytes(note)
        draft.replace(path)

    def left(self) -> Left:
        """What was found of that kind since this was asked last."""
        with self._guard:
            left, self._left = self._left, Left([], [])
        return left

    def adopt(self) -> Adopted:
        """Takes over the directories of processes that are gone. At start, before serving, and from time to time."""
        records, unfinished = 0, []
        for home in Home.claim_all(self.directory):
            try:
                found = self._scan(home)
            except OSError as error:
                self.failures += 1
                log.error("%s cannot be adopted now, it is tried again: %s", home.path, error.strerror)
                home.let_go()
                continue
            records += home.pending
            unfinished += [known.as_crashed() for known in found.values()]
            with self._guard:
                self._open.update(found)
                self.bytes += home.bytes
                self._homes.append(home)
                self._drop_shipped(home)
        if records or unfinished:
            log.warning("Adopted %d finished and %d unfinished exchanges of ended processes.", records, len(unfinished))
        return Adopted(records, unfinished)

    def _scan(self, home: Home) -> dict[UUID, _Open]:
        """Reads all of a directory: which segments there are, what is to be shipped, what is still open."""
        (home.path / "spare").unlink(missing_ok=True)
        self._take_note(home)
        found: dict[UUID, _Open] = {}
        for path in sorted(home.path.glob("*.journal")):
            try:
                segment = Segment.open(path)
            except NotASegment as error:
                self._set_aside_whole(home, path, str(error))
            else:
                home.segments.append(segment)
                self._scan_segment(home, segment, found)
        return found

    def _scan_segment(self, home: Home, segment: Segment, found: dict[UUID, _Open]) -> None:
        ends, position = {HEADER_BYTES}, segment.position
        finished: list[Frame] = []
        for item in segment.read(HEADER_BYTES, segment.size):
            ends.add(item.end)
            if isinstance(item, Damage):
                self._set_aside(home, segment, item)
            elif item.kind == Kind.FINISHED:
                found.pop(UUID(bytes=item.exchange_id), None)
                finished.append(item)
            else:
                self._note_open(home, segment, item, found)
        if position not in ends:  # the header was hit: everything is sent again
            segment.position = position = HEADER_BYTES
        self._note_ended(home, segment, finished)
        waiting = [item for item in finished if item.end > position]
        segment.pending = len(waiting)
        if waiting and home.oldest_at is None:
            oldest = self._decoded(self._finished, home, segment, waiting[0])
            home.oldest_at = _ended(oldest) if oldest is not None else self._clock()

    def _take_note(self, home: Home) -> None:
        path = home.path / NOTE
        with suppress(FileNotFoundError):
            self._left.notes.append(path.read_bytes())
            path.unlink()

    def _note_ended(self, home: Home, segment: Segment, finished: list[Frame]) -> None:
        """Keeps what was finished lately, be it in the database or not."""
        since = self._clock() - self._lately
        if segment.path.stat().st_mtime > since:
            records = (self._decoded(self._finished, home, segment, item) for item in finished)
            self._left.ended.extend(record for record in records if record is not None and _ended(record) > since)

    def _note_open(self, home: Home, segment: Segment, item: Frame, found: dict[UUID, _Open]) -> None:
        exchange_id = UUID(bytes=item.exchange_id)
        if item.kind == Kind.OPENED:
            if (opened := self._decoded(self._opened, home, segment, item)) is not None:
                found[exchange_id] = _Open(opened, segment)
        elif exchange_id in found and (advanced := self._decoded(self._advanced, home, segment, item)) is not None:
            found[exchange_id].advanced = advanced

    def _decoded(self, decoder: msgspec.msgpack.Decoder[T], home: Home, segment: Segment, item: Frame) -> T | None:
        try:
            return decoder.decode(item.payload)
        except (msgspec.DecodeError, ValueError) as error:  # written by another release
            log.error("%s: an entry before byte %d is not understood: %s", segment.path, item.end, error)
            self._set_aside(home, segment, Damage(item.end - len(item.payload), item.end))
            return None

    def _set_aside(self, home: Home, segment: Segment, damage: Damage) -> None:
        """Keeps what cannot be read, once; reading goes on behind it."""
        path = self.directory / f"{home.path.name}-{segment.path.stem}-{damage.start}.damaged"
        if path.exists():
            return
        with segment.path.open("rb") as file:
            path.write_bytes(os.pread(file.fileno(), damage.end - damage.start, damage.start))
        self.damaged += 1
        log.error(
            "%s is damaged from byte %d to %d; those bytes are kept in %s, the rest goes on.",
            *(segment.path, damage.start, damage.end, path.name),
        )

    def _set_aside_whole(self, home: Home, path: Path, reason: str) -> None:
        kept = self.directory / f"{home.path.name}-{path.stem}.damaged"
        self.damaged += 1
        try:
            path.rename(kept)
        except FileNotFoundError:
            log.error("%s What it held is lost, the rest goes on.", reason)
        else:
            log.error("%s It is kept as %s, the rest goes on.", reason, kept.name)

    # writing

    def _append(self, kind: Kind, exchange_id: UUID, entry: msgspec.Struct, *, spare: bool = False) -> Segment:
        data = frame(kind, exchange_id.bytes, self._encoded(entry))
        try:
            try:
                return self._put(data)
            except OSError as error:
                if not (spare and error.errno in _NO_SPACE and self._spare.give_up()):
                    raise
                return self._put(data)
        except OSError as error:
            raise self._failed(error) from error

    def _encoded(self, entry: msgspec.Struct) -> bytes:
        try:
            return self._encoder.encode(entry)
        except (UnicodeEncodeError, OverflowError):
            if isinstance(entry, Opened):
                entry = msgspec.structs.replace(entry, record=storable(entry.record))
            elif isinstance(entry, UsageRecord):
                entry = storable(entry)
            return self._encoder.encode(entry)

    def _put(self, data: bytes) -> Segment:
        segment = self._current
        if (segment is None or segment.size + len(data) > self._segment_bytes) and (self._housed() or segment is None):
            segment = self._roll()
        assert self._descriptor is not None
        write(self._descriptor, data, segment.size)
        segment.size += len(data)
        self.bytes += len(data)
        self._dirty = True
        if not self._fsync_seconds:
            self._flush()
        return segment

    @property
    def _current(self) -> Segment | None:
        """The segment at hand, if there is one."""
        return self._home.segments[-1] if self._descriptor is not None else None

    def _roll(self) -> Segment:
        """Begins the next segment, seals the one before."""
        self._number += 1
        segment, descriptor = Segment.create(self._home.path / f"{self._number:06}.journal")
        self._seal()
        self._descriptor, self._named = descriptor, False
        self._home.segments.append(segment)
        self.bytes += segment.size
        return segment

    def _seal(self) -> None:
        """Nothing more is written to the segment at hand. Its descriptor is closed once it is flushed."""
        if self._descriptor is not None:
            self._home.segments[-1].sealed = True
            if self._fsync_seconds:
                self._retired.append(self._descriptor)
            else:
                os.close(self._descriptor)
            self._descriptor = None

    def _failed(self, error: OSError) -> JournalError:
        self.failures += 1
        if error.errno in _NO_SPACE:
            return JournalFull(f"The disk of the journal {self.directory} is full: free some space on it.")
        return JournalBroken(
            f"The journal {self.directory} cannot be written ({error.strerror}): check disk and rights."
        )

    def _full(self) -> JournalError:
        if self._homeless:
            return JournalBroken(f"The journal {self.directory} was taken away: check disk and rights.")
        if not self._spare.held:
            return JournalFull(f"The disk of the journal {self.directory} is full: free some space on it.")
        return JournalFull(
            f"The journal {self.directory} has reached its limit of {self._max_bytes} bytes with {self.backlog_rows}"
            " records that the database has not taken: check the database, or raise ledger.journal_max_mb."
        )

    def _keep(self) -> None:
        """A thread's work, so that no request waits for it: flushes, and takes the spare room again where it was lost."""
        while not self._stopping.wait(self._fsync_seconds or 1):
            self._housed()
            if self._fsync_seconds:
                self._flush_or_tell()
            with self._guard:
                if not self._spare.held and self._spare.take():
                    log.warning("The disk of the journal %s has room again.", self.directory)

    def _flush_or_tell(self) -> None:
        try:
            self._flush()
        except OSError as error:
            self.failures += 1
            log.error("The journal %s cannot be flushed to the disk: %s", self.directory, error.strerror)

    def _flush(self) -> None:
        """To the disk. Only one thread does this at a time, and only this closes what was retired: the keeper, and
        `stop` after it; or, where every entry is flushed, whoever holds the guard."""
        with self._guard:
            retired, self._retired = self._retired, []
            current = [self._descriptor] if self._descriptor is not None and self._dirty else []
            named, self._dirty, self._named = self._named, False, True
        try:
            for descriptor in [*retired, *current]:
                os.fsync(descriptor)
            if not named:
                sync_directory(self._home.path)
        finally:
            for descriptor in retired:
                os.close(descriptor)

    # a directory that is taken away

    def _new_home(self) -> Home:
        self.directory.mkdir(parents=True, exist_ok=True)
        home = Home.create(self.directory)
        sync_directory(self.directory)
        return home

    def _housed(self) -> bool:
        """Whether what is written can be found again; where the directory was removed or moved, it is made anew."""
        with self._guard:
            if self._is_in_place():
                return True
            try:
                self._move(self._new_home())
            except OSError as error:
                if not self._homeless:
                    log.error("The directory %s was taken away. %s", self._home.path, self._failed(error))
                self._homeless = True
            else:
                self._homeless = False
            return not self._homeless

    def _is_in_place(self) -> bool:
        current = self._current
        return self._home.is_ours() and (
            current is None or self._descriptor is None or leads_to(current.path, self._descriptor)
        )

    def _move(self, home: Home) -> None:
        """Goes on in another directory. The segment at hand is still here, by its descriptor; others are if their files
        are. OSError: nothing has changed."""
        current, old = self._current, self._home.path
        if current is not None and self._descriptor is not None:
            try:
                current.rescue(home.path, self._descriptor)
            except OSError:
                home.remove()
                raise
            self._seal()
        lost = [each for each in self._home.segments if each is not current and not each.move(home.path)]
        self._home.move(home)
        self._spare = Spare(home.path / "spare")
        self._spare.take()
        self.damaged += len(lost)
        records = sum(each.pending for each in lost)
        for segment in lost:
            self._home.segments.remove(segment)
            self.bytes -= segment.size
        if not self._home.pending:
            self._home.oldest_at = None
        log.error("The directory %s was taken away, with %d records; it goes on as %s.", old, records, home.path.name)
        try:
            for known in [each for each in self._open.values() if each.segment in lost]:
                self._carry_over(known)
        except JournalError as error:
            log.warning("What is open is not noted anew: %s", error)


def _ended(record: UsageRecord) -> float:
    started: datetime = record.started_at
    return started.timestamp() + record.duration_ms / 1000
