"""Connections that are kept, lost, given up: none leaks, none is used twice, no request is made twice that was heard."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engine_adapter.errors import EngineBroke, EngineUnavailable
from engine_adapter.http1 import Answer, Origin, Workers
from engine_adapter.simulator import Simulator
from tests.engine_adapter.raw_worker import PATIENCE, Line, RawWorker, always, until

HELLO = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
async def workers() -> Any:
    made = Workers()
    yield made
    await made.close()
    assert "0 connections, 0 idle" in repr(made)


async def ask(workers: Workers, origin: Origin, **changed: Any) -> Answer:
    terms = {"method": b"POST", "path": "/", "headers": [], "connect_seconds": PATIENCE, "head_seconds": PATIENCE}
    return await workers.open(origin, body=b"{}", **(terms | changed))


async def hello(workers: Workers, origin: Origin, **changed: Any) -> None:
    async with await ask(workers, origin, **changed) as answer:
        assert await answer.read_all(PATIENCE, 100) == b"hello"


async def silent(line: Line) -> None:
    """Takes requests and never answers."""
    while True:
        await line.request()


async def endless(line: Line) -> None:
    """Streams until the client is gone."""
    await line.request()
    await line.say(STREAM)
    while True:
        await line.say(b"1\r\nx\r\n")
        await asyncio.sleep(0)


# ---- kept connections ------------------------------------------------------------------------------------------------


async def test_requests_one_after_the_other_share_a_connection(workers: Workers) -> None:
    async with RawWorker(always(HELLO)) as worker:
        for _ in range(20):
            await hello(workers, worker.origin)
        assert worker.connections == 1
        assert repr(workers) == f"<Workers 1 connections, 1 idle {{'{worker.origin}': 1}}>"


async def test_requests_at_the_same_time_do_not(workers: Workers) -> None:
    async with RawWorker(always(HELLO)) as worker:
        answers = await asyncio.gather(*(ask(workers, worker.origin) for _ in range(5)))
        assert worker.connections == 5
        for answer in answers:
            assert await answer.read_all(PATIENCE, 100) == b"hello"
            answer.close()
            answer.close()
        await asyncio.gather(*(hello(workers, worker.origin) for _ in range(5)))
        assert worker.connections == 5


async def test_an_answer_that_was_received_but_not_read_does_not_cost_its_connection(workers: Workers) -> None:
    async with RawWorker(always(HELLO)) as worker:
        for _ in range(3):
            (await ask(workers, worker.origin)).close()
        assert worker.connections == 1


async def test_every_origin_has_its_own_connections(workers: Workers) -> None:
    async with RawWorker(always(HELLO)) as one, RawWorker(always(HELLO)) as other:
        await hello(workers, one.origin)
        await hello(workers, other.origin)
        assert (len(one.requests), len(other.requests)) == (1, 1)


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        HELLO + b"HTTP/1.1 200 OK\r\n",
        HELLO + HELLO,
    ],
    ids=["told to close", "http/1.0", "half an answer more", "an answer more"],
)
async def test_a_connection_that_cannot_be_trusted_is_not_kept(workers: Workers, said: bytes) -> None:
    async with RawWorker(always(said)) as worker:
        await hello(workers, worker.origin)
        await hello(workers, worker.origin)
        assert worker.connections == 2


async def test_bytes_that_nobody_asked_for_end_an_idle_connection(workers: Workers) -> None:
    late = asyncio.Event()

    async def script(line: Line) -> None:
        await line.request()
        await line.say(HELLO)
        await late.wait()
        await line.say(HELLO)
        await line.gone()

    async with RawWorker(script) as worker:
        await hello(workers, worker.origin)
        late.set()
        await until(lambda: "0 connections" in repr(workers))


async def test_idle_connections_are_closed_before_the_worker_would(workers: Workers) -> None:
    brief = Workers(keep_idle_seconds=0.02)
    async with RawWorker(always(HELLO)) as worker:
        await asyncio.gather(*(hello(brief, worker.origin) for _ in range(3)))
        await until(lambda: worker.closed == worker.connections)
        assert "0 connections, 0 idle" in repr(brief)
        await brief.close()


async def test_no_more_are_kept_than_wanted() -> None:
    few = Workers(max_idle_per_origin=2)
    async with RawWorker(always(HELLO)) as worker:
        answers = await asyncio.gather(*(ask(few, worker.origin) for _ in range(5)))
        for answer in answers:
            answer.close()
        await until(lambda: worker.closed == 3)
        assert "2 connections, 2 idle" in repr(few)
        await few.close()


# ---- closed by the worker meanwhile ----------------------------------------------------------------------------------


async def test_a_worker_that_closes_after_each_answer_costs_no_request(workers: Workers) -> None:
    """T073 (a): 200 requests in a row, none fails, none is worked on twice."""
    async with RawWorker(always(HELLO, times=1)) as worker:
        for _ in range(200):
            await hello(workers, worker.origin)
        assert len(worker.requests) == 200


async def test_a_worker_that_closes_idle_connections_costs_no_request(workers: Workers) -> None:
    """T073 (b): requests arrive around the very moment at which the worker gives up."""
    idle, chance = 0.01, random.Random(73)
    simulator = Simulator(keep_alive_seconds=idle)
    origin = Origin("http", "127.0.0.1", await simulator.start())
    for _ in range(100):
        async with await ask(workers, origin, method=b"GET", path="/version") as answer:
            assert await answer.read_all(PATIENCE, 100) == b'{"version":"0.32.0"}'
        await asyncio.sleep(chance.uniform(0.8, 1.2) * idle)
    assert len(simulator.requests) == 100
    await simulator.stop()


async def lost_after(said: bytes) -> tuple[EngineUnavailable | None, int]:
    """Two requests on a worker that answers the first and loses the connection at the second, having said `said`."""

    async def script(line: Line) -> None:
        await line.request()
        await line.say(HELLO)
        await line.request()
        await line.say(said)

    workers = Workers()
    async with RawWorker(script) as worker:
        await hello(workers, worker.origin)
        try:
            await hello(workers, worker.origin)
        except EngineUnavailable as unavailable:
            return unavailable, len(worker.requests)
        else:
            return None, len(worker.requests)
        finally:
            await workers.close()


async def test_a_kept_connection_lost_in_silence_is_replaced() -> None:
    assert await lost_after(b"") == (None, 3)


@pytest.mark.parametrize("said", [b"H", b"HTTP/1.1 200 OK\r\nContent-Le", b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_one_byte_of_an_answer_forbids_a_second_request(said: bytes) -> None:
    unavailable, requests = await lost_after(said)
    assert unavailable is not None and unavailable.phase == "head"
    assert requests == 2


async def test_a_fresh_connection_lost_in_silence_is_not_replaced(workers: Workers) -> None:
    async with RawWorker(always(b"", times=1)) as worker:
        with pytest.raises(EngineUnavailable) as unavailable:
            await hello(workers, worker.origin)
        assert (unavailable.value.phase, unavailable.value.status) == ("head", 502)
        assert len(worker.requests) == 1


async def test_a_request_is_replaced_once_not_for_ever(workers: Workers) -> None:
    async def script(line: Line) -> None:
        await line.request()
        if worker.connections == 1:
            await line.say(HELLO)
            await line.request()

    async with RawWorker(script) as worker:
        await hello(workers, worker.origin)
        with pytest.raises(EngineUnavailable):
            await hello(workers, worker.origin)
        assert len(worker.requests) == 3


# ---- given up --------------------------------------------------------------------------------------------------------


async def test_closing_an_unfinished_answer_reaches_the_worker(workers: Workers) -> None:
    async with RawWorker(endless) as worker:
        answer = await ask(workers, worker.origin)
        assert await answer.read(PATIENCE)
        assert not worker.closed
        answer.close()
        await until(lambda: worker.closed)
        with pytest.raises(EngineBroke):
            while await answer.read(PATIENCE):
                pass


async def test_an_error_inside_closes_the_answer(workers: Workers) -> None:
    async with RawWorker(endless) as worker:
        with pytest.raises(ZeroDivisionError):
            async with await ask(workers, worker.origin):
                raise ZeroDivisionError
        await until(lambda: worker.closed)


async def reading(workers: Workers, origin: Origin) -> None:
    async with await ask(workers, origin) as answer:
        while True:
            await answer.read(PATIENCE)


async def greeting_tls(workers: Workers, origin: Origin) -> None:
    await ask(workers, Origin("https", origin.host, origin.port))


async def quiet(line: Line) -> None:
    await line.gone()


@pytest.mark.parametrize(
    ("script", "work"),
    [(quiet, greeting_tls), (silent, ask), (endless, reading)],
    ids=["while connecting", "while waiting for the head", "while reading"],
)
async def test_cancelling_leaves_no_connection(
    workers: Workers, script: Callable[[Line], Awaitable[None]], work: Callable[[Workers, Origin], Awaitable[Any]]
) -> None:
    async with RawWorker(script) as worker:
        task = asyncio.ensure_future(work(workers, worker.origin))
        await until(lambda: worker.connections == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: worker.closed == 1 and "0 connections" in repr(workers))


async def test_cancelling_at_any_moment_leaves_no_connection(workers: Workers) -> None:
    """After each number of turns of the loop, from before the connection to after the answer."""
    async with RawWorker(always(HELLO)) as worker:
        for turns in range(40):
            lone = Workers()
            task = asyncio.ensure_future(hello(lone, worker.origin))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await lone.close()
            assert "0 connections" in repr(lone)
        await until(lambda: worker.closed == worker.connections)


async def test_closing_the_pool_ends_what_is_running_and_refuses_what_comes() -> None:
    workers = Workers()
    async with RawWorker(endless) as worker:
        running = asyncio.ensure_future(reading(workers, worker.origin))
        await until(lambda: worker.requests)
        await workers.close()
        with pytest.raises((EngineBroke, EngineUnavailable)):
            await running
        with pytest.raises(EngineUnavailable, match="closed"):
            await ask(workers, worker.origin)
        await until(lambda: worker.closed)
