"""Refusals, counted by minute, key and rule: a storm of them is a few rows, and no request waits for the database.

They are counted in memory and added to `refusal_minute` every few seconds. While the database is away they stay in
memory and go on being summed; only a process that is killed loses what it counted since its last flush.

Each batch is added once, though the answer to its COMMIT may be lost: its number is written in the same transaction
(`refusal_flush`, one row a process), and a batch whose number is there already is not added again. A batch of unclear
outcome is kept as it is until that is known; what is counted meanwhile goes into later ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from sqlalchemy import Table, delete, literal, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from meter.ledger.database import reaching
from meter.ledger.schema import refusal_flush, refusal_minute

FLUSH_SECONDS = 5.0
"""How often they are written; so much a killed process forgets at most."""
PATIENCE = 30.0
"""After so many seconds a database that says nothing counts as away."""
BATCH_ROWS = 5_000
MOST_ROWS = 100_000
"""Rows that are kept while the database is away, some 25 MB: 1,000 keys that are refused in each of 100 minutes. A row
that is known goes on being summed; refusals that would need a new one are only counted, in `lost`."""
MARKS_DAYS = 30
"""How long the number of an ended process's last batch is kept."""

FILTERS = ("key", "rule", "shadow")
"""What refusals can be chosen by."""
_COLUMNS = {"key": "key_id"}
_PLACE = tuple(refusal_minute.primary_key)
_COUNTED = [column.name for column in refusal_minute.columns]

log = logging.getLogger(__name__)


class Refused(NamedTuple):
    """What one row counts. `minute`: since 1970; `shadow`: by a limit that is not in force."""

    minute: int
    key_id: str
    rule: str
    shadow: bool


@dataclass(frozen=True, slots=True)
class _Batch:
    number: int
    rows: list[dict[str, Any]]


class RefusalCounts:
    """What this process refused and the database does not know yet. `clock` gives the moment, with its zone."""

    def __init__(self, engine: AsyncEngine, clock: Callable[[], datetime], *, most_rows: int = MOST_ROWS) -> None:
        self.lost = 0
        """Refusals that no row had room for."""
        self.failing: str | None = None
        """Why the database does not take them at the moment; None while it does."""
        self._engine = engine
        self._clock = clock
        self._most_rows = most_rows
        self._writer = uuid4()
        self._counts: dict[Refused, int] = {}
        self._batch: _Batch | None = None
        """The one whose outcome is not known."""
        self._flushes = 0

    def __repr__(self) -> str:
        state = f" failing: {self.failing}" if self.failing else ""
        return f"<RefusalCounts waiting={self.waiting_rows} lost={self.lost}{state}>"

    @property
    def waiting_rows(self) -> int:
        """Rows that are not in the database yet."""
        return len(self._counts) + (len(self._batch.rows) if self._batch else 0)

    def add(self, key_id: str, rule: str, *, shadow: bool) -> None:
        """Counts one refusal in the minute that it is now."""
        refused = Refused(int(self._clock().timestamp()) // 60, key_id, rule, shadow)
        if refused in self._counts or self.waiting_rows < self._most_rows:
            self._counts[refused] = self._counts.get(refused, 0) + 1
        else:
            self.lost += 1

    async def flush(self) -> None:
        """Writes what was counted. What the database does not take is kept for the next time."""
        while batch := self._batch or self._next_batch():
            self._batch = batch
            try:
                async with asyncio.timeout(PATIENCE):
                    await self._write(batch)
            except Exception as error:  # whatever it is, nothing is lost by trying again
                self._failed(error)
                return
            self._written()

    async def stop(self, seconds: float) -> None:
        """Writes what is left, within so many seconds; what is not written by then is lost with the process."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.flush()
        if self.waiting_rows:
            log.warning("%d rows of counted refusals did not reach the database.", self.waiting_rows)

    def _next_batch(self) -> _Batch | None:
        """In one order for everybody: two processes that add to the same rows at once never deadlock."""
        chosen = sorted(islice(self._counts, BATCH_ROWS))
        rows = [
            {**each._asdict(), "minute": _moment(each.minute), "refusals": self._counts.pop(each)} for each in chosen
        ]
        self._flushes += 1 if rows else 0
        return _Batch(self._flushes, rows) if rows else None

    def _written(self) -> None:
        self._batch = None
        if self.failing:
            log.warning("The database takes refusal counts again.")
            self.failing = None

    def _failed(self, error: Exception) -> None:
        reason = " ".join(str(getattr(error, "orig", None) or error).split()) or type(error).__name__
        if self.failing is None:
            log.warning("The database does not take refusal counts (%s); they are kept and summed.", reason)
        self.failing = reason

    async def _write(self, batch: _Batch) -> None:
        """One transaction. A connection on which anything went wrong is not used again: its state is not known."""
        async with self._engine.connect() as connection:
            try:
                if await _is_new(connection, self._writer, batch.number, self._clock()):
                    await _add(connection, batch.rows)
                await connection.commit()
            except BaseException:
                await connection.invalidate()
                raise


async def _is_new(connection: AsyncConnection, writer: UUID, number: int, now: datetime) -> bool:
    """Notes the batch; whether it was not noted already. The first of a process clears away what long ended ones left."""
    if number == 1:
        await connection.execute(delete(refusal_flush).where(refusal_flush.c.at < now - timedelta(days=MARKS_DAYS)))
    noting = _insert(connection, refusal_flush).values(writer=writer, number=number, at=now)
    noting = noting.on_conflict_do_update(
        index_elements=["writer"],
        set_={"number": noting.excluded.number, "at": noting.excluded.at},
        where=refusal_flush.c.number < noting.excluded.number,
    )
    return (await connection.execute(noting.returning(refusal_flush.c.number))).first() is not None


async def _add(connection: AsyncConnection, rows: Sequence[Mapping[str, Any]]) -> None:
    adding = _insert(connection, refusal_minute)
    adding = adding.on_conflict_do_update(
        index_elements=_PLACE, set_={"refusals": refusal_minute.c.refusals + adding.excluded.refusals}
    )
    await connection.execute(adding, rows)


def _insert(connection: AsyncConnection, table: Table) -> postgresql.Insert | sqlite.Insert:
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)


def _moment(minute: int) -> datetime:
    return datetime.fromtimestamp(minute * 60, UTC)


async def refusals(
    engine: AsyncEngine,
    *,
    start: datetime | None = None,
    end: datetime | None = None,
    filters: Mapping[str, object] | None = None,
    after: tuple[datetime, str, str, bool] | None = None,
    limit: int = 100,
) -> list[dict[str, Any]]:
    """Rows of `refusal_minute` whose minute lies in [start, end) and that are as `filters` (of FILTERS) say, the newest
    first; `after`: minute, key, rule and shadow of the last one seen. DatabaseUnavailable.
    """
    table = refusal_minute.c
    query = select(refusal_minute).order_by(*(column.desc() for column in _PLACE)).limit(limit)
    query = query.where(*(table[_COLUMNS.get(name, name)] == value for name, value in (filters or {}).items()))
    if start is not None:
        query = query.where(table.minute >= start)
    if end is not None:
        query = query.where(table.minute < end)
    if after is not None:
        last = (literal(value, column.type) for value, column in zip(after, _PLACE, strict=True))
        query = query.where(tuple_(*_PLACE) < tuple_(*last))
    with reaching(engine.url):
        async with engine.connect() as connection:
            await connection.execution_options(isolation_level="AUTOCOMMIT")  # one statement needs no transaction
            return [dict(zip(_COUNTED, row, strict=True)) for row in await connection.execute(query)]
