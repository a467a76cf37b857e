"""The admin site: REST for the people who run it, under /admin/v1. One room a subject; here they come together."""

from __future__ import annotations

from aiohttp import web

from meter.admin import audit, keys, prices, refusals, terms, usage
from meter.admin.access import with_token
from meter.admin.answers import answer
from meter.admin.asked import MAX_BODY
from meter.admin.deps import DEPS, AdminDeps
from meter.admin.errors import errors_as_json
from meter.admin.health import open_routes

PREFIX = "/admin/v1"


def admin_app(deps: AdminDeps) -> web.Application:
    """Takes bodies of up to 4 MiB; everything but health and metrics needs a token."""
    app = web.Application(middlewares=[errors_as_json, with_token], client_max_size=MAX_BODY)
    app[DEPS] = deps
    app.add_routes(open_routes(deps.condition, deps.metrics))
    for room in (keys, terms, prices, usage, refusals, audit):
        app.add_routes(room.routes(PREFIX))
    app.router.add_get(f"{PREFIX}/state", state)
    return app


async def state(request: web.Request) -> web.Response:
    return answer(request.app[DEPS].state())
