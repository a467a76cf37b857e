"""One Redis under the load of several sidecars that hangs, or forgets its scripts: how much is admitted over the limits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from redis.asyncio import Redis

from quotas.guarded import GuardedStore
from quotas.policy import Policy
from tests.cases.wire import eventually
from tests.faults import bounds
from tests.faults.load import Load, account, all_up, sidecars, told_all
from tests.faults.relay import Relay
from tests.faults.truth import Truth
from tests.services.redis import RedisServer

DEFAULTS = Policy(max_parallel=None)
CAP, BURST = 50_000, 4_000


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A Redis of the test's own."""
    with RedisServer() as started:
        yield started


@pytest.mark.parametrize("pause", [1.5, pytest.param(10.0, marks=pytest.mark.deep)])
async def test_a_store_that_hangs_costs_at_most_the_shares_that_are_not_told_yet(
    server: RedisServer, pause: float
) -> None:
    who, truth = account(DEFAULTS), Truth(DEFAULTS)
    async with sidecars(server.url, server.url, on_down="local") as stores:
        async with Load(stores, who, truth) as load:
            await load.until(lambda: truth.used > CAP // 4)
            server.pause()
            await asyncio.sleep(pause)  # the fault itself
            server.resume()
            await eventually(lambda: all_up(stores), bool, 20.0)
            await load.further(100)
        await told_all(stores, who, truth)
    print(f"hung for {pause:g} s, local: {truth.most_over} over")
    assert truth.most_over["hour"] <= bounds.while_away(CAP, 2)
    assert truth.most_over["burst"] <= bounds.while_away(BURST, 2)


async def test_a_store_that_hangs_under_deny_costs_nothing(server: RedisServer) -> None:
    who, truth = account(DEFAULTS), Truth(DEFAULTS)
    async with sidecars(server.url, server.url, on_down="deny") as stores:
        async with Load(stores, who, truth) as load:
            await load.until(lambda: truth.used > CAP // 4)
            server.pause()
            await load.further(100)
            server.resume()
            await eventually(lambda: all_up(stores), bool, 20.0)
            await load.until(lambda: truth.used > CAP // 2)
        await told_all(stores, who, truth)
    print(f"hung, deny: {truth.most_over} over")
    assert truth.most_over == {"hour": 0, "burst": 0}


@pytest.mark.parametrize("seen", [0, CAP // 4])
async def test_a_sidecar_that_is_cut_off_alone_costs_at_most_its_share(server: RedisServer, seen: int) -> None:
    """The worst for `local`: meanwhile the store sells to the others all that is left. `seen`: what was used before."""
    who, truth = account(DEFAULTS), Truth(DEFAULTS)
    async with Relay(server.port).laid() as wire, sidecars(server.url, wire.url, on_down="local") as stores:
        async with Load(stores, who, truth) as load:
            await load.until(lambda: truth.used >= seen)
            wire.cut()
            await eventually(lambda: _away(stores[1]), bool, 20.0)
            await load.until(lambda: truth.used > CAP)
            await load.further(60)
            wire.mend()
            await eventually(lambda: all_up(stores), bool, 20.0)
            await load.further(50)
        await told_all(stores, who, truth)
    print(f"one of two cut off when it had seen {seen} used, local: {truth.most_over} over")
    assert 0 < truth.most_over["hour"] <= bounds.while_away(CAP, 2)
    assert truth.most_over["burst"] <= bounds.while_away(BURST, 2)


async def _away(store: GuardedStore) -> bool:
    return not store.up


async def test_forgotten_scripts_cost_nothing(server: RedisServer) -> None:
    who, truth = account(DEFAULTS), Truth(DEFAULTS)
    async with (
        Redis.from_url(server.url) as admin,
        sidecars(server.url, server.url, on_down="local", timeout=10.0) as stores,
    ):
        async with Load(stores, who, truth) as load:
            for _ in range(10):
                await admin.script_flush()
                await admin.function_flush()
                await load.further(20)
            await load.until(lambda: load.refused > 20)
        await told_all(stores, who, truth)
    print(f"scripts flushed: {truth.most_over} over")
    assert truth.most_over == {"hour": 0, "burst": 0}
    assert truth.used > CAP * 0.9
