"""What one slot of the quota store used lately, summed by key and moment: from the ledger, and from single records.

The ledger is asked once, by the index on (key_id, started_at). A record counts at its end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import BigInteger, ColumnElement, Select, case, cast, false, func, select, union
from sqlalchemy.ext.asyncio import AsyncConnection

from meter.ledger.record import UsageRecord
from meter.ledger.schema import api_key, usage_hourly, usage_record
from meter.refill.reach import Reach

LONGEST_ANSWER = timedelta(hours=2)
"""A record is found by its start. One that ran longer than this and ended within the windows may be missed."""

MOST_LEFT_OUT = 20_000
"""As many exchanges can be named in one statement (SQLite and asyncpg take 32,766 values)."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Whose usage: a team's with that of all its keys, or one key's."""

    team: str | None
    key: str | None

    def is_team_of(self, record: UsageRecord) -> bool:
        return self.team is not None and record.team_id == self.team


@dataclass(frozen=True, slots=True)
class Look:
    """A look back at one moment. `now` is UTC by this machine, `ahead` the seconds that the store's clock is before it."""

    slot: Slot
    reach: Reach
    now: datetime
    ahead: float = 0.0

    @property
    def store_ms(self) -> int:
        """The moment in the store's time, milliseconds since 1970."""
        return _ms(self.now) + self.ahead_ms

    @property
    def ahead_ms(self) -> int:
        return round(self.ahead * 1_000)


class Sum(NamedTuple):
    """Tokens of one key that ended before the moment `at`, and within a step of it; `burst` is the newest start of a
    request that was let in as a burst. Both are milliseconds of the store's time."""

    key: str
    in_team: bool
    primary: bool
    at: int
    tokens: int
    burst: int | None


# ---- from single records ---------------------------------------------------------------------------------------------


def of_records(look: Look, records: Iterable[UsageRecord], *, begun: bool = False) -> Iterator[Sum]:
    """`begun`: they have not ended, so that only the bursts count that they opened."""
    since = look.store_ms - look.reach.far * 1_000
    for record in records:
        started = _ms(record.started_at) + look.ahead_ms
        ended = started + record.duration_ms + 1
        if ended >= since:
            tokens = 0 if begun else record.total_tokens
            burst = started if record.verdict == "burst" else None
            yield Sum(
                record.key_id, look.slot.is_team_of(record), record.route == "primary", ended, tokens, burst
            )  # fmt: skip


def _ms(moment: datetime) -> int:
    """To the next whole millisecond: what is booked late never leaves a window early."""
    return -(-(moment - _EPOCH) // _MS)


_EPOCH, _MS = datetime(1970, 1, 1, tzinfo=UTC), timedelta(milliseconds=1)


# ---- from the ledger -------------------------------------------------------------------------------------------------


async def of_ledger(connection: AsyncConnection, look: Look, left_out: Collection[UUID]) -> list[Sum]:
    """All that ended within the look's reach but for the exchanges `left_out`, in order of time."""
    query = _query(look, left_out, postgres=connection.dialect.name == "postgresql")
    return [
        Sum(row.key_id, bool(row.in_team), bool(row.on_primary), int(row.at), int(row.tokens), _whole(row.burst))
        for row in await connection.execute(query)
    ]


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


def _query(look: Look, left_out: Collection[UUID], *, postgres: bool) -> Select[Any]:
    table, slot, reach = usage_record.c, look.slot, look.reach
    started = _started_ms(postgres) + look.ahead_ms
    ended = started + table.duration_ms + 1
    since = look.store_ms - reach.far * 1_000
    rows = (
        select(
            table.key_id,
            (table.team_id == slot.team if slot.team is not None else false()).label("in_team"),
            (table.route == "primary").label("on_primary"),
            ended.label("ended"),
            (table.prompt_tokens + table.completion_tokens).label("tokens"),
            case((table.verdict == "burst", started)).label("burst"),
        )
        .where(table.started_at >= look.now - timedelta(seconds=reach.far) - LONGEST_ANSWER)
        .where(_whose(look), ended >= since, table.exchange_id.not_in(left_out))
        .subquery()
    )
    step = case((rows.c.ended >= look.store_ms - reach.near * 1_000, reach.fine), else_=reach.coarse) * 1_000
    stepped = select(
        rows.c.key_id,
        func.coalesce(rows.c.in_team, false()).label("in_team"),
        rows.c.on_primary,
        ((rows.c.ended // step + 1) * step).label("at"),
        rows.c.tokens,
        rows.c.burst,
    ).subquery()
    keys = (stepped.c.key_id, stepped.c.in_team, stepped.c.on_primary, stepped.c.at)
    sums = (func.sum(stepped.c.tokens).label("tokens"), func.max(stepped.c.burst).label("burst"))
    return select(*keys, *sums).group_by(*keys).order_by(stepped.c.at)


def _whose(look: Look) -> ColumnElement[bool]:
    """The key; or a team's keys as they are now, and those that it had: the hourly sums remember them."""
    column = usage_record.c.key_id
    if look.slot.team is None:
        return column == look.slot.key
    hour = (look.now - timedelta(seconds=look.reach.far) - LONGEST_ANSWER).replace(minute=0, second=0, microsecond=0)
    had = select(usage_hourly.c.key_id).where(usage_hourly.c.hour >= hour, usage_hourly.c.team_id == look.slot.team)
    has = select(api_key.c.id).where(api_key.c.team == look.slot.team)
    return column.in_(union(has, had).scalar_subquery())


def _started_ms(postgres: bool) -> ColumnElement[int]:
    """`started_at` in whole milliseconds since 1970, rounded up."""
    column = usage_record.c.started_at
    if postgres:
        return cast(func.ceil(func.extract("epoch", column) * 1_000), BigInteger)
    # SQLite's own dates are whole milliseconds within, so that this is exact; what it cut off is made good by one more
    return cast(func.round((func.julianday(column) - 2440587.5) * 86_400_000), BigInteger) + 1
