"""/tiers and /teams: the limits by name; a team's live windows."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from meter.admin.access import TOKEN
from meter.admin.answers import Refusal, answer
from meter.admin.asked import Page, body, cursor_of, expected, makes_anew, name_of, not_of_this_list, position, query
from meter.admin.deps import DEPS
from meter.admin.reading import all_terms, terms_named
from meter.admin.windows import view_of_team
from meter.callers.book import team_in_force, terms_in_force
from meter.callers.errors import NotFound
from meter.callers.stored import StoredTerms, TermsKind


def routes(prefix: str) -> list[web.RouteDef]:
    tiers, teams = f"{prefix}/tiers", f"{prefix}/teams"
    return [*_routes("tier", tiers), *_routes("team", teams), web.get(f"{teams}/{{name}}/windows", windows)]


def _routes(kind: TermsKind, path: str) -> list[web.RouteDef]:
    one = f"{path}/{{name}}"
    return [
        web.get(path, _lister(kind)),
        web.get(one, _shower(kind)),
        web.put(one, _putter(kind)),
        web.delete(one, _deleter(kind)),
    ]


async def windows(request: web.Request) -> web.Response:
    return answer(await view_of_team(request.app[DEPS], name_of(request, "name")))


def _lister(kind: TermsKind) -> Handler:
    async def list_terms(request: web.Request) -> web.Response:
        page = query(request, Page)
        behind = _behind(kind, page.cursor)
        found = [terms for terms in await all_terms(request.app[DEPS], kind) if behind is None or terms.name > behind]
        shown = found[: page.page_size]
        last = cursor_of(kind, shown[-1].name) if len(found) > len(shown) else None
        return answer({"items": [_shown(kind, terms) for terms in shown], "next": last})

    return list_terms


def _shower(kind: TermsKind) -> Handler:
    async def show(request: web.Request) -> web.Response:
        terms = await terms_named(request.app[DEPS], kind, name_of(request, "name"))
        return answer(_shown(kind, terms), version=terms.version)

    return show


def _putter(kind: TermsKind) -> Handler:
    async def put(request: web.Request) -> web.Response:
        deps, actor, name = request.app[DEPS], request[TOKEN].name, name_of(request, "name")
        if makes_anew(request):
            terms = await deps.registry.create_terms(actor, kind, name, await body(request))
        else:
            versions = await _expected(request, kind, name)
            terms = await deps.registry.replace_terms(actor, kind, name, versions, await body(request))
        deps.directory.nudge()
        return answer(_shown(kind, terms), 201 if makes_anew(request) else 200, version=terms.version)

    return put


async def _expected(request: web.Request, kind: TermsKind, name: str) -> frozenset[int] | None:
    """As `expected`, but whoever wants to make what is not there yet is told how."""
    if "If-Match" not in request.headers:
        try:
            await terms_named(request.app[DEPS], kind, name)
        except NotFound:
            message = f"There is no {kind} {name!r} yet: to create it, send If-None-Match: *."
            raise Refusal(428, "precondition_required", message, param="If-None-Match") from None
    return expected(request)


def _deleter(kind: TermsKind) -> Handler:
    async def delete(request: web.Request) -> web.Response:
        deps, name = request.app[DEPS], name_of(request, "name")
        await deps.registry.delete_terms(request[TOKEN].name, kind, name, expected(request))
        deps.directory.nudge()
        return web.Response(status=204)

    return delete


def _shown(kind: TermsKind, terms: StoredTerms) -> dict[str, Any]:
    """The fields that were given, and with the defaults all that are in force."""
    in_force = terms_in_force(terms.policy, {})[0] if kind == "tier" else team_in_force(terms.policy)[0]
    effective = in_force.model_dump(mode="json")
    return {"name": terms.name, "managed_by": terms.managed_by, **terms.policy, "effective": effective}


def _behind(kind: TermsKind, cursor: str | None) -> str | None:
    match position(kind, cursor):
        case None:
            return None
        case [str(name)]:
            return name
    raise not_of_this_list()
