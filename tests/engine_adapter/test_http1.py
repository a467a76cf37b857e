"""Requests to workers over real sockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.errors import EngineBroke, EngineUnavailable
from engine_adapter.http1 import HIGH_WATER, Answer, Origin, Workers
from tests.engine_adapter.raw_worker import PATIENCE, Line, RawWorker, always, until

OK = b"HTTP/1.1 200 OK\r\n"
HELLO = OK + b"Content-Length: 5\r\n\r\nhello"
STREAM = OK + b"Transfer-Encoding: chunked\r\n\r\n"
TLS = Path(__file__).parent / "tls"


@pytest.fixture
async def workers() -> Any:
    made = Workers()
    yield made
    await made.close()
    assert "0 connections, 0 idle" in repr(made)


async def ask(workers: Workers, origin: Origin, body: bytes = b"{}", **changed: Any) -> Answer:
    terms = {"method": b"POST", "path": "/v1/x", "headers": [], "connect_seconds": PATIENCE, "head_seconds": PATIENCE}
    return await workers.open(origin, body=body, **(terms | changed))


async def body_of(workers: Workers, origin: Origin, body: bytes = b"{}", **changed: Any) -> bytes:
    async with await ask(workers, origin, body, **changed) as answer:
        return await answer.read_all(PATIENCE, 1 << 30)


# ---- what is sent ----------------------------------------------------------------------------------------------------


async def test_the_request_byte_for_byte(workers: Workers) -> None:
    async with RawWorker(always(HELLO)) as worker:
        origin = Origin("http", "127.0.0.1", worker.origin.port, "/root")
        headers = [
            (b"content-type", b"application/json"),
            (b"Host", b"evil"),
            (b"Content-Length", b"99"),
            (b"accept-encoding", b"gzip"),
            (b"transfer-encoding", b"chunked"),
            (b"connection", b"close"),
            (b"expect", b"100-continue"),
        ]
        assert await body_of(workers, origin, b'{"a":1}', path="/v1/x?after=a%2Fb&x=", headers=headers) == b"hello"
        assert worker.requests == [
            b"POST /root/v1/x?after=a%%2Fb&x= HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n"
            b'accept-encoding: identity\r\ncontent-length: 7\r\n\r\n{"a":1}' % origin.port
        ]


async def test_a_get_has_no_length_and_an_empty_post_has_one(workers: Workers) -> None:
    async with RawWorker(always(HELLO)) as worker:
        await body_of(workers, worker.origin, b"", method=b"GET")
        await body_of(workers, worker.origin, b"")
        assert b"content-length" not in worker.requests[0]
        assert b"content-length: 0\r\n" in worker.requests[1]


@pytest.mark.parametrize(
    "changed",
    [
        {"path": "/x HTTP/1.1\r\nX-Evil: 1\r\n\r\n"},
        {"path": "/with blank"},
        {"headers": [(b"x", b"1\r\nx-evil: 2")]},
        {"headers": [(b"x", b"1\nx-evil: 2")]},
        {"headers": [(b"x\r\ny", b"1")]},
    ],
)
async def test_nothing_can_be_smuggled_into_a_request(workers: Workers, changed: dict[str, Any]) -> None:
    async with RawWorker(always(HELLO)) as worker:
        with pytest.raises(ValueError, match="would change the request"):
            await ask(workers, worker.origin, **changed)
        assert worker.connections == 0


@pytest.mark.parametrize(
    ("url", "origin", "said"),
    [
        ("http://127.0.0.1:8000", Origin("http", "127.0.0.1", 8000), "http://127.0.0.1:8000"),
        ("http://gpu/v1-root/", Origin("http", "gpu", 80, "/v1-root"), "http://gpu/v1-root"),
        ("https://Api.Example:443", Origin("https", "api.example", 443), "https://api.example"),
        ("http://[::1]:9", Origin("http", "::1", 9), "http://[::1]:9"),
        ("http://rechner.münchen:80", Origin("http", "rechner.xn--mnchen-3ya", 80), "http://rechner.xn--mnchen-3ya"),
    ],
)
def test_origins(url: str, origin: Origin, said: str) -> None:
    assert Origin.parse(url) == origin
    assert str(origin) == said


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "ftp://x", "http://", "", "http://x:port", "http://x:99999", "http://a..b", "http://x/a b"],
)
def test_what_is_no_origin(url: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Origin.parse(url)


async def test_small_requests_are_not_held_back(workers: Workers) -> None:
    async with RawWorker(always(HELLO)) as worker, await ask(workers, worker.origin) as answer:
        link: Any = answer._link
        raw = link._transport.get_extra_info("socket")
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# ---- what comes back -------------------------------------------------------------------------------------------------


async def test_a_head_comes_before_its_body(workers: Workers) -> None:
    go = asyncio.Event()

    async def script(line: Line) -> None:
        await line.request()
        await line.say(STREAM)
        await go.wait()
        await line.say(b"2\r\nhi\r\n0\r\n\r\n")
        await line.gone()

    async with RawWorker(script) as worker, await ask(workers, worker.origin) as answer:
        assert (answer.status, answer.headers, answer.length) == (200, [], None)
        with pytest.raises(TimeoutError):
            await answer.read(0.01)
        go.set()
        assert await answer.read(PATIENCE) == b"hi"
        assert await answer.read(PATIENCE) == b""
        assert await answer.read(PATIENCE) == b""


async def test_pieces_that_came_together_are_read_together(workers: Workers) -> None:
    said = STREAM + b"1\r\na\r\n1\r\nb\r\n1\r\nc\r\n0\r\n\r\n"
    async with RawWorker(always(said)) as worker, await ask(workers, worker.origin) as answer:
        assert await answer.read(PATIENCE) == b"abc"


@pytest.mark.parametrize("answer", [HELLO, STREAM + b"3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"], ids=["length", "chunked"])
async def test_a_worker_that_goes_in_the_middle_is_noticed_wherever(workers: Workers, answer: bytes) -> None:
    """Cut after each of its bytes: before the head nothing was used, after it the answer is broken, never whole."""
    head = answer.index(b"\r\n\r\n") + 4
    for cut in range(len(answer)):

        async def script(line: Line, cut: int = cut) -> None:
            await line.request()
            await line.say(answer[:cut])

        async with RawWorker(script) as worker:
            if cut < head:
                with pytest.raises(EngineUnavailable) as unavailable:
                    await ask(workers, worker.origin)
                assert (unavailable.value.phase, unavailable.value.status) == ("head", 502)
                continue
            async with await ask(workers, worker.origin) as broken:
                got = b""
                with pytest.raises(EngineBroke) as broke:
                    while piece := await broken.read(PATIENCE):
                        got += piece
                assert broke.value.phase == "cut"
                assert b"hello".startswith(got)


async def test_a_reset_in_the_middle_is_noticed(workers: Workers) -> None:
    async def script(line: Line) -> None:
        await line.request()
        await line.say(OK + b"\r\n", b"until the end")
        line.reset()

    async with RawWorker(script) as worker, await ask(workers, worker.origin) as answer:
        with pytest.raises(EngineBroke):
            while await answer.read(PATIENCE):
                pass


async def test_a_body_may_end_with_its_connection(workers: Workers) -> None:
    async def script(line: Line) -> None:
        await line.request()
        await line.say(OK + b"\r\n", b"until ", b"the end")

    async with RawWorker(script) as worker:
        assert await body_of(workers, worker.origin) == b"until the end"


async def test_garbage_after_the_head_breaks_the_answer(workers: Workers) -> None:
    said = STREAM + b"2\r\nhi\r\nnot a chunk\r\n"
    async with RawWorker(always(said)) as worker, await ask(workers, worker.origin) as answer:
        assert await answer.read(PATIENCE) == b"hi"
        with pytest.raises(EngineBroke) as broke:
            await answer.read(PATIENCE)
        assert broke.value.phase == "protocol"


@pytest.mark.parametrize(
    "said", [b"no http\r\n\r\n", OK + b"X: " + b"x" * 200_000 + b"\r\n\r\n", STREAM[:-2] + b"Content-Length: 1\r\n\r\n"]
)
async def test_what_is_no_answer_leaves_the_request_to_others(workers: Workers, said: bytes) -> None:
    async with RawWorker(always(said)) as worker:
        with pytest.raises(EngineUnavailable) as unavailable:
            await ask(workers, worker.origin)
        assert (unavailable.value.phase, unavailable.value.status) == ("head", 502)
        assert len(worker.requests) == 1


async def test_messages_name_no_address(workers: Workers) -> None:
    with pytest.raises(EngineUnavailable) as unavailable:
        await ask(workers, Origin("http", "127.0.0.1", free_port()))
    assert (unavailable.value.phase, unavailable.value.status) == ("connect", 502)
    assert str(unavailable.value) == "The worker cannot be reached: connection refused."


async def test_an_answer_larger_than_the_limit_is_not_read(workers: Workers) -> None:
    for said in (HELLO, STREAM + b"5\r\nhello\r\n0\r\n\r\n"):
        async with RawWorker(always(said)) as worker:
            async with await ask(workers, worker.origin) as answer:
                with pytest.raises(EngineBroke, match="larger than 4 bytes"):
                    await answer.read_all(PATIENCE, 4)
            async with await ask(workers, worker.origin) as answer:
                assert await answer.read_all(PATIENCE, 5) == b"hello"


# ---- deadlines -------------------------------------------------------------------------------------------------------


async def test_no_head_in_time(workers: Workers) -> None:
    async def script(line: Line) -> None:
        await line.request()
        await line.gone()

    async with RawWorker(script) as worker:
        with pytest.raises(EngineUnavailable) as unavailable:
            await ask(workers, worker.origin, head_seconds=0.02)
        assert (unavailable.value.phase, unavailable.value.status) == ("head", 504)
        await until(lambda: worker.closed)


async def test_no_connection_in_time(workers: Workers) -> None:
    """A worker that takes the TCP connection and then says nothing to the TLS greeting."""

    async def script(line: Line) -> None:
        await line.gone()

    async with RawWorker(script) as worker:
        origin = Origin("https", "127.0.0.1", worker.origin.port)
        with pytest.raises(EngineUnavailable) as unavailable:
            await ask(workers, origin, connect_seconds=0.05)
        assert (unavailable.value.phase, unavailable.value.status) == ("connect", 504)
        await until(lambda: worker.closed == worker.connections)


async def test_each_read_has_its_own_deadline(workers: Workers) -> None:
    """A long first deadline does not make later ones long, nor the other way round."""
    turn = asyncio.Event()

    async def script(line: Line) -> None:
        await line.request()
        await line.say(STREAM + b"1\r\na\r\n")
        await turn.wait()
        await line.say(b"1\r\nb\r\n0\r\n\r\n")
        await line.gone()

    async with RawWorker(script) as worker, await ask(workers, worker.origin, head_seconds=3600) as answer:
        assert await answer.read(3600) == b"a"
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await answer.read(0.005)
        asyncio.get_running_loop().call_later(0.05, turn.set)
        assert await answer.read() == b"b"
        assert await answer.read(0) == b""


# ---- back-pressure ---------------------------------------------------------------------------------------------------


async def test_a_reader_that_waits_makes_the_worker_wait(workers: Workers) -> None:
    size, sent = 64 * 1024 * 1024, 0

    async def script(line: Line) -> None:
        nonlocal sent
        await line.request()
        await line.say(OK + b"Content-Length: %d\r\n\r\n" % size)
        for _ in range(64):
            await line.say(bytes(size // 64))
            sent += size // 64
        await line.gone()

    async with RawWorker(script) as worker, await ask(workers, worker.origin) as answer:
        link: Any = answer._link
        await until(lambda: link._paused)
        unread = answer._inbox.size
        for _ in range(50):
            await asyncio.sleep(0)
        assert HIGH_WATER < answer._inbox.size == unread < 1024 * 1024
        assert sent < size // 2
        got = 0
        while piece := await answer.read(PATIENCE):
            got += len(piece)
        assert got == size


async def test_a_large_body_goes_through_to_a_slow_worker(workers: Workers) -> None:
    body = bytes(range(256)) * 32 * 1024

    async def script(line: Line) -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        await line.request()
        await line.say(HELLO)
        await line.request()

    async with RawWorker(script) as worker:
        assert await body_of(workers, worker.origin, body) == b"hello"
        assert worker.requests[0].endswith(b"content-length: 8388608\r\n\r\n" + body)


async def test_an_answer_may_come_before_the_body_was_read(workers: Workers) -> None:
    """The connection is not used again: half a request is still on it."""

    async def script(line: Line) -> None:
        await line.reader.readuntil(b"\r\n\r\n")
        line.writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await asyncio.Event().wait()

    async with RawWorker(script, limit=1024) as worker:
        origin = Origin("http", "127.0.0.1", worker.origin.port)
        async with await ask(workers, origin, bytes(32 * 1024 * 1024)) as answer:
            assert answer.status == 413
            assert await answer.read(PATIENCE) == b""
        assert "0 idle" in repr(workers)


# ---- TLS -------------------------------------------------------------------------------------------------------------


async def test_https() -> None:
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
    workers = Workers(tls=ssl.create_default_context(cafile=str(TLS / "cert.pem")))
    strangers = Workers()
    async with RawWorker(always(HELLO), ssl=served) as worker:
        for _ in range(3):
            assert await body_of(workers, worker.origin) == b"hello"
        assert worker.connections == 1
        with pytest.raises(EngineUnavailable, match="certificate") as unavailable:
            await ask(strangers, worker.origin)
        assert unavailable.value.phase == "connect"
        await workers.close()
        await strangers.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
