"""Every road that ends in an error ends in JSON, with a request id, whatever the client says it accepts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tests.cases.house import CHAT, House, Key
from tests.cases.house import body as chat
from tests.cases.proxy import ADMIN_TOKEN
from tests.cases.stub import failure, hang
from tests.cases.wire import Connection, Reply, as_json, ask, bearer

pytestmark = pytest.mark.asyncio(loop_scope="session")

ACCEPT = ["*/*", "text/html", "text/event-stream"]

Road = Callable[[House, Key, tuple[str, str]], Awaitable[Reply]]


def asking(accept: tuple[str, str], **changes: object) -> bytes:
    return as_json(chat(stream=accept[1] == "text/event-stream", **changes))


def posting(body: bytes | None = None, path: str = CHAT, **changes: object) -> Road:
    async def road(house: House, key: Key, accept: tuple[str, str]) -> Reply:
        data = asking(accept, **changes) if body is None else body
        return await ask(house.proxy.port, "POST", path, [bearer(key.secret), accept], data)

    return road


async def unknown_key(house: House, _: Key, accept: tuple[str, str]) -> Reply:
    return await ask(house.proxy.port, "POST", CHAT, [bearer("wk-no-no"), accept], asking(accept))


async def compressed(house: House, key: Key, accept: tuple[str, str]) -> Reply:
    sent = [bearer(key.secret), accept, ("Content-Encoding", "gzip")]
    return await ask(house.proxy.port, "POST", CHAT, sent, asking(accept))


async def wrong_method(house: House, key: Key, accept: tuple[str, str]) -> Reply:
    return await ask(house.proxy.port, "GET", CHAT, [bearer(key.secret), accept])


async def spent(house: House, _: Key, accept: tuple[str, str]) -> Reply:
    blocked = await house.key(limit=0)
    return await ask(house.proxy.port, "POST", CHAT, [bearer(blocked.secret), accept], asking(accept))


async def worker_says_500(house: House, key: Key, accept: tuple[str, str]) -> Reply:
    house.u1.does(failure(500))
    return await ask(house.proxy.port, "POST", CHAT, [bearer(key.secret), accept], asking(accept))


async def worker_is_silent(house: House, key: Key, accept: tuple[str, str]) -> Reply:
    house.u1.does(hang)
    sent = [bearer(key.secret), accept]
    return await ask(house.proxy.port, "POST", CHAT, sent, asking(accept, model="impatient"))


ROADS: dict[str, tuple[set[int], Road]] = {
    "odd body": ({400}, posting(b"{")),
    "unknown key": ({401}, unknown_key),
    "unknown path": ({404}, posting(path="/nowhere")),
    "unknown model": ({404}, posting(model="nobody's")),
    "wrong method": ({405}, wrong_method),
    "compressed": ({415}, compressed),
    "too large": ({413}, posting(b" " * (9 * 2**20))),
    "blocked": ({429}, spent),
    "worker's 500": ({500}, worker_says_500),
    "worker refuses": ({502, 503}, posting(model="refusing")),
    "worker out of reach": ({502, 503, 504}, posting(model="hole")),
    "worker silent": ({504}, worker_is_silent),
}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("accept", ACCEPT)
async def test_an_error_is_json_whatever_is_accepted(house: House, road: str, accept: str) -> None:
    """T115"""
    statuses, take = ROADS[road]
    key = await house.key()
    reply = await take(house, key, ("Accept", accept))
    assert reply.status in statuses, reply.body
    assert (reply.get("content-type") or "").startswith("application/json")
    assert isinstance(reply.json()["error"], dict)
    assert len(reply.get("x-weir-request-id") or "") == 36
    assert int(reply.get("content-length") or -1) == len(reply.body)
    assert b"Traceback" not in reply.body
    assert b'File "' not in reply.body


@pytest.mark.parametrize("accept", ACCEPT)
@pytest.mark.parametrize(
    ("method", "path", "data", "status"),
    [
        ("GET", "/admin/v1/nothing", None, {404}),
        ("GET", "/admin/v1/keys/nobody", None, {404}),
        ("PUT", "/admin/v1/keys", b"{}", {405}),
        ("POST", "/admin/v1/keys", b"{", {400, 422}),
        ("POST", "/admin/v1/keys", b'{"tier": 5}', {400, 422}),
        ("POST", "/admin/v1/keys", b"[" * 20_000, {400, 422}),
    ],
)
async def test_an_error_of_the_admin_site_is_json(
    house: House, accept: str, method: str, path: str, data: bytes | None, status: set[int]
) -> None:
    """T115"""
    sent = [bearer(ADMIN_TOKEN), ("Accept", accept), ("Content-Type", "application/json")]
    reply = await ask(house.proxy.admin_port, method, path, sent, data)
    assert reply.status in status, reply.body
    reply.error()
    assert len(reply.get("x-weir-request-id") or "") == 36
    assert int(reply.get("content-length") or -1) == len(reply.body)
    assert b"Traceback" not in reply.body


async def test_a_refused_admin_token_is_json(house: House) -> None:
    """T115"""
    reply = await ask(house.proxy.admin_port, "GET", "/admin/v1/keys")
    reply.error(401)
    assert reply.get("www-authenticate") == "Bearer"


@pytest.mark.parametrize("site", ["traffic", "admin"])
async def test_what_is_no_http_is_answered_in_json(house: House, site: str) -> None:
    """T115"""
    async with Connection.to(house.proxy.port if site == "traffic" else house.proxy.admin_port) as client:
        await client.send(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n")
        (await client.reply("GET")).error(400)
