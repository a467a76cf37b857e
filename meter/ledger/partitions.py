"""The months of `usage_record` on Postgres: a partition each, made ahead, and on demand for what is late or early."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

MONTHS_AHEAD = 3
_LOCK = 0x77656973
"""Held while partitions are made, so that two processes never make the same one."""


async def ensure_partitions(connection: AsyncConnection, around: date, ahead: int = 0) -> None:
    """Makes the partitions of `around`'s month and the `ahead` following ones, where they are missing.

    Within the caller's transaction. A partition is filled in beside the table and then attached, since that, unlike
    CREATE TABLE … PARTITION OF, waits for no reader and no writer:
    https://www.postgresql.org/docs/current/ddl-partitioning.html#DDL-PARTITIONING-DECLARATIVE-MAINTENANCE
    """
    if connection.dialect.name != "postgresql":
        return
    for year, month in _months(around, ahead):
        name = f"usage_record_{year:04}{month:02}"
        if await connection.scalar(text("SELECT to_regclass(:name)"), {"name": name}) is None:
            await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
            await connection.execute(text(_MAKE.format(name=name)))
            if not await connection.scalar(text(_ATTACHED), {"name": name}):
                lower, upper = _first_of(year, month), _first_of(*_following(year, month))
                await connection.execute(text(_ATTACH.format(name=name, lower=lower, upper=upper)))


_MAKE = (
    "CREATE TABLE IF NOT EXISTS {name} (LIKE usage_record INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING INDEXES)"
)
_ATTACH = "ALTER TABLE usage_record ATTACH PARTITION {name} FOR VALUES FROM ('{lower}') TO ('{upper}')"
_ATTACHED = "SELECT relispartition FROM pg_class WHERE oid = to_regclass(:name)"


def _months(around: date, ahead: int) -> Iterator[tuple[int, int]]:
    month = (around.year, around.month)
    for _ in range(ahead + 1):
        yield month
        month = _following(*month)


def _following(year: int, month: int) -> tuple[int, int]:
    return (year + 1, 1) if month == 12 else (year, month + 1)


def _first_of(year: int, month: int) -> str:
    return f"{year:04}-{month:02}-01 00:00:00+00"
