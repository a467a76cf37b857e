"""A key that changes its team, or windows that get longer, start with what is on record."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from quotas.guarded import GuardedStore
from quotas.homes import REMEMBERED, Homes
from quotas.policy import Limit, Policy
from quotas.redis import RedisStore
from quotas.store import Account, Scope
from tests.quotas.test_guarded_filling import Record, account, ask, eventually, member, spend, used
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
