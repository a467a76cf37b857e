"""/refusals: who was refused by which rule, minute by minute; also who would be by limits that are only tried out."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from typing import Any

from aiohttp import web

from meter.admin.answers import answer
from meter.admin.asked import cursor_of, moment_in, not_of_this_list, position, query
from meter.admin.deps import DEPS
from meter.admin.usage import Span
from meter.callers.edits import Reference
from meter.callers.errors import Invalid
from meter.callers.stored import iso
from meter.ledger.refusals import FILTERS, refusals

LIST = "refusals"

Place = tuple[datetime, str, str, bool]
"""Minute, key, rule, shadow: what one row is about."""


class RefusalsQuery(Span):
    key: Reference | None = None
    rule: Reference | None = None
    shadow: bool | None = None


def routes(prefix: str) -> list[web.RouteDef]:
    return [web.get(f"{prefix}/refusals", listed)]


async def listed(request: web.Request) -> web.Response:
    """Counts of the minutes that begin in [from, to), the newest first."""
    asked = query(request, RefusalsQuery)
    if asked.start and asked.end and asked.end < asked.start:
        raise Invalid([("to", "must not be before from")])
    rows = await refusals(
        request.app[DEPS].engine,
        start=asked.start,
        end=asked.end,
        filters=asked.model_dump(include=set(FILTERS), exclude_none=True),
        after=_place(asked.cursor),
        limit=asked.page_size + 1,
    )
    shown = rows[: asked.page_size]
    return answer(
        {"items": [_item(row) for row in shown], "next": _cursor(shown[-1]) if len(rows) > len(shown) else None}
    )


def _item(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "minute": iso(row["minute"])}


def _cursor(row: dict[str, Any]) -> str:
    return cursor_of(LIST, row["minute"].isoformat(), row["key_id"], row["rule"], int(row["shadow"]))


def _place(cursor: str | None) -> Place | None:
    match position(LIST, cursor):
        case None:
            return None
        case [str(minute), str(key_id), str(rule), int(shadow)] if "\x00" not in key_id + rule:
            with suppress(ValueError):
                return moment_in(minute), key_id, rule, bool(shadow)
    raise not_of_this_list()
