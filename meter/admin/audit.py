"""/audit: who changed what, when, before and after; the newest first. Never a secret or a hash."""

from __future__ import annotations

from typing import Any, Literal

from aiohttp import web
from sqlalchemy import RowMapping

from meter.admin.answers import answer
from meter.admin.asked import Page, cursor_of, not_of_this_list, position, query
from meter.admin.deps import DEPS
from meter.callers.edits import Reference
from meter.callers.stored import iso, utc


class AuditQuery(Page):
    entity: Literal["key", "tier", "team", "price"] | None = None
    entity_id: Reference | None = None
    actor: Reference | None = None


def routes(prefix: str) -> list[web.RouteDef]:
    return [web.get(f"{prefix}/audit", audit)]


async def audit(request: web.Request) -> web.Response:
    asked = query(request, AuditQuery)
    filters = asked.model_dump(include={"entity", "entity_id", "actor"}, exclude_none=True)
    found = await request.app[DEPS].registry.audit(_before(asked.cursor), asked.page_size + 1, filters)
    shown = found[: asked.page_size]
    last = cursor_of("audit", shown[-1]["id"]) if len(found) > len(shown) else None
    return answer({"items": [_shown(row) for row in shown], "next": last})


def _shown(row: RowMapping) -> dict[str, Any]:
    return {**row, "at": iso(utc(row["at"]))}


def _before(cursor: str | None) -> int | None:
    match position("audit", cursor):
        case None:
            return None
        case [int(number)] if 0 <= number < 2**63:
            return number
    raise not_of_this_list()
