"""HTTP as it is spoken by real clients, real engines and odd ones: framing, headers, sizes, methods, paths."""

from __future__ import annotations

import asyncio
import gzip
import json

import psutil  # type: ignore[import-untyped]
import pytest

from tests.cases.conftest import Build
from tests.cases.house import CHAT, House, streamed
from tests.cases.house import body as chat
from tests.cases.stub import DONE, FIN, OK, USE, Call, Script, T, answer, head, stream, usage
from tests.cases.wire import Connection, as_json, ask, bearer, chunked, eventually, request

pytestmark = pytest.mark.asyncio(loop_scope="session")

MEGABYTE = 2**20


async def test_hop_by_hop_headers_and_framing_are_our_own(house: House) -> None:
    """T068"""
    key = await house.key()
    whole = answer(usage(9, 4))

    async def script(call: Call) -> None:
        hop = [("Connection", "keep-alive, X-Foo"), ("X-Foo", "1"), ("Keep-Alive", "timeout=5")]
        end = [("X-Custom", "kept"), ("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")]
        await call.send(head(200, [*hop, *end]) + chunked(whole[:20], whole[20:]))

    house.u1.does(script)
    reply = await house.post(key, chat())
    assert (reply.status, reply.body, reply.complete) == (200, whole, True)
    assert reply.all("x-foo") == reply.all("keep-alive") == []
    assert "x-foo" not in (reply.get("connection") or "").lower()
    assert reply.all("x-custom") == ["kept"]
    assert len(reply.all("content-length")) + len(reply.all("transfer-encoding")) == 1
    assert await house.used(key) == 13


@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_a_rewritten_body_goes_with_its_own_length(house: House, framing: str) -> None:
    """T069"""
    key = await house.key()
    house.u1.does(stream(T("a"), FIN, USE(9, 4), DONE))
    data = as_json(streamed())
    common = [bearer(key.secret), ("Content-Type", "application/json")]
    async with Connection.to(house.proxy.port) as client:
        for number in (1, 2):
            if framing == "length":
                await client.send(request("POST", CHAT, common, data))
            else:
                chunks = chunked(data[:7], data[7:8], data[8:])
                await client.send(request("POST", CHAT, [*common, ("Transfer-Encoding", "chunked")], chunks))
            await client.start()
            reply = await client.reply()
            assert (reply.status, reply.events[-1]) == (200, "[DONE]")
            seen = house.u1.last
            assert len(seen.all("content-length")) + len(seen.all("transfer-encoding")) == 1
            assert seen.json()["stream_options"]["include_usage"] is True
            assert len(house.u1.seen) == number
    assert await house.used(key) == 26


async def test_the_engine_is_called_by_its_own_name(house: House) -> None:
    """T072"""
    key = await house.key()
    sent = [bearer(key.secret), ("Content-Type", "application/json")]
    reply = await ask(house.proxy.port, "POST", CHAT, sent, as_json(chat()), host="api.example.test")
    assert reply.status == 200
    assert house.u1.last.all("host") == [f"127.0.0.1:{house.u1.port}"]
    assert house.u1.last.get("x-forwarded-host") in (None, "api.example.test")


async def test_connections_that_the_engine_closed_are_no_fault_of_the_client(house: House) -> None:
    """T073: half of the answers promise to keep the connection and close it at once."""
    key = await house.key()

    async def closing(call: Call) -> None:
        await OK(3, 2)(call)
        call.close()

    scripts: list[Script] = [OK(3, 2), closing] * 30
    house.u1.does(*scripts)
    statuses = [(await house.post(key, chat())).status for _ in range(60)]
    assert statuses == [200] * 60
    assert len(house.u1.seen) == 60
    await house.rows(key, 60)


async def test_idle_connections_that_the_engine_closed_are_replaced(house: House) -> None:
    """T073"""
    key = await house.key()
    for _ in range(3):
        assert (await house.post(key, chat())).status == 200
        house.u1.calls[-1].close()
        await eventually(lambda: _closed(house), lambda closed: closed is True)
    await house.rows(key, 3)


async def _closed(house: House) -> bool:
    return house.u1.calls[-1].gone


