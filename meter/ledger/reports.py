"""What finance asks: sums of usage by whatever it is grouped by, and the records themselves. In pages, in UTC.

Sums come from the hourly roll-up where bounds are whole hours and nothing is asked that it does not have; else from the
records. Both give the same figures.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, get_args
from uuid import UUID

import msgspec
from sqlalchemy import ColumnElement, FromClause, Row, Select, case, func, literal, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from meter.ledger.database import reaching
from meter.ledger.pricing import usd
from meter.ledger.schema import USAGE_SUMS, usage_hourly, usage_record

Bucket = Literal["hour", "day", "month"]
GROUPS = ("key", "team", "model", "backend", "route")
"""What a report can be grouped by; also `tag:<name>`."""
FILTERS = ("key", "team", "model", "backend", "route", "verdict", "ending", "endpoint", "request_id")
"""What records can be chosen by."""
_COLUMNS = {"key": "key_id", "team": "team_id", "model": "model_requested"}
_FORMATS = {
    "hour": ("%Y-%m-%dT%H:00:00Z", 'YYYY-MM-DD"T"HH24:00:00"Z"'),
    "day": ("%Y-%m-%dT00:00:00Z", 'YYYY-MM-DD"T"00:00:00"Z"'),
    "month": ("%Y-%m-01T00:00:00Z", 'YYYY-MM"-01T00:00:00Z"'),
}
"""How SQLite and Postgres write the beginning of a bucket."""
_RECORD = [column.name for column in usage_record.columns]
_SHOWN_SUMS = ("requests", *USAGE_SUMS[:4], "cost_nanousd", "unpriced")


class BadQuery(ValueError):
    """The question makes no sense. `field` names the part of it, the message says what would be right."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Page(NamedTuple):
    """Rows as JSON has them, and the cursor of the next page (None: this is the last)."""

    rows: list[dict[str, Any]]
    next: str | None


async def usage_report(
    engine: AsyncEngine,
    *,
    start: datetime,
    end: datetime,
    group_by: Sequence[str] = (),
    bucket: Bucket | None = None,
    cursor: str | None = None,
    page_size: int = 1_000,
) -> Page:
    """Sums over records that started in [start, end), one row for each bucket and group that has any.

    A row has a field for each of `group_by` (null: none), `bucket` (its beginning, UTC) if asked, `requests`, the
    contract's token sums and `total_tokens`, `cost_usd` as a decimal text, `unpriced_requests` that cost nothing because
    they had no price. Ungrouped: one row. BadQuery, DatabaseUnavailable.
    """
    _check_bounds(start, end)
    _check_groups(group_by, bucket)
    postgres = engine.dialect.name == "postgresql"
    hourly = _whole_hour(start) and _whole_hour(end) and all(group in GROUPS for group in group_by)
    rows, moment = _from_hourly() if hourly else _from_records(group_by)
    keys = [_bucket(moment, bucket, postgres)] if bucket else []
    keys += [func.coalesce(rows.c[group], "") for group in group_by]
    query = select(*keys, *(func.coalesce(func.sum(rows.c[name]), 0) for name in _SHOWN_SUMS))
    query = query.where(moment >= start, moment < end).limit(page_size + 1)
    if keys:
        query = query.group_by(*keys).order_by(*keys)
        if cursor is not None:
            query = query.where(tuple_(*keys) > tuple_(*map(literal, _texts(cursor, len(keys)))))
    found = await _fetch(engine, query)
    names = [*(["bucket"] if bucket else []), *group_by]
    last = [str(value) for value in found[page_size - 1][: len(keys)]] if len(found) > page_size else None
    return Page([_sums(names, row) for row in found[:page_size]], _cursor(last))


async def usage_records(
    engine: AsyncEngine,
    *,
    start: datetime | None = None,
    end: datetime | None = None,
    filters: Mapping[str, str] | None = None,
    cursor: str | None = None,
    page_size: int = 100,
) -> Page:
    """Records that started in [start, end) and are as `filters` (of FILTERS) say, the newest first.

    A row has the columns of `usage_record`, `total_tokens` and `cost_usd` (null without a price). BadQuery,
    DatabaseUnavailable.
    """
    table = usage_record.c
    order = (table.started_at, table.exchange_id)
    query = select(usage_record).order_by(*(column.desc() for column in order)).limit(page_size + 1)
    _check_bounds(start, end)
    if start is not None:
        query = query.where(table.started_at >= start)
    if end is not None:
        query = query.where(table.started_at < end)
    query = query.where(*(_condition(name, value) for name, value in (filters or {}).items()))
    if cursor is not None:
        started_at, exchange_id = _position(cursor)
        query = query.where(
            tuple_(*order)
            < tuple_(literal(started_at, table.started_at.type), literal(exchange_id, table.exchange_id.type))
        )
    found = await _fetch(engine, query)
    last = (
        [found[page_size - 1].started_at.isoformat(), str(found[page_size - 1].exchange_id)]
        if len(found) > page_size
        else None
    )
    return Page([_record(row) for row in found[:page_size]], _cursor(last))


# questions


