"""The journal's records into the database: in batches, each exchange once, and nobody ever waits for it.

A batch is one transaction. If it fails, or its answer gets lost, the same batch is sent again until the database has it;
what it has already is left out there. Nothing is kept in memory but the batch at hand: the backlog is the journal. A
record that the database refuses for what is in it is found by halving and set aside with the reason; the rest goes in.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date
from typing import NamedTuple

import msgspec
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, StatementError
from sqlalchemy.ext.asyncio import AsyncEngine

from meter.ledger.database import reason_of
from meter.ledger.journal import Batch, Journal
from meter.ledger.merge import merge
from meter.ledger.partitions import ensure_partitions
from meter.ledger.record import UsageRecord

BATCH_SECONDS = 30.0
"""After this a database that says nothing counts as away."""
FIRST_WAIT = 0.1
LONGEST_WAIT = 5.0
REJECTED = "records.rejected"
"""Beside the journal: records that the database refuses, a JSON object a line with `reason` and `record`."""

log = logging.getLogger(__name__)


class Shipped(NamedTuple):
    """What became of a batch: rows that are new in the ledger, rows that it had already, rows that were set aside."""

    written: int = 0
    duplicate: int = 0
    rejected: int = 0

    def __add__(self, other: object) -> Shipped:
        assert isinstance(other, Shipped)
        return Shipped(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Shipper:
    """Ships what `journal` holds through `engine`, in batches of up to `batch_rows` or every `batch_seconds`.

    `on_shipped` is told of each batch that is through. `clock`: seconds since 1970.
    """

    def __init__(
        self,
        journal: Journal,
        engine: AsyncEngine,
        *,
        batch_rows: int = 1_000,
        batch_seconds: float = 0.2,
        on_shipped: Callable[[Shipped], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.failures = 0
        """Batches that did not get through at once."""
        self.failing: str | None = None
        """Why the database does not take records at the moment; None while it does."""
        self._journal = journal
        self._engine = engine
        self._batch_rows = batch_rows
        self._batch_seconds = batch_seconds
        self._on_shipped = on_shipped
        self._clock = clock
        self._totals: Counter[str] = Counter()
        self._months: set[date] = set()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = f" failing: {self.failing}" if self.failing else ""
        return (
            f"<Shipper backlog={self.backlog_rows} lag={self.lag_seconds:.1f}s shipped={self.rows_shipped}"
            f" rejected={self._totals['rejected']} failures={self.failures}{state}>"
        )

    @property
    def backlog_rows(self) -> int:
        return self._journal.backlog_rows

    @property
    def lag_seconds(self) -> float:
        """Age of the oldest finished record that the database does not have; 0 without any."""
        oldest = self._journal.oldest_at
        return 0.0 if oldest is None else max(0.0, self._clock() - oldest)

    @property
    def rows_shipped(self) -> int:
        """Rows that are in the ledger because of this process."""
        return self._totals["written"]

    def results(self) -> Mapping[str, int]:
        """Rows by what became of them: written, duplicate, rejected."""
        return {name: self._totals[name] for name in Shipped._fields}

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="shipper")

    async def stop(self, deadline: float) -> None:
        """Ships what it can within `deadline` seconds; the rest stays in the journal."""
        self._stopping.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=deadline)
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        while not (self._stopping.is_set() and self.backlog_rows == 0):
            if self.backlog_rows < self._batch_rows and not self._stopping.is_set():
                await self._pause(self._batch_seconds)
            if self.backlog_rows:
                await self._ship_next()

    async def _ship_next(self) -> None:
        """One batch, tried until it is through."""
        tries = 0
        while True:
            try:
                batch = await asyncio.to_thread(self._journal.read, self._batch_rows)
                if batch is not None:
                    self._through(batch, await self._book(batch.records))
                return
            except Exception as error:  # whatever it is, the records stay and are tried again
                self._failed(error)
            await self._pause(min(LONGEST_WAIT, FIRST_WAIT * 2**tries) * random.uniform(0.5, 1))  # noqa: S311
            tries += 1

    def _through(self, batch: Batch, shipped: Shipped) -> None:
        self._journal.shipped(batch)
        self._totals.update(shipped._asdict())
        if self.failing:
            log.warning("The database takes records again; %d wait.", self.backlog_rows)
            self.failing = None
        if self._on_shipped is not None:
            self._on_shipped(shipped)

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        if self.failing is None:
            log.warning("The database does not take records (%s); they wait in the journal.", reason_of(error))
        self.failing = reason_of(error)

    async def _pause(self, seconds: float) -> None:
        if self._stopping.is_set():
            await asyncio.sleep(min(seconds, 2 * FIRST_WAIT))
        else:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _book(self, records: Sequence[UsageRecord]) -> Shipped:
        """Books all of them but those that are refused for what is in them."""
        if not records:
            return Shipped()
        remembered = _months(records) <= self._months
        try:
            async with asyncio.timeout(BATCH_SECONDS):
                await self._ensure_months(records)
                written = await self._merge(records)
            return Shipped(written, len(records) - written)
        except Exception as error:
            if not _is_about_a_row(error):
                raise
            if remembered:  # a partition we remember may be gone: that is no row's fault
                self._months.clear()
                return await self._book(records)
            if len(records) == 1:
                return self._reject(records[0], reason_of(error))
        middle = len(records) // 2
        return await self._book(records[:middle]) + await self._book(records[middle:])

    async def _ensure_months(self, records: Sequence[UsageRecord]) -> None:
        for month in _months(records) - self._months:
            async with self._engine.begin() as connection:
                await ensure_partitions(connection, month)
            self._months.add(month)

    async def _merge(self, records: Sequence[UsageRecord]) -> int:
        """One transaction. A connection on which anything went wrong is not used again: its state is not known."""
        async with self._engine.connect() as connection:
            try:
                written = await merge(connection, records)
                await connection.commit()
            except BaseException:
                await connection.invalidate()
                raise
        return written

    def _reject(self, record: UsageRecord, reason: str) -> Shipped:
        path = self._journal.directory / REJECTED
        with path.open("ab") as file:
            file.write(msgspec.json.encode({"reason": reason, "record": record}) + b"\n")
        log.error("The database refuses exchange %s (%s); it is kept in %s.", record.exchange_id, reason, path)
        return Shipped(rejected=1)


def _months(records: Sequence[UsageRecord]) -> set[date]:
    return {record.started_at.astimezone(UTC).date().replace(day=1) for record in records}


def _is_about_a_row(error: Exception) -> bool:
    """Whether it was refused for a value in it: SQLSTATE classes 22 and 23, or a driver that cannot encode it.

    https://www.postgresql.org/docs/current/errcodes-appendix.html
    """
    origin = error.orig if isinstance(error, StatementError) and error.orig is not None else error
    if state := getattr(origin, "sqlstate", None):
        return str(state)[:2] in {"22", "23"}
    if isinstance(error, DBAPIError):
        return isinstance(error, (DataError, IntegrityError))
    return isinstance(origin, (ArithmeticError, ValueError, TypeError))
