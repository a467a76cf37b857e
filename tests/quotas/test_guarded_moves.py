"""A key that changes its team, or windows that get longer, start with what is on record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from quotas.guarded import GuardedStore
from quotas.homes import REMEMBERED, Homes
from quotas.policy import Limit, Policy
from quotas.redis import RedisStore
from quotas.store import Account, Scope
from tests.quotas.patience import eventually
from tests.quotas.test_guarded_filling import Record, account, ask, held, member, spend, used
from tests.services.redis import RedisServer

HOUR = Policy(None, None, Limit(1_000, 3_600), None)
MINUTE = Policy(None, None, Limit(1_000, 60), None)


def alone(policy: Policy, slot: str = "key:k") -> Account:
    return Account(slot, (Scope("key", "k", policy),))


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        (alone(HOUR), alone(HOUR), False),
        (alone(HOUR), alone(HOUR, "team:search"), True),
        (alone(HOUR, "team:search"), alone(HOUR), True),
        (alone(HOUR), alone(HOUR, "shadow:k"), False),
        (alone(MINUTE), alone(HOUR), True),
        (alone(HOUR), alone(MINUTE), False),
        (alone(HOUR), alone(replace(HOUR, cap=Limit(9, 3_600))), False),
        (alone(HOUR), alone(replace(HOUR, rate=Limit(9, 60), burst=None)), True),
        (alone(Policy()), alone(Policy(burst=Limit(8_000, 5))), True),
    ],
)
def test_what_moved_or_reaches_further(before: Account, now: Account, changed: bool) -> None:
    homes = Homes()
    assert not homes.changed(before)
    homes.note(before)
    assert bool(homes.changed(now)) == changed
    homes.note(now)
    assert not homes.changed(now)


def test_only_so_many_are_remembered() -> None:
    homes = Homes()
    homes.note(alone(HOUR))
    for n in range(REMEMBERED):
        homes.note(account(str(n)))
    assert not homes.changed(alone(HOUR, "team:search"))
    assert homes.changed(replace(account("1"), slot="team:search"))


@pytest.fixture
def record() -> Record:
    return Record()


@pytest.fixture
async def store(redis_server: RedisServer, record: Record) -> AsyncIterator[GuardedStore]:
    inner = RedisStore(redis_server.url, timeout=5)
    guard = GuardedStore(inner, on_down="deny", clock=time.time, refill=record)
    yield guard
    for slot in ("key:k", "key:a", "team:search"):
        await guard.forget(slot)
    await guard.close()


async def test_a_key_takes_what_it_used_along_into_a_team_in_use(store: GuardedStore, record: Record) -> None:
    assert await spend(store, record, member("b"), 50)
    assert await spend(store, record, account("a"), 700)
    record.moved = {"key:a": "team:search"}
    assert await spend(store, record, member("a"), 10)
    assert await used(store, member("a")) == 710
    assert await used(store, member("a"), "team") == 60
    assert await spend(store, record, member("a"), 10)
    assert await used(store, member("a")) == 720
    assert record.asked == 3  # each slot once, and once for the move


async def test_a_window_that_gets_longer_has_what_is_on_record(store: GuardedStore, record: Record) -> None:
    assert await spend(store, record, alone(MINUTE), 300)
    record.add("long ago", alone(MINUTE), 500, ago=600)
    assert await spend(store, record, alone(MINUTE), 10)
    assert await used(store, alone(MINUTE)) == 310
    assert (await store.admit(alone(HOUR), ask("next", 190))).admitted
    assert not (await store.admit(alone(HOUR), ask("too much", 1))).admitted
    assert await used(store, alone(HOUR)) == 810
    await record.end(store, alone(HOUR), "next", 190)


async def test_while_the_record_is_away_it_goes_on_and_is_made_good_later(store: GuardedStore, record: Record) -> None:
    assert await spend(store, record, member("b"), 50)
    assert await spend(store, record, account("a"), 700)
    record.moved, record.away = {"key:a": "team:search"}, True
    assert await spend(store, record, member("a"), 10)
    assert await used(store, member("a")) == 10
    record.away = False

    async def made_good() -> bool:
        assert await spend(store, record, member("a"), 1)
        return await used(store, member("a")) == record.key_truth("a")

    await eventually(made_good)


async def test_what_moved_counts_no_longer_than_if_it_had_stayed(store: GuardedStore, record: Record) -> None:
    assert await spend(store, record, member("b"), 50)
    assert (await store.admit(account("a"), ask("first", 1))).admitted
    record.add("long ago", account("a"), 300, ago=3_595)
    await record.end(store, account("a"), "first", 1)
    record.moved = {"key:a": "team:search"}
    assert await spend(store, record, member("a"), 10)
    assert await used(store, member("a")) == 311

    async def slid_out() -> bool:
        return await used(store, member("a")) == 11

    await eventually(slid_out, 30)  # five seconds, and a slot


async def test_a_running_stream_goes_with_its_key(
    store: GuardedStore, record: Record, redis_server: RedisServer
) -> None:
    assert await spend(store, record, member("b"), 50)
    assert (await store.admit(account("a"), ask("stream", 500))).admitted
    assert (await store.progress(account("a"), "stream", 200)).covered == 500
    record.moved = {"key:a": "team:search"}
    assert (await store.admit(member("a"), ask("next", 10))).admitted
    assert await used(store, member("a")) == 200
    assert await held(store, member("a")) == 310
    beside = RedisStore(redis_server.url, timeout=5)
    assert [await used(beside, account("a")), await held(beside, account("a"))] == [200, 0]
    await beside.close()
    told = await store.progress(member("a"), "stream", 400, 600)
    assert (told.expired, told.extended, told.covered) == (False, True, 600)
    await record.end(store, member("a"), "stream", 450)
    await record.end(store, member("a"), "next", 10)
    assert await used(store, member("a")) == 460
    assert await used(store, member("a"), "team") == 50 + 450 + 10
    assert await held(store, member("a")) == 0


async def test_a_stream_that_ends_after_its_key_moved_is_told_in_the_new_place(
    store: GuardedStore, record: Record, redis_server: RedisServer
) -> None:
    beside = RedisStore(redis_server.url, timeout=5)
    assert await spend(store, record, member("b"), 50)
    assert (await store.admit(account("a"), ask("stream", 500))).admitted
    record.moved = {"key:a": "team:search"}
    record.add("stream", account("a"), 300)
    await store.settle(member("a"), "stream", 300)

    async def told() -> bool:
        return await used(beside, member("a")) == 300 and await held(beside, account("a")) == 0

    await eventually(told)
    await beside.close()


async def test_a_key_that_comes_back_brings_what_it_used_away(store: GuardedStore, record: Record) -> None:
    assert await spend(store, record, member("b"), 50)
    assert await spend(store, record, account("a"), 700)
    record.moved = {"key:a": "team:search"}
    assert await spend(store, record, member("a"), 10)
    record.moved = {"team:search": "key:a"}
    assert await spend(store, record, account("a"), 5)
    assert await used(store, account("a")) == 715


async def test_sidecars_that_see_a_move_at_once_charge_it_once(redis_server: RedisServer, record: Record) -> None:
    """One of them never asked for the key before: it knows of the move by the edit alone."""
    inners = [RedisStore(redis_server.url, timeout=5) for _ in range(4)]
    guards = [GuardedStore(inner, on_down="deny", clock=time.time, refill=record) for inner in inners]
    assert await spend(guards[0], record, member("b"), 50)
    assert await spend(guards[0], record, account("a"), 700)
    for n, guard in enumerate(guards[1:-1]):
        assert (await guard.admit(account("a"), ask(f"stream {n}", 100))).admitted
        await guard.progress(account("a"), f"stream {n}", 40)
    guards[-1].was(account("a"))
    record.moved, record.slow = {"key:a": "team:search"}, 0.1
    await asyncio.gather(*(guard.admit(member("a"), ask(f"next {n}", 10)) for n, guard in enumerate(guards)))
    assert await used(guards[0], member("a")) == 700 + 2 * 40
    assert await held(guards[0], member("a")) == 2 * 60 + 4 * 10
    for n, guard in enumerate(guards):
        await guard.settle(member("a"), f"next {n}", 10)
        if 0 < n < 3:
            await guard.settle(member("a"), f"stream {n - 1}", 90)
    assert await used(guards[0], member("a")) == 700 + 2 * 90 + 4 * 10
    for slot in ("key:a", "team:search"):
        await guards[0].forget(slot)
    for guard in guards:
        await guard.close()
