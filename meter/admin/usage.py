"""/usage and /usage/records: what finance asks, as JSON or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import BeforeValidator, Field

from meter.admin.answers import answer
from meter.admin.asked import Page, query
from meter.admin.deps import DEPS, AdminDeps
from meter.admin.errors import ID, REQUEST_ID
from meter.callers.edits import Moment, Reference
from meter.callers.errors import Invalid
from meter.callers.stored import iso
from meter.ledger import reports

SUMS = (
    "requests",
    "prompt_tokens",
    "cached_prompt_tokens",
    "completion_tokens",
    "reasoning_tokens",
    "total_tokens",
    "cost_usd",
    "unpriced_requests",
)
CSV = {"Content-Type": "text/csv; charset=utf-8", "Content-Disposition": 'attachment; filename="usage.csv"'}
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What makes a spreadsheet run a cell's text. Tags come from callers. https://owasp.org/www-community/attacks/CSV_Injection"""


def _moment(value: object) -> object:
    """A day is its first moment, UTC; an offset's unescaped + came as a space."""
    if isinstance(value, str) and len(value) == len("2030-01-31"):
        return f"{value}T00:00:00Z"
    return value.replace(" ", "+") if isinstance(value, str) and "T" in value else value


def _listed(value: object) -> object:
    return value.split(",") if isinstance(value, str) else value


When = Annotated[Moment, BeforeValidator(_moment)]
Groups = Annotated[tuple[Reference, ...], BeforeValidator(_listed), Field(max_length=8)]


class Span(Page):
    start: When | None = Field(None, alias="from")
    end: When | None = Field(None, alias="to")


class UsageQuery(Span):
    page_size: Annotated[int, Field(ge=1, le=1_000)] = 1_000
    group_by: Groups = ()
    bucket: Literal["hour", "day", "month"] | None = None
    format: Literal["json", "csv"] = "json"


class RecordsQuery(Span):
    key: Reference | None = None
    team: Reference | None = None
    model: Reference | None = None
    backend: Reference | None = None
    route: Reference | None = None
    verdict: Reference | None = None
    ending: Reference | None = None
    endpoint: Reference | None = None
    request_id: Reference | None = None


def routes(prefix: str) -> list[web.RouteDef]:
    return [web.get(f"{prefix}/usage", usage), web.get(f"{prefix}/usage/records", records)]


async def usage(request: web.Request) -> web.StreamResponse:
    """Sums over records that started in [from, to); without them, over this month until now."""
    deps, asked = request.app[DEPS], query(request, UsageQuery)
    if asked.cursor and not (asked.group_by or asked.bucket):
        raise Invalid([("cursor", "must be left out: without group_by and bucket there is one row")])
    start, end = _span(asked, deps.clock())
    if asked.format == "csv":
        return await _csv(request, asked, start, end)
    page = await _report(deps, asked, start, end, asked.cursor)
    return answer({"from": iso(start), "to": iso(end), "rows": page.rows, "next": page.next})


async def records(request: web.Request) -> web.Response:
    """The records themselves, the newest first."""
    asked = query(request, RecordsQuery)
    try:
        page = await reports.usage_records(
            request.app[DEPS].engine,
            start=asked.start,
            end=asked.end,
            filters=asked.model_dump(include=set(reports.FILTERS), exclude_none=True),
            cursor=asked.cursor,
            page_size=asked.page_size,
        )
    except reports.BadQuery as wrong:
        raise Invalid([(wrong.field, str(wrong))]) from None
    return answer({"items": page.rows, "next": page.next})


def _span(asked: Span, now: datetime) -> tuple[datetime, datetime]:
    end = asked.end or now.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
    month = now.astimezone(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return asked.start or min(month, end), end


async def _report(
    deps: AdminDeps, asked: UsageQuery, start: datetime, end: datetime, cursor: str | None
) -> reports.Page:
    try:
        return await reports.usage_report(
            deps.engine,
            start=start,
            end=end,
            group_by=asked.group_by,
            bucket=asked.bucket,
            cursor=cursor,
            page_size=asked.page_size,
        )
    except reports.BadQuery as wrong:
        raise Invalid([(wrong.field, str(wrong))]) from None


async def _csv(request: web.Request, asked: UsageQuery, start: datetime, end: datetime) -> web.StreamResponse:
    """The whole report, page by page; nothing is sent before the first page is there, so that errors are answers."""
    columns = [*(["bucket"] if asked.bucket else []), *asked.group_by, *SUMS]
    pages = _pages(request.app[DEPS], asked, start, end)
    first = await anext(pages)
    response = web.StreamResponse(headers={**CSV, REQUEST_ID: request[ID]})
    await response.prepare(request)
    if request.method == "HEAD":  # a stream would send its body all the same
        return response
    await response.write(_lines([columns]) + _lines(_cells(columns, first)))
    try:
        async for rows in pages:
            await response.write(_lines(_cells(columns, rows)))
        await response.write_eof()
    except Exception:
        if request.transport is not None:
            request.transport.abort()  # half a report must not look like a whole one
        raise
    return response


async def _pages(
    deps: AdminDeps, asked: UsageQuery, start: datetime, end: datetime
) -> AsyncIterator[list[dict[str, Any]]]:
    cursor = asked.cursor
    while True:
        page = await _report(deps, asked, start, end, cursor)
        yield page.rows
        if (cursor := page.next) is None:
            return


def _cells(columns: list[str], rows: list[dict[str, Any]]) -> list[list[object]]:
    return [[_harmless(row[column]) for column in columns] for row in rows]


def _harmless(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def _lines(rows: list[list[str]] | list[list[object]]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()
