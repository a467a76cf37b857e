"""What happens to quotas and books when the proxy, Redis or Postgres goes away under load, and comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit, urlunsplit

import psutil  # type: ignore[import-untyped]
import pytest
import redis.asyncio

from tests.cases.conftest import Build, Config
from tests.cases.house import House, Standing, streamed
from tests.cases.house import body as chat
from tests.cases.stub import DONE, FIN, OK, SILENCE, USE, T, stream
from tests.cases.wire import ask, bearer, eventually
from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_killed_proxy_leaves_no_reservation_behind(build: Build) -> None:
    """T050"""
    async with build(quota_store={"lease_seconds": 2}) as house:
        key = await house.key(limit=1_000)
        house.u1.does(stream(T("a"), SILENCE))
        async with AsyncExitStack() as clients:
            for _ in range(5):
                client = await clients.enter_async_context(house.posted(key, streamed()))
                assert (await client.start()).status == 200
                await client.event()
            assert await house.reserved(key, 5) > 0
            house.proxy.kill()
        await house.proxy.start()

        async def standing() -> Standing:
            found = await house.standing(key)
            assert found.remaining <= 1_000 - found.used
            return found

        found = await eventually(standing, lambda found: found.reserved == 0, 10.0)
        assert found.remaining == 1_000 - found.used
        assert {row["ending"] for row in await house.rows(key, 5)} == {"crashed"}


async def test_flushed_scripts_are_loaded_again(house: House, redis_server: RedisServer) -> None:
    """T052"""
    key = await house.key()
    client = redis.asyncio.from_url(redis_server.url)
    try:
        await house.spent(key, 3, 2)
        await client.script_flush()
        replies = await asyncio.gather(*(house.post(key, chat()) for _ in range(20)))
        assert {reply.status for reply in replies} == {200}
        release = asyncio.Event()
        house.u1.seen.clear()
        house.u1.does(stream(T("a"), release, FIN, USE(3, 2), DONE))
        streams = [asyncio.ensure_future(house.post(key, streamed())) for _ in range(20)]
        await house.u1.requests(20)
        await client.script_flush()
        release.set()
        assert {reply.events[-1] for reply in await asyncio.gather(*streams)} == {"[DONE]"}
    finally:
        await client.aclose()
    assert await house.used(key) == 41 * 5
    await house.rows(key, 41)


async def test_without_redis_nothing_is_let_through_until_it_is_back(build: Build) -> None:
    """T053"""
    with RedisServer() as server:
        async with build(quota_store={"url": server.url, "timeout_ms": 200}) as house:
            key = await house.key()
            await house.spent(key, 3, 2)
            house.u1.seen.clear()
            server.stop()
            for _ in range(3):
                reply = await house.post(key, chat())
                assert reply.error(503)["code"] == "quota_unavailable"
                assert int(reply.get("retry-after") or 0) >= 1
            assert house.u1.seen == []
            assert (await house.proxy.health("/healthz")).status == 200
            assert await house.metric("weir_quota_store_up") == 0
            server.start()

            async def status() -> int:
                return (await house.post(key, chat())).status

            await eventually(status, lambda status: status == 200, 10.0)
            await house.rows(key, 2)
            key.forgotten = True  # this Redis comes back empty
            assert await house.metric("weir_quota_store_up") == 1


async def test_without_postgres_requests_go_on_and_every_row_comes_later(build: Build) -> None:
    """T060: some 60 requests in 3 s."""
    with PostgresServer() as server:
        async with build(ledger={"url": server.create_database()}) as house:
            key = await house.key()
            house.u1.does(OK(3, 2))
            await house.spent(key, 3, 2)
            await house.rows(key, 1)
            process = psutil.Process(house.proxy.pid)
            before, logged = process.memory_info().rss, len(house.proxy.log().splitlines())
            server.stop()
            for _ in range(60):
                assert (await house.post(key, chat())).status == 200
                await asyncio.sleep(0.05)
            assert (await house.post(key, chat(max_tokens=2_000_000))).error(413)
            assert await house.used(key) == 61 * 5
            assert (await house.proxy.health("/readyz")).status == 200
            assert await house.metric("weir_ledger_lag_seconds") > 0
            assert process.memory_info().rss - before < 30_000_000
            server.start()
            rows = await house.rows(key, 61)
            assert len({row["exchange_id"] for row in rows}) == 61
            lines = house.proxy.log().splitlines()[logged:]
            assert sum('"level":"warning"' in line or '"level":"error"' in line for line in lines) < 100


async def test_a_commit_whose_answer_got_lost_doubles_no_row(build: Build, config: Config) -> None:
    """T062"""
    async with Cutter.before(config["ledger"]["url"]) as cutter, build(ledger={"url": cutter.url}) as house:
        key = await house.key()
        await house.spent(key, 3, 2)
        await house.rows(key, 1)
        cutter.armed = True
        replies = await asyncio.gather(*(house.post(key, chat()) for _ in range(10)))
        assert {reply.status for reply in replies} == {200}

        async def cut() -> bool:
            return cutter.cut

        await eventually(cut, lambda cut: cut is True)
        rows = await house.rows(key, 11)
        assert sum(row["prompt_tokens"] + row["completion_tokens"] for row in rows) == 55
        hourly = await house.query("SELECT sum(requests) AS n FROM usage_hourly WHERE key_id = $1", key.id)
        assert hourly[0]["n"] == 11


async def test_a_proxy_starts_from_its_snapshot_while_the_database_is_away(build: Build) -> None:
    with PostgresServer() as server:
        async with build(ledger={"url": server.create_database()}) as house:
            key = await house.key()
            await house.spent(key, 3, 2)
            await house.rows(key, 1)
            house.proxy.sigterm()
            assert await house.proxy.ended() == 0
            server.stop()
            await house.proxy.start()
            assert (await ask(house.proxy.port, "GET", "/v1/models", [bearer(key.secret)])).status == 200
            await house.spent(key, 3, 2)
            server.start()
            await house.rows(key, 2)


class Cutter:
    """A relay before Postgres. Once armed, it cuts the line when a COMMIT of usage went through, before its answer."""

    def __init__(self, upstream: str) -> None:
        self.armed = False
        self.cut = False
        self._upstream = urlsplit(upstream)
        self.url = ""

    @classmethod
    @asynccontextmanager
    async def before(cls, upstream: str) -> AsyncIterator[Cutter]:
        cutter = cls(upstream)
        server = await asyncio.start_server(cutter._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        parts = cutter._upstream
        cutter.url = urlunsplit(parts._replace(netloc=f"{parts.username}@127.0.0.1:{port}"))
        try:
            yield cutter
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(self._upstream.hostname, self._upstream.port)
        state = {"booking": False}
        ways = [
            asyncio.ensure_future(self._ask(reader, there[1], state)),
            asyncio.ensure_future(self._answer(there[0], writer, state)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        writer.transport.abort()
        there[1].close()
        await asyncio.gather(*ways, return_exceptions=True)

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, state: dict[str, bool]) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                state["booking"] |= b"COPY" in data or b"usage_" in data
                writer.write(data)
                await writer.drain()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, state: dict[str, bool]) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                if b"COMMIT\0" in data and state["booking"] and self.armed:
                    self.armed, self.cut = False, True
                    return
                state["booking"] &= b"COMMIT\0" not in data
                writer.write(data)
                await writer.drain()
