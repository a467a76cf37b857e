"""Whole proxies that end, and stores that go away or come back empty meanwhile: books and quotas agree afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from meter.ledger.journal import NOTE
from quotas.untold import Debt
from tests.cases.conftest import Build
from tests.cases.house import BODY, CHAT, NO_LIMITS, House, Key, body, streamed
from tests.cases.proxy import ADMIN_TOKEN, Proxy
from tests.cases.stub import DONE, FIN, OK, USE, Pause, Stub, T, stream
from tests.cases.wire import as_json, ask, bearer, eventually
from tests.services.redis import RedisServer

pytestmark = pytest.mark.asyncio(loop_scope="session")

How = Literal["killed", "stopped"]


async def end(proxy: Proxy, how: How) -> None:
    if how == "killed":
        proxy.kill()
    else:
        proxy.sigterm()
        assert await proxy.ended() == 0


# ---- a store in the process itself -------------------------------------------------------------------------------------


@pytest.fixture
async def small(tmp_path: Path, u1: Stub) -> AsyncIterator[Proxy]:
    """A proxy that needs nothing: quotas in memory, the ledger in a file."""
    sections: dict[str, Any] = {
        "quota_store": {"url": "memory://", "on_down": "deny"},
        "ledger": {"url": f"sqlite+aiosqlite:///{tmp_path}/weir.db"},
        "backends": {"u1": {"url": f"http://127.0.0.1:{u1.port}"}},
        "models": {"m1": {"primary": [{"backend": "u1", "model": "m1"}]}},
        "tiers": {
            "small": {**NO_LIMITS, "rate": {"tokens": 900, "seconds": 600}, "cap": {"tokens": 1000, "seconds": 3600}}
        },
    }
    async with Proxy(tmp_path, sections).running() as proxy:
        yield proxy


async def made_key(proxy: Proxy) -> str:
    sent = [bearer(ADMIN_TOKEN), ("Content-Type", "application/json")]
    made = await ask(proxy.admin_port, "POST", "/admin/v1/keys", sent, as_json({"name": "k", "tier": "small"}))
    assert made.status == 201, made.body
    secret: str = made.json()["secret"]

    async def known() -> int:
        return (await ask(proxy.port, "GET", "/v1/models", [bearer(secret)])).status

    await eventually(known, lambda status: status == 200)
    return secret


async def status(proxy: Proxy, secret: str) -> int:
    sent = [bearer(secret), ("Content-Type", "application/json")]
    return (await ask(proxy.port, "POST", CHAT, sent, as_json(BODY))).status


async def used(proxy: Proxy, secret: str) -> dict[str, int]:
    view = await ask(proxy.port, "GET", "/v1/quota", [bearer(secret)])
    assert view.status == 200, view.body
    return {window["name"]: window["used"] for window in view.json()["windows"]}


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_a_restart_does_not_reset_quotas_in_memory(how: How, small: Proxy, u1: Stub) -> None:
    secret = await made_key(small)
    u1.does(OK(150, 50))
    for _ in range(3):
        assert await status(small, secret) == 200
    await end(small, how)
    await small.start()
    assert await used(small, secret) == {"minute": 600, "hour": 600}
    assert await status(small, secret) == 200
    await end(small, how)
    await small.start()
    assert await status(small, secret) == 200
    assert await status(small, secret) == 429
    assert await used(small, secret) == {"minute": 1_000, "hour": 1_000}


# ---- a Redis that is away when the process ends -------------------------------------------------------------------------


@pytest.fixture
def server() -> Any:
    with RedisServer() as server:
        yield server


async def standing(house: House, key: Key) -> tuple[int, int] | None:
    """Used and held; None while the store is away."""
    if (await house.admin("GET", f"/keys/{key.id}/windows")).status == 503:
        return None
    found = await house.standing(key)
    return found.used, found.reserved


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_what_could_not_be_settled_is_settled_by_the_successor(
    how: How, build: Build, server: RedisServer
) -> None:
    """The lease lives on in the store with its whole hold; the successor gives it back."""
    async with build(quota_store={"url": server.url, "timeout_ms": 200, "on_down": "deny"}) as house:
        key = await house.key(limit=1_000)
        release = asyncio.Event()
        house.u1.seen.clear()
        house.u1.does(OK(30, 20, after=release))
        answer = asyncio.ensure_future(house.post(key, body(max_tokens=300)))
        await house.u1.requests(1)
        server.pause()
        release.set()
        assert (await answer).status == 200
        await house.rows(key, 1)
        await end(house.proxy, how)
        server.resume()
        await house.proxy.start()
        await eventually(lambda: standing(house, key), lambda found: found == (50, 0))


async def noted(proxy: Proxy) -> int:
    """Tokens that were served without the store, in the note for a successor."""
    notes = [note.read_bytes() for note in proxy.journal.glob(f"*/{NOTE}")]
    debts = [debt for note in notes for debt in msgspec.msgpack.decode(note, type=list[Debt])]
    return sum(debt.tokens for debt in debts if debt.primary is not None)


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_what_was_served_while_the_store_was_away_is_booked_by_the_successor(
    how: How, build: Build, server: RedisServer
) -> None:
    async with build(quota_store={"url": server.url, "timeout_ms": 100, "on_down": "local"}) as house:
        key = await house.key(limit=1_000)
        await house.spent(key, 10, 5)
        server.pause()
        for _ in range(3):
            await house.spent(key, 30, 20)
        await house.rows(key, 4)
        await eventually(lambda: noted(house.proxy), lambda tokens: tokens == 150)
        await end(house.proxy, how)
        server.resume()
        await house.proxy.start()
        await eventually(lambda: standing(house, key), lambda found: found == (165, 0))


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_a_redis_that_comes_back_empty_meanwhile_counts_all_of_it_once(
    how: How, build: Build, server: RedisServer
) -> None:
    async with build(quota_store={"url": server.url, "timeout_ms": 100, "on_down": "local"}) as house:
        key = await house.key(limit=1_000)
        await house.spent(key, 10, 5)
        server.kill()
        await house.spent(key, 30, 20)
        await house.rows(key, 2)
        await end(house.proxy, how)
        server.start()
        await house.proxy.start()
        await house.spent(key, 1, 1)
        await house.rows(key, 3)
        assert await house.used(key) == 67


async def test_an_emptied_redis_does_not_reset_the_hour(build: Build, server: RedisServer) -> None:
    async with build(quota_store={"url": server.url, "timeout_ms": 200, "on_down": "deny"}) as house:
        key = await house.key(limit=1_000)
        team_mate = await house.key(limit=1_000)
        await house.spent(key, 600, 300)
        await house.spent(team_mate, 10, 5)
        server.kill()
        server.start()

        async def answer() -> int:
            return (await house.post(key, body(max_tokens=300))).status

        assert await eventually(answer, lambda status: status != 503) == 429
        assert await house.used(key) == 900
        assert await house.used(team_mate) == 15


# ---- a running stream whose extension cannot be asked -------------------------------------------------------------------


CAP = 1_200


@pytest.mark.parametrize("on_down", ["deny", "local", "allow"])
async def test_a_running_stream(on_down: str, build: Build, server: RedisServer) -> None:
    """deny ends it at its hold; local extends it by the share, here a half, of what was left; allow lets it go on."""
    terms = {"url": server.url, "timeout_ms": 100, "on_down": on_down, "local_share": 0.5}
    async with build(quota_store=terms) as house:
        key = await house.key(limit=CAP, on_cap="clamp", default_output_tokens=400)
        await house.spent(key, 1, 1)
        away = asyncio.Event()
        tokens = [step for _ in range(300) for step in (*[T("b")] * 3, Pause(0.01))]
        house.u1.does(stream(T("b"), away, *tokens, FIN, USE(8, 901), DONE))
        async with house.posted(key, streamed(max_tokens=1_000)) as client:
            assert (await client.start()).status == 200
            await client.event()
            server.pause()
            away.set()
            events = [await client.event()]
            while b"[DONE]" not in events[-1]:
                events.append(await client.event())
        (row,) = [row for row in await house.rows(key, 2) if row["streamed"]]
        hold = row["expected_tokens"]
        total = row["prompt_tokens"] + row["completion_tokens"]
        covered = {"deny": hold, "local": hold + (CAP - 2 - hold) // 2, "allow": 909}[on_down]
        assert covered <= total <= covered + 90  # what came while the store's deadline passed
        assert row["ending"] == ("completed" if on_down == "allow" else "cut_at_cap")
        assert any(b'"finish_reason":"length"' in said for said in events) == (on_down != "allow")
        server.resume()
        await eventually(lambda: standing(house, key), lambda found: found == (2 + total, 0))