def _check_bounds(start: datetime | None, end: datetime | None) -> None:
    for field, moment in (("from", start), ("to", end)):
        if moment is not None and moment.tzinfo is None:
            raise BadQuery(field, "must have a time zone, such as 2026-01-01T00:00:00Z")
    if start is not None and end is not None and end < start:
        raise BadQuery("to", "must not be before from")


def _check_groups(group_by: Sequence[str], bucket: str | None) -> None:
    for group in group_by:
        tag = group.removeprefix("tag:") if group.startswith("tag:") else None
        if group not in GROUPS and (not tag or '"' in tag or "\\" in tag):
            raise BadQuery("group_by", f"{group!r} is none of {', '.join(GROUPS)}, tag:<name>")
    if len(set(group_by)) < len(group_by):
        raise BadQuery("group_by", "names the same thing twice")
    if bucket is not None and bucket not in get_args(Bucket):
        raise BadQuery("bucket", f"must be one of {', '.join(get_args(Bucket))}")


def _condition(name: str, value: str) -> ColumnElement[bool]:
    if name not in FILTERS:
        raise BadQuery(name, f"is no filter; there are {', '.join(FILTERS)}")
    column = usage_record.c[_COLUMNS.get(name, name)]
    if name != "request_id":
        return column == value.replace("\0", "")
    try:
        return column == UUID(value)
    except ValueError:
        raise BadQuery(name, "must be a UUID") from None


def _whole_hour(moment: datetime) -> bool:
    utc = moment.astimezone(UTC)
    return (utc.minute, utc.second, utc.microsecond) == (0, 0, 0)


# sources: a row of each has the names of GROUPS and _SHOWN_SUMS


def _from_hourly() -> tuple[FromClause, ColumnElement[Any]]:
    table = usage_hourly.c
    keys = (table.key_id.label("key"), table.team_id.label("team"), table.model, table.backend, table.route)
    rows = select(*keys, table.hour, *(table[name] for name in _SHOWN_SUMS)).subquery()
    return rows, rows.c.hour


def _from_records(group_by: Sequence[str]) -> tuple[FromClause, ColumnElement[Any]]:
    table = usage_record.c
    keys = [table[_COLUMNS.get(group, group)].label(group) for group in GROUPS]
    keys += [table.tags[group[4:]].as_string().label(group) for group in group_by if group.startswith("tag:")]
    unpriced = case((table.cost_nanousd.is_(None), 1), else_=0).label("unpriced")
    sums = [literal(1).label("requests"), *(table[name] for name in _SHOWN_SUMS[1:-1]), unpriced]
    rows = select(*keys, table.started_at, *sums).subquery()
    return rows, rows.c.started_at


def _bucket(moment: ColumnElement[Any], bucket: Bucket, postgres: bool) -> ColumnElement[Any]:
    in_sqlite, in_postgres = _FORMATS[bucket]
    if postgres:
        return func.to_char(func.timezone("UTC", moment), in_postgres)
    return func.strftime(in_sqlite, moment)


async def _fetch(engine: AsyncEngine, query: Select[Any]) -> Sequence[Row[Any]]:
    with reaching(engine.url):
        async with engine.connect() as connection:
            await _no_transaction(connection)
            rows: Sequence[Row[Any]] = (await connection.execute(query)).all()
            return rows


async def _no_transaction(connection: AsyncConnection) -> None:
    """One statement sees one state by itself; on SQLite a transaction would hold up the shipper."""
    await connection.execution_options(isolation_level="AUTOCOMMIT")


# answers


def _sums(names: Sequence[str], row: Row[Any]) -> dict[str, Any]:
    keys = {name: (value or None) for name, value in zip(names, row, strict=False)}
    figures = {name: int(value) for name, value in zip(_SHOWN_SUMS, row[len(names) :], strict=True)}
    cost, unpriced = figures.pop("cost_nanousd"), figures.pop("unpriced")
    total = figures["prompt_tokens"] + figures["completion_tokens"]
    return {**keys, **figures, "total_tokens": total, "cost_usd": usd(cost), "unpriced_requests": unpriced}


def _record(row: Row[Any]) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(dict(zip(_RECORD, row, strict=True)))
    values["total_tokens"] = row.prompt_tokens + row.completion_tokens
    values["cost_usd"] = None if row.cost_nanousd is None else usd(row.cost_nanousd)
    return values


# cursors: the last row's place in the order, as text


def _cursor(place: list[str] | None) -> str | None:
    return None if place is None else base64.urlsafe_b64encode(msgspec.json.encode(place)).decode().rstrip("=")


def _texts(cursor: str, count: int) -> list[str]:
    try:
        place = msgspec.json.decode(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)), type=list[str])
    except (ValueError, binascii.Error, msgspec.DecodeError):
        place = []
    if len(place) != count or any("\0" in text for text in place):
        raise BadQuery("cursor", "must be the `next` of the page before, with the same question")
    return place


def _position(cursor: str) -> tuple[datetime, UUID]:
    started_at, exchange_id = _texts(cursor, 2)
    try:
        moment = datetime.fromisoformat(started_at)
        if moment.tzinfo is not None:
            return moment.astimezone(UTC), UUID(exchange_id)
    except (ValueError, OverflowError):
        pass
    raise BadQuery("cursor", "must be the `next` of the page before")
