"""A batch of records into the tables, in the caller's transaction: each exchange once, and the hourly sums with it.

The batch goes into a temporary staging table first. From there, rows whose exchange the ledger has already are left out,
and exactly the others are added to the sums of their hour. A batch may so be sent any number of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import msgspec
from sqlalchemy import (
    Column,
    ColumnElement,
    FromClause,
    Insert,
    MetaData,
    Select,
    Table,
    case,
    exists,
    func,
    insert,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from meter.ledger.record import UsageRecord, storable
from meter.ledger.schema import USAGE_SUMS, usage_hourly, usage_record

_NAMES = [column.name for column in usage_record.columns]
_TAGS = _NAMES.index("tags")
_fields = attrgetter(*_NAMES)
_HOUR_KEYS = [column.name for column in usage_hourly.primary_key]
_HOUR_SUMS = ["requests", *USAGE_SUMS, "cost_nanousd", "unpriced"]

_staging = Table(
    "usage_staging",
    MetaData(),
    *(Column(column.name, column.type) for column in usage_record.columns),
    prefixes=["TEMPORARY"],
)


async def merge(connection: AsyncConnection, records: Sequence[UsageRecord]) -> int:
    """Books the records that the ledger does not have yet, and how many those were. Errors are the driver's own."""
    if connection.dialect.name == "postgresql":
        return await _merge_postgres(connection, records)
    return await _merge_sqlite(connection, records)


async def _merge_postgres(connection: AsyncConnection, records: Sequence[UsageRecord]) -> int:
    await connection.execute(text(_POSTGRES_STAGING))
    driver: Any = (await connection.get_raw_connection()).driver_connection
    await driver.copy_records_to_table("usage_staging", records=[_row(record) for record in records], columns=_NAMES)
    new: int = (await connection.execute(_POSTGRES_MERGE)).scalar_one()
    return new


async def _merge_sqlite(connection: AsyncConnection, records: Sequence[UsageRecord]) -> int:
    """The write lock is held, so what is not there now is new; doubles within the batch count once."""
    await connection.run_sync(_staging.create, checkfirst=True)
    await connection.execute(_staging.delete())
    once = {(record.exchange_id, record.started_at): record for record in reversed(records)}
    await connection.execute(
        insert(_staging), [dict(zip(_NAMES, _values(each), strict=True)) for each in once.values()]
    )
    await connection.execute(_SQLITE_DROP_KNOWN)
    await connection.execute(_SQLITE_HOURLY)
    return (await connection.execute(_SQLITE_RECORDS)).rowcount


def _row(record: UsageRecord) -> tuple[Any, ...]:
    """As asyncpg's COPY takes it: tags as JSON text."""
    values = _values(record)
    tags = msgspec.json.encode(values[_TAGS]).decode()
    return (*values[:_TAGS], tags, *values[_TAGS + 1 :])


def _values(record: UsageRecord) -> tuple[Any, ...]:
    values: tuple[Any, ...] = _fields(record)
    if any(type(value) is str and "\0" in value for value in (*values, *record.tags, *record.tags.values())):
        return _values(storable(record))
    return values


_POSTGRES_STAGING = """CREATE TEMPORARY TABLE IF NOT EXISTS usage_staging (LIKE usage_record) ON COMMIT DELETE ROWS"""


def _hourly(hour: ColumnElement[Any], rows: FromClause) -> Select[Any]:
    """The sums of `rows`, as rows of usage_hourly, in one order for everybody: two that add at once never deadlock."""
    column = rows.c
    sums: list[ColumnElement[Any]] = [func.sum(column[name]) for name in USAGE_SUMS]
    keys = [
        hour,
        column.key_id,
        func.coalesce(column.team_id, ""),
        column.model_requested,
        column.backend,
        column.route,
    ]
    unpriced = func.sum(case((column.cost_nanousd.is_(None), 1), else_=0))
    cost = func.sum(func.coalesce(column.cost_nanousd, 0))
    return (
        select(*keys, func.count(), *sums, cost, unpriced)
        .where(column.exchange_id.is_not(None))  # SQLite tells ON CONFLICT from a join by the WHERE before it
        .group_by(*keys)
        .order_by(*keys)
    )


def _add_hourly(into: postgresql.Insert | sqlite.Insert, sums: Select[Any]) -> Insert:
    adding = into.from_select([*_HOUR_KEYS, *_HOUR_SUMS], sums)
    assert isinstance(adding, (postgresql.Insert, sqlite.Insert))
    return adding.on_conflict_do_update(
        index_elements=_HOUR_KEYS,
        set_={name: usage_hourly.c[name] + adding.excluded[name] for name in _HOUR_SUMS},
    )


def _postgres_merge() -> Select[Any]:
    """One statement: insert what is new, add exactly that to the sums, count it."""
    added = postgresql.insert(usage_record).from_select(_NAMES, select(_staging)).on_conflict_do_nothing()
    fresh = added.returning(*usage_record.columns).cte("fresh")
    hour = func.date_trunc("hour", fresh.c.started_at, "UTC")
    rolled = _add_hourly(postgresql.insert(usage_hourly), _hourly(hour, fresh)).cte("rolled")
    return select(func.count()).select_from(fresh).add_cte(rolled)


_POSTGRES_MERGE = _postgres_merge()

_SQLITE_DROP_KNOWN = _staging.delete().where(
    exists().where(
        usage_record.c.exchange_id == _staging.c.exchange_id, usage_record.c.started_at == _staging.c.started_at
    )
)
_SQLITE_HOURLY = _add_hourly(
    sqlite.insert(usage_hourly),
    _hourly(func.strftime("%Y-%m-%d %H:00:00.000000", _staging.c.started_at), _staging),
)
_SQLITE_RECORDS = insert(usage_record).from_select(_NAMES, select(_staging))
