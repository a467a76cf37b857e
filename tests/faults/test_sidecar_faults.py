"""Two sidecars as processes share quotas through one Redis: races, wrong clocks, kills. How much is used over the cap."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from meter.gateway.plan import SLICE
from tests.cases.wire import eventually
from tests.faults import bounds
from tests.faults.fleet import CALLERS, EVENT_TOKENS, PROMPT, Fleet, Key, fleet
from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer

OUTPUT = 50
EACH = PROMPT + OUTPUT
"""What a plain request holds, and uses."""


def cap(tokens: int, seconds: int = 3_600, **more: Any) -> dict[str, Any]:
    return {"cap": {"tokens": tokens, "seconds": seconds}, **more}


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A Redis of the test's own."""
    with RedisServer() as started:
        yield started


@pytest.mark.parametrize(("ahead", "rounds"), [(30.0, 3), pytest.param(0.0, 100, marks=pytest.mark.deep)])
async def test_of_fifty_at_once_through_two_sidecars_exactly_ten_find_room_whatever_their_clocks_say(
    tmp_path: Path, server: RedisServer, postgres_server: PostgresServer, ahead: float, rounds: int
) -> None:
    """By the clock of the one that is ahead, whatever the other used would have left the window of 25 s at once."""
    room = cap(10 * EACH + EACH // 2, 25)
    async with fleet(tmp_path, server.url, postgres_server.create_database(), room, ahead=(0.0, ahead)) as pair:
        for _ in range(rounds):
            assert await fifty(pair) == [200] * 10 + [429] * 40


async def fifty(pair: Fleet) -> list[int]:
    """The statuses of fifty requests of a new key, sent to both at once and answered when all are decided."""
    key, engine = await pair.key(), pair.engine
    engine.release.clear()
    calls = [asyncio.ensure_future(pair.post(number % 2, key, OUTPUT)) for number in range(50)]

    async def decided() -> int:
        return sum(call.done() for call in calls) + key.truth.running

    await eventually(decided, lambda count: count == 50, 30.0)
    engine.release.set()
    statuses = sorted([reply.status for reply in await asyncio.gather(*calls)])
    assert key.truth.most_over["hour"] <= 0
    return statuses


STREAMS = 50
STREAM_HOLD = PROMPT + 2 * SLICE
"""The most that one holds before it used its first slice."""


async def test_a_sidecar_killed_with_fifty_streams_costs_at_most_what_they_had_not_reported(
    tmp_path: Path, server: RedisServer, postgres_server: PostgresServer
) -> None:
    """Their holds stay until their leases expire, are booked then, and are corrected by what its journal knew."""
    tokens = STREAMS * STREAM_HOLD + 20 * EACH
    terms = cap(tokens, default_output_tokens=SLICE)
    half_a_slice = STREAMS * (PROMPT + SLICE // 2)
    async with fleet(tmp_path, server.url, postgres_server.create_database(), terms, lease_seconds=2) as pair:
        key = await pair.key()
        pair.engine.release.clear()
        async with AsyncExitStack() as clients:
            for _ in range(STREAMS):
                await clients.enter_async_context(pair.streaming(0, key, 10 * SLICE))
            pair.engine.release.set()
            await eventually(lambda: used(key), lambda tokens: tokens > half_a_slice, 60.0)
            assert key.truth.running == STREAMS
            pair.sidecars[0].kill()
            await eventually(lambda: running(key), lambda count: count == 0, 60.0)
        await pair.spend(key, OUTPUT, refusals=3)
        while_held = key.truth.most_over["hour"]
        await eventually(lambda: held(pair, key), lambda tokens: tokens == 0, 60.0)
        await pair.spend(key, OUTPUT, refusals=3)
        while_booked = key.truth.most_over["hour"]
        await pair.sidecars[0].start()

        async def sold() -> int:
            await pair.spend(key, OUTPUT, refusals=3)
            return key.truth.used

        await eventually(sold, lambda used: used > tokens - EACH, 60.0)  # all that came free
        over = key.truth.most_over["hour"]
    print(f"killed with {STREAMS} streams: {while_held} over, {while_booked} once booked, {over} once corrected")
    assert while_held <= 0
    assert while_booked <= 0
    assert over <= bounds.of_a_killed_sidecar(STREAMS) + bounds.by_the_engine(STREAMS, 1, EVENT_TOKENS)


async def running(key: Key) -> int:
    return key.truth.running


async def held(pair: Fleet, key: Key) -> int:
    return (await pair.window(key))["held"]


CAP = 15_000


@pytest.mark.parametrize(
    ("on_down", "bound", "twice"),
    [
        ("local", bounds.while_away(CAP, 2) + bounds.not_yet_carried(CALLERS, EACH), bounds.counted_twice(CAP, 2)),
        ("deny", bounds.not_yet_carried(CALLERS, EACH), 0),
    ],
)
async def test_a_redis_killed_under_load_that_comes_back_empty_does_not_start_the_hour_anew(
    tmp_path: Path, server: RedisServer, postgres_server: PostgresServer, on_down: str, bound: int, twice: int
) -> None:
    async with fleet(
        tmp_path, server.url, postgres_server.create_database(), cap(CAP), on_down=on_down, timeout_ms=200
    ) as pair:
        key = await pair.key()
        load = asyncio.ensure_future(pair.spend(key, OUTPUT, refusals=10))
        await eventually(lambda: used(key), lambda tokens: tokens > CAP // 3, 30.0)
        server.kill()
        await pair.stores_are(up=False)
        server.start()
        await pair.stores_are(up=True)
        await load
        await pair.spend(key, OUTPUT, refusals=10)
        counted = await eventually(lambda: booked(pair, key), lambda tokens: tokens >= key.truth.used, 20.0)
    print(
        f"killed and back empty, {on_down}: {key.truth.most_over['hour']} over, {counted - key.truth.used} too much counted"
    )
    assert key.truth.used > CAP - EACH
    assert key.truth.most_over["hour"] <= bound
    assert counted - key.truth.used <= twice


async def used(key: Key) -> int:
    return key.truth.used


async def booked(pair: Fleet, key: Key) -> int:
    return (await pair.window(key))["used"]
