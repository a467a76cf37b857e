"""/keys: make, list, show, change, rotate, delete; a key's override of its tier, and its live windows."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from typing import Any

from aiohttp import web

from meter.admin.access import TOKEN
from meter.admin.answers import Refusal, answer
from meter.admin.asked import Page, body, cursor_of, expected, moment_in, name_of, not_of_this_list, position, query
from meter.admin.deps import DEPS, AdminDeps
from meter.admin.reading import key_and_tier, page_of_keys
from meter.admin.windows import view_of_key
from meter.callers.book import terms_in_force
from meter.callers.edits import KeyDraft, KeyPatch, Rotation, read
from meter.callers.stored import StoredKey, StoredTerms, iso

ONCE = {"Cache-Control": "no-store"}
"""A secret is in the answer."""


def routes(prefix: str) -> list[web.RouteDef]:
    one = f"{prefix}/keys/{{id}}"
    return [
        web.post(f"{prefix}/keys", create),
        web.get(f"{prefix}/keys", list_keys),
        web.get(one, show),
        web.patch(one, change),
        web.delete(one, delete),
        web.post(f"{one}/rotate", rotate),
        web.get(f"{one}/quota", show_quota),
        web.put(f"{one}/quota", put_quota),
        web.delete(f"{one}/quota", delete_quota),
        web.get(f"{one}/windows", windows),
    ]


async def create(request: web.Request) -> web.Response:
    deps = request.app[DEPS]
    draft = read(KeyDraft, await body(request))
    key, secret = await deps.registry.create_key(request[TOKEN].name, draft)
    deps.directory.nudge()
    location = {"Location": f"{request.path}/{key.id}"}
    return answer(_with_secret(deps, key, secret), 201, version=key.version, headers=ONCE | location)


async def list_keys(request: web.Request) -> web.Response:
    deps, page = request.app[DEPS], query(request, Page)
    keys = await page_of_keys(deps, _after(page.cursor), page.page_size + 1)
    shown, more = keys[: page.page_size], len(keys) > page.page_size
    last = cursor_of("keys", iso(shown[-1].created_at) or "", shown[-1].id) if more else None
    return answer({"items": [key.shown(deps.clock()) for key in shown], "next": last})


async def show(request: web.Request) -> web.Response:
    key, _ = await key_and_tier(request.app[DEPS], name_of(request))
    return _answer(request, key)


async def change(request: web.Request) -> web.Response:
    deps, versions = request.app[DEPS], expected(request)
    patch = read(KeyPatch, await body(request))
    if request[TOKEN].role == "operator" and patch.changes() != {"disabled": True}:
        raise Refusal(403, "forbidden", 'The role operator may only disable keys: send {"state": "disabled"}.')
    key = await deps.registry.patch_key(request[TOKEN].name, name_of(request), versions, patch)
    deps.directory.nudge()
    return _answer(request, key)


async def delete(request: web.Request) -> web.Response:
    deps = request.app[DEPS]
    await deps.registry.delete_key(request[TOKEN].name, name_of(request), expected(request))
    deps.directory.nudge()
    return web.Response(status=204)


async def rotate(request: web.Request) -> web.Response:
    deps = request.app[DEPS]
    rotation = read(Rotation, await body(request) if request.can_read_body else {})
    versions = expected(request) if "If-Match" in request.headers else None
    key, secret = await deps.registry.rotate_key(request[TOKEN].name, name_of(request), rotation, versions)
    deps.directory.nudge()
    return answer(_with_secret(deps, key, secret), version=key.version, headers=ONCE)


async def show_quota(request: web.Request) -> web.Response:
    key, tier = await key_and_tier(request.app[DEPS], name_of(request))
    return answer(_quota(key, tier), version=key.version)


async def put_quota(request: web.Request) -> web.Response:
    return await _override(request, await body(request))


async def delete_quota(request: web.Request) -> web.Response:
    return await _override(request, {})


async def windows(request: web.Request) -> web.Response:
    return answer(await view_of_key(request.app[DEPS], name_of(request)))


async def _override(request: web.Request, policy: dict[str, object]) -> web.Response:
    deps, key_id = request.app[DEPS], name_of(request)
    await deps.registry.set_override(request[TOKEN].name, key_id, expected(request), policy)
    deps.directory.nudge()
    key, tier = await key_and_tier(deps, key_id)
    return answer(_quota(key, tier), version=key.version)


def _quota(key: StoredKey, tier: StoredTerms) -> dict[str, Any]:
    return {**key.policy, "effective": terms_in_force(tier.policy, key.policy)[0].model_dump(mode="json")}


def _answer(request: web.Request, key: StoredKey) -> web.Response:
    return answer(key.shown(request.app[DEPS].clock()), version=key.version)


def _with_secret(deps: AdminDeps, key: StoredKey, secret: str) -> dict[str, Any]:
    return {**key.shown(deps.clock()), "secret": secret}


def _after(cursor: str | None) -> tuple[datetime, str] | None:
    match position("keys", cursor):
        case None:
            return None
        case [str(moment), str(key_id)] if "\x00" not in key_id:
            with suppress(ValueError):
                return moment_in(moment), key_id
    raise not_of_this_list()