async def test_bodies_up_to_the_limit_pass_and_larger_ones_are_refused(house: House) -> None:
    """T074"""
    key = await house.key(limit=10**8)
    fits = chat(messages=[{"role": "user", "content": "x " * (5 * MEGABYTE // 2)}])
    assert (await house.post(key, fits)).status == 200
    assert house.u1.last.json()["messages"] == fits["messages"]
    seen = len(house.u1.seen)
    large = chat(messages=[{"role": "user", "content": "x " * (9 * MEGABYTE // 2)}])
    async with Connection.to(house.proxy.port) as client:
        await _push(client, request("POST", CHAT, [bearer(key.secret)], as_json(large)))
        assert (await client.reply()).error(413)["code"] == "request_too_large"
    assert len(house.u1.seen) == seen
    await house.rows(key, 1)


async def test_an_endless_upload_is_cut_off_at_the_limit(house: House) -> None:
    """T075"""
    key = await house.key()
    process = psutil.Process(house.proxy.pid)
    await house.spent(key, 1, 1)
    before = process.memory_info().rss
    piece = b"%x\r\n%b\r\n" % (65_536, b" " * 65_536)
    sent = 0
    async with Connection.to(house.proxy.port) as client:
        await client.send(request("POST", CHAT, [bearer(key.secret), ("Transfer-Encoding", "chunked")]))
        answered = asyncio.ensure_future(client.reply())
        while not answered.done() and sent < 40 * MEGABYTE:
            await _push(client, piece)
            sent += len(piece)
            await asyncio.sleep(0)
        assert (await answered).error(413)["code"] == "request_too_large"
    assert sent < 40 * MEGABYTE
    assert process.memory_info().rss - before < 30_000_000
    await house.rows(key, 1)


async def test_a_declared_length_beyond_the_limit_is_refused_at_once(house: House) -> None:
    """T075"""
    key = await house.key()
    async with Connection.to(house.proxy.port) as client:
        await client.send(request("POST", CHAT, [bearer(key.secret), ("Content-Length", str(10**12))]))
        assert (await client.reply()).error(413)["code"] == "request_too_large"
    await house.rows(key, 0)


@pytest.mark.deep
async def test_a_trickling_upload_is_cut_off(house: House) -> None:
    """T075: it may take half a minute in all."""
    key = await house.key()
    async with Connection.to(house.proxy.port) as client:
        await client.send(request("POST", CHAT, [bearer(key.secret), ("Content-Length", "1000")]))
        answered = asyncio.ensure_future(client.reply())
        for _ in range(80):
            await _push(client, b" ")
            await asyncio.wait([answered], timeout=0.5)
            if answered.done():
                break
        assert (await answered).status == 408
        assert (await house.post(key, chat())).status == 200
    await house.rows(key, 1)


async def _push(client: Connection, data: bytes) -> None:
    """Sends what the other side still takes; it may answer and close before it took all."""
    try:
        await client.send(data)
    except ConnectionError:
        await asyncio.sleep(0.01)


PACKED = gzip.compress(as_json(chat()))
COMPRESSED = {
    "a body": PACKED,
    "blanks": gzip.compress(b" " * 10_000_000),
    "not compressed": as_json(chat()),
}


@pytest.mark.parametrize("name", COMPRESSED)
async def test_a_compressed_body_is_not_passed_on_unread(house: House, name: str) -> None:
    """T071"""
    key = await house.key()
    reply = await house.post(key, COMPRESSED[name], headers=[("Content-Encoding", "gzip")])
    if reply.status == 200:
        assert house.u1.last.json()["messages"] == chat()["messages"]
    else:
        assert reply.status in (400, 413, 415)
        reply.error()
        assert house.u1.seen == []


async def test_a_browsers_question_is_no_fault_of_its_key(house: House) -> None:
    """T077, CORS switched off."""
    sent = [("Origin", "https://a.test"), ("Access-Control-Request-Method", "POST")]
    reply = await ask(house.proxy.port, "OPTIONS", CHAT, sent)
    assert reply.status in (403, 405)
    assert house.u1.seen == []


async def test_a_browser_that_is_allowed_is_answered(build: Build) -> None:
    """T077, CORS switched on."""
    origin = ("Origin", "https://a.test")
    async with build(listen={"cors_origins": [origin[1]]}) as house:
        asked = [origin, ("Access-Control-Request-Method", "POST"), ("Access-Control-Request-Headers", "authorization")]
        reply = await ask(house.proxy.port, "OPTIONS", CHAT, asked)
        assert reply.status in (200, 204)
        assert reply.get("access-control-allow-origin") == origin[1]
        assert "authorization" in (reply.get("access-control-allow-headers") or "").lower()
        assert "POST" in (reply.get("access-control-allow-methods") or "")
        blocked = await house.key(limit=0)
        for key, status in ((None, 401), (blocked, 429)):
            refused = await house.post(key, chat(), headers=[origin])
            assert refused.status == status
            assert refused.get("access-control-allow-origin") == origin[1]
        assert house.u1.seen == []
        await house.rows(blocked, 0)


async def test_expect_100_continue_is_answered(house: House) -> None:
    """T076"""
    key = await house.key()
    data = as_json(chat())
    sent = [bearer(key.secret), ("Expect", "100-continue"), ("Content-Length", str(len(data)))]
    async with Connection.to(house.proxy.port) as client:
        await client.send(request("POST", CHAT, [*sent, ("Content-Type", "application/json")]))
        assert (await client.interim()).status == 100
        await client.send(data)
        assert (await client.reply()).status == 200
    assert house.u1.last.get("expect") is None


async def test_expect_100_continue_with_a_bad_key_ends_in_401(house: House) -> None:
    """T076"""
    data = as_json(chat())
    sent = [bearer("wk-nobody-nothing"), ("Expect", "100-continue"), ("Content-Length", str(len(data)))]
    async with Connection.to(house.proxy.port) as client:
        await client.send(request("POST", CHAT, sent))
        first = await client.interim()
        if first.status == 100:
            await client.send(data)
            first = await client.interim()
        assert first.status == 401
    assert house.u1.seen == []


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", CHAT), ("HEAD", CHAT), *((name, "/v1/models") for name in ("PUT", "DELETE", "TRACE", "FOO"))],
)
async def test_methods_that_a_path_does_not_have_are_405(house: House, method: str, path: str) -> None:
    """T078"""
    key = await house.key()
    async with Connection.to(house.proxy.port) as client:
        await client.send(request(method, path, [bearer(key.secret)]))
        reply = await client.reply(method)
        assert reply.status == 405
        assert reply.get("allow")
        assert method != "HEAD" or reply.body == b""
        if reply.get("connection") != "close":
            await client.send(request("GET", "/v1/models", [bearer(key.secret)]))
            await client.start("GET")
            assert (await client.reply("GET")).json()["object"] == "list"
    assert house.u1.seen == []
    await house.rows(key, 0)


async def test_models_are_listed_with_head_and_with_a_body(house: House) -> None:
    """T078"""
    key = await house.key()
    async with Connection.to(house.proxy.port) as client:
        await client.send(request("HEAD", "/v1/models", [bearer(key.secret)]))
        headers = await client.reply("HEAD")
        assert (headers.status, headers.body) == (200, b"")
        await client.send(request("GET", "/v1/models", [bearer(key.secret)], b'{"a":1}'))
        await client.start("GET")
        listed = (await client.reply("GET")).json()
    assert {"m1", "m2"} <= {model["id"] for model in listed["data"]}


async def test_the_query_goes_on_as_it_came(house: House) -> None:
    """T079"""
    key = await house.key()
    query = "after=a%2Fb%20c%2Bd&x=&x=2"
    house.u1.does(OK(9, 4))
    assert (await house.post(key, chat(), path=f"{CHAT}?{query}")).status == 200
    assert house.u1.last.target == f"{CHAT}?{query}"
    assert await house.used(key) == 13


async def test_an_encoded_slash_is_no_slash(house: House) -> None:
    """T079"""
    key = await house.key()
    (await house.post(key, chat(), path="/v1%2Fchat%2Fcompletions")).error(404)
    assert house.u1.seen == house.u1.probes == []
    await house.rows(key, 0)


FREE_PATHS = ["/v1/unknown", "/pooling", "/v1/load_lora_adapter", "/V1/CHAT/COMPLETIONS"]


@pytest.mark.parametrize("path", [*FREE_PATHS, "/invocations", "/v1/chat/completions/batch", "/inference/v1/generate"])
async def test_a_path_that_is_not_metered_is_not_served(house: House, path: str) -> None:
    """T081"""
    key = await house.key()
    reply = await house.post(key, chat(input="x", prompt="x"), path=path)
    assert reply.status in (404, 405)
    reply.error()
    assert house.u1.seen == []
    await house.rows(key, 0)


async def test_a_closing_slash_is_refused_or_metered(house: House) -> None:
    """T081"""
    key = await house.key()
    house.u1.does(OK(9, 4))
    reply = await house.post(key, chat(), path=f"{CHAT}/")
    assert reply.status in (200, 404)
    assert await house.used(key) == (13 if reply.status == 200 else 0)
    assert len(house.u1.seen) == (reply.status == 200)


async def test_tokenize_is_never_charged_and_never_open(house: House) -> None:
    """T081"""
    key = await house.key()
    assert (await house.post(key, {"model": "m1", "prompt": "hi"}, path="/tokenize")).status in (200, 404)
    assert (await house.post(None, {"model": "m1", "prompt": "hi"}, path="/tokenize")).status in (401, 404)
    assert await house.used(key) == 0


async def test_forged_forwarding_headers_do_not_go_on(house: House) -> None:
    """T082"""
    key = await house.key()
    forged = [("X-Forwarded-For", "1.2.3.4"), ("Forwarded", "for=1.2.3.4"), ("X-Real-IP", "1.2.3.4")]
    assert (await house.post(key, chat(), headers=forged)).status == 200
    assert b"1.2.3.4" not in house.u1.last.raw or b"127.0.0.1" in house.u1.last.raw.split(b"1.2.3.4", 1)[1]


@pytest.mark.parametrize("forged", ["x" * 6_000, "a%0d%0aSet-Cookie: x=1", "ü"], ids=["long", "line ends", "not ASCII"])
async def test_an_odd_request_id_is_not_echoed_as_it_is(house: House, forged: str) -> None:
    """T082"""
    key = await house.key()
    reply = await house.post(key, chat(), headers=[("X-Request-Id", forged)])
    assert reply.status == 200
    assert len(reply.get("x-request-id") or "") <= 200
    assert reply.get("set-cookie") is None
    assert reply.get("x-weir-request-id")


async def test_many_and_large_headers_of_the_engine_are_passed_on(house: House) -> None:
    """T084"""
    key = await house.key()
    many = [(f"X-Many-{number}", "v") for number in range(90)]

    async def script(call: Call) -> None:
        await call.plain(200, answer(usage(3, 2)), [("X-Large", "y" * 7_000), *many])

    house.u1.does(script)
    reply = await house.post(key, chat())
    assert reply.status == 200
    assert reply.get("x-large") == "y" * 7_000
    assert reply.get("x-many-89") == "v"


async def test_a_head_of_the_engine_without_measure_is_a_bad_gateway(house: House) -> None:
    """T084"""
    key = await house.key()

    async def script(call: Call) -> None:
        await call.plain(200, answer(usage(3, 2)), [("X-Huge", "y" * 200_000)])

    house.u1.does(script)
    (await house.post(key, chat())).error(502)
    assert await house.used(key) == 0


@pytest.mark.parametrize(
    ("header", "allowed"),
    [(("Cookie", "c=" + "x" * 20_000), (200, 400, 431)), (("X-Name", "caf\xe9"), (200, 400))],
    ids=["large cookie", "beyond ASCII"],
)
async def test_odd_headers_of_the_client_are_no_fault_of_ours(
    house: House, header: tuple[str, str], allowed: tuple[int, ...]
) -> None:
    """T084"""
    key = await house.key()
    assert (await house.post(key, chat(), headers=[header])).status in allowed


@pytest.mark.parametrize(
    "kind", ["application/json; charset=UTF-8", "application/vnd.api+json", "text/plain", "form", ""]
)
async def test_json_is_taken_or_refused_whatever_it_is_called(house: House, kind: str) -> None:
    """T121"""
    key = await house.key()
    house.u1.does(OK(9, 4))
    named = [("Content-Type", "application/x-www-form-urlencoded" if kind == "form" else kind)] if kind else []
    reply = await ask(house.proxy.port, "POST", CHAT, [bearer(key.secret), *named], as_json(chat()))
    if reply.status == 200:
        assert house.u1.last.all("content-type") == ["application/json"]
        assert json.loads(house.u1.last.body)["messages"] == chat()["messages"]
        assert await house.used(key) == 13
    else:
        reply.error(415)
        assert house.u1.seen == []
