"""Many at once, and windows that slide under running requests: no quota is spent twice, none is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.cases.house import House, Key, Standing, streamed
from tests.cases.house import body as chat
from tests.cases.stub import DONE, FIN, OK, SILENCE, USE, T, hang, stream
from tests.cases.wire import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def reservation(house: House, asked: dict[str, Any]) -> int:
    """What one such request sets aside."""
    key = await house.key()
    release = asyncio.Event()
    house.u1.does(OK(1, 1, after=release))
    call = asyncio.ensure_future(house.post(key, asked))
    await house.u1.requests(1)
    held = await house.reserved(key, 1)
    release.set()
    await call
    house.u1.seen.clear()
    return held


async def test_parallel_requests_do_not_share_one_free_balance(house: House) -> None:
    """T042"""
    asked = chat(max_tokens=50)
    each = await reservation(house, asked)
    key = await house.key(limit=10 * each + each // 2)
    release = asyncio.Event()
    house.u1.does(OK(each - 50, 50, after=release))
    calls = [asyncio.ensure_future(house.post(key, asked)) for _ in range(50)]

    async def decided() -> tuple[int, int]:
        return sum(call.done() for call in calls), len(house.u1.seen)

    await eventually(decided, lambda found: sum(found) == 50, 30.0)
    assert await decided() == (40, 10)
    release.set()
    statuses = sorted([reply.status for reply in await asyncio.gather(*calls)])
    assert statuses == [200] * 10 + [429] * 40
    assert await house.used(key) == 10 * each
    assert len(house.u1.seen) == 10
    await house.rows(key, 10)


async def test_timed_out_requests_give_their_share_back(house: House) -> None:
    """T043"""
    asked = chat(model="impatient", max_tokens=50)
    each = await reservation(house, chat(max_tokens=50))
    key = await house.key(limit=12 * each)
    house.u1.does(hang)
    for reply in await asyncio.gather(*(house.post(key, asked) for _ in range(10))):
        assert reply.error(504)["code"] == "engine_timeout"
    assert await house.used(key) <= 10 * (each - 50)
    house.u1.does(OK(5, 5))
    assert (await house.post(key, asked)).status == 200
    await house.rows(key, 11)


async def test_aborted_streams_do_not_leak_their_share(house: House) -> None:
    """T044: 60 aborts; the shares of a dozen would fill the quota."""
    key = await house.key(limit=12_000)
    house.u1.does(stream(T("a"), SILENCE))
    for _ in range(60):
        async with house.posted(key, streamed(max_tokens=900)) as client:
            head = await client.start()
            assert head.status == 200
            await client.event()
            client.reset()
        assert await house.used(key) < 12_000
    assert {row["ending"] for row in await house.rows(key, 60)} == {"client_gone"}


async def test_a_refusal_by_a_later_limit_charges_no_earlier_one(house: House) -> None:
    """T045: the cheaper route fills the cap alone; then the cap refuses what the rate would allow."""
    key = await house.key(1500, 86_400, rate={"tokens": 1000, "seconds": 60}, on_overage="overflow")
    house.u2.does(OK(1480, 10))
    filling = {"model": "m1", "prompt": [7] * 1100, "max_tokens": 16}
    assert (await house.post(key, filling, path="/v1/completions")).get("x-weir-verdict") == "overflow"
    assert await house.used(key, "hour") == 1490
    for reply in await asyncio.gather(*(house.post(key, chat(max_tokens=80)) for _ in range(20))):
        assert reply.error(429)["code"] == "insufficient_quota"
        assert reply.get("x-weir-verdict") == "cap"
    for window, used in (("minute", 0), ("hour", 1490)):
        assert await house.used(key, window) == used
    assert house.u1.seen == []


async def test_a_running_request_stays_reserved_when_its_window_slides(house: House) -> None:
    """T046: a window of 2 s; the stream outlives it, then reports less than it had set aside."""
    asked = streamed(max_tokens=50)
    each = await reservation(house, chat(max_tokens=50))
    key = await house.key(limit=each + 10, window=2)
    release = asyncio.Event()
    house.u1.does(stream(T("a"), release, FIN, USE(5, 5), DONE))
    seen: list[Standing] = []

    async def watch() -> None:
        while True:
            seen.append(await house.standing(key))
            await asyncio.sleep(0.05)

    watching = asyncio.ensure_future(watch())
    async with house.posted(key, asked) as client:
        await client.start()
        await client.event()
        await asyncio.sleep(4.0)  # the window itself is what is waited for
        house.u1.does(OK(1, 1))
        refused = await house.post(key, chat(max_tokens=50))
        assert refused.status == 429
        release.set()
        await client.reply()
    await eventually(lambda: _left(house, key), lambda used: used == 0, 10.0)
    watching.cancel()
    await asyncio.wait([watching])
    for standing in seen:
        assert 0 <= standing.used <= standing.limit
        assert 0 <= standing.remaining <= standing.limit
    assert (await house.post(key, chat(max_tokens=50))).status == 200
    await house.rows(key, 2)


async def test_two_endings_at_once_settle_once(house: House) -> None:
    """T049: the client leaves around the moment at which the answer ends."""
    key = await house.key()
    house.u1.does(stream(T("a"), FIN, USE(9, 4), DONE))
    for number in range(60):
        async with house.posted(key, streamed()) as client:
            await client.start()
            while await client.event():
                await asyncio.sleep((number % 5) / 1000)
                if number % 3 == 0:
                    break
            client.reset()
    rows = await house.rows(key, 60)
    assert {row["ending"] for row in rows} <= {"completed", "client_gone"}


async def _left(house: House, key: Key) -> int:
    standing = await house.standing(key)
    return standing.used + standing.reserved
