"""/prices: effective from a moment on; the past is never edited."""

from __future__ import annotations

from aiohttp import web

from meter.admin.access import TOKEN
from meter.admin.answers import answer
from meter.admin.asked import Page, body, cursor_of, not_of_this_list, position, query
from meter.admin.deps import DEPS
from meter.callers.edits import PriceDraft, read


def routes(prefix: str) -> list[web.RouteDef]:
    return [web.get(f"{prefix}/prices", list_prices), web.post(f"{prefix}/prices", create)]


async def list_prices(request: web.Request) -> web.Response:
    page = query(request, Page)
    found = await request.app[DEPS].registry.prices(_after(page.cursor), page.page_size + 1)
    shown = found[: page.page_size]
    last = cursor_of("prices", shown[-1].id) if len(found) > len(shown) else None
    return answer({"items": [price.shown() for price in shown], "next": last})


async def create(request: web.Request) -> web.Response:
    deps = request.app[DEPS]
    price = await deps.registry.add_price(request[TOKEN].name, read(PriceDraft, await body(request)))
    deps.directory.nudge()
    return answer(price.shown(), 201)


def _after(cursor: str | None) -> int:
    match position("prices", cursor):
        case None:
            return 0
        case [int(number)] if 0 <= number < 2**63:
            return number
    raise not_of_this_list()
