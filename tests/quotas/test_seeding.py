"""A slot of which a store knows nothing says so, and starts from what is on record."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quotas.memory import MemoryStore
from quotas.policy import Policy
from quotas.redis import RedisStore
from quotas.store import Account, Ask, Past, QuotaStore, Scope, Seed, Unseeded
from tests.quotas.conftest import ServerOf
from tests.quotas.histories import Clock
from tests.services.redis import binaries

serial = itertools.count()
DEFAULTS = Policy(max_parallel=None)


@pytest.fixture(params=["memory", *binaries()], ids=lambda where: Path(where).name)
async def store(request: pytest.FixtureRequest, clock: Clock, server_of: ServerOf) -> AsyncIterator[QuotaStore]:
    opened: QuotaStore = (
        MemoryStore(clock)
        if request.param == "memory"
        else RedisStore(server_of(request.param).url, timeout=5, clock=clock)
    )
    yield opened
    await opened.close()


@pytest.fixture
def who() -> Account:
    slot = f"team:seeding {next(serial)}"
    return Account(slot, (Scope("key", "k", DEFAULTS), Scope("team", "t", DEFAULTS)))


def ask(lease: str, tokens: int, *, forced: bool = False) -> Ask:
    return Ask(lease, tokens, tokens, tokens, tokens, forced=forced)


async def used(store: QuotaStore, who: Account) -> list[int]:
    """Of the key's minute, burst and hour, and then the team's."""
    return [window.used for window in (await store.peek(who)).windows]


async def test_nothing_is_admitted_nor_written_before_the_seed(store: QuotaStore, who: Account) -> None:
    for forced in (False, True):
        with pytest.raises(Unseeded, match="nothing is known of team:seeding"):
            await store.admit(who, ask("early", 5, forced=forced))
    assert (await store.progress(who, "early", 5, 10)).expired
    await store.settle(who, "early", 5)
    await store.renew([(who, "early")])
    view = await store.peek(who)
    assert (view.seeded, view.leases, await used(store, who)) == (False, (), [0] * 6)
    assert await store.seed(who.slot, Seed())
    assert (await store.peek(who)).seeded
    assert (await store.admit(who, ask("early", 5))).kind == "base"


async def test_one_of_many_seeds_is_taken(store: QuotaStore, who: Account, clock: Clock) -> None:
    seeds = [Seed(who.scopes, (Past("key", "k", clock.now, 100 + n),)) for n in range(20)]
    taken = await asyncio.gather(*(store.seed(who.slot, seed) for seed in seeds))
    assert taken.count(True) == 1
    assert (await used(store, who))[2] == 100 + taken.index(True)


async def test_every_scope_starts_from_its_own_past_in_the_windows_it_falls_into(
    store: QuotaStore, who: Account, clock: Clock
) -> None:
    now = clock.now
    past = (
        Past("key", "k", now - 5_000, 7),
        Past("team", "t", now - 2_000, 9_000, primary=False),
        Past("key", "k", now - 1_000, 500),
        Past("team", "t", now - 1_000, 600),
        Past("key", "k", now - 90, 1_000),
        Past("key", "stranger", now - 50, 11),
        Past("key", "k", now - 30, 300),
        Past("team", "t", now - 30, 400, primary=False),
        Past("team", "t", now + 3, 40),
    )
    assert await store.seed(who.slot, Seed(who.scopes, past))
    assert await used(store, who) == [300, 1_300, 1_800, 40, 40, 10_040]
    clock.now += 32
    assert await used(store, who) == [0, 300, 1_800, 40, 40, 10_040]
    assert (await store.admit(who, ask("more", 1_900))).kind == "base"


async def test_a_seeded_store_answers_as_one_that_saw_it_all(store: QuotaStore, who: Account, clock: Clock) -> None:
    """Charge by charge on one slot, from the record on another: the same windows, the same verdicts ever after."""
    lived = Account(f"{who.slot} lived", who.scopes)
    assert await store.seed(lived.slot, Seed())
    past, opened = list[Past](), {}
    for n in range(12):
        verdict = await store.admit(lived, ask(f"{n}", 700, forced=n > 8))
        if verdict.admitted:
            await store.settle(lived, f"{n}", 700 + 40 * n)
            past += [Past(scope.kind, scope.name, clock.now, 700 + 40 * n) for scope in who.scopes]
        if verdict.kind == "burst":
            opened |= {(scope.kind, scope.name): clock.now for scope in who.scopes if not opened}
        clock.now += 1
    assert opened
    assert await store.seed(who.slot, Seed(who.scopes, tuple(past), opened))
    for wait in (0, 1, 40, 25, 30, 30, 60, 600, 3_000):
        clock.now += wait
        assert (await store.peek(who)).windows == (await store.peek(lived)).windows
        kinds = [(await store.admit(account, ask(f"after {clock.now}", 900))).kind for account in (who, lived)]
        assert kinds[0] == kinds[1]


async def test_what_a_key_used_elsewhere_is_charged_at_its_own_moments(
    store: QuotaStore, who: Account, clock: Clock
) -> None:
    """In a slot that is in use: the same windows, and the same verdicts ever after, as had it all been used there."""
    lived, others = Account(f"{who.slot} lived", who.scopes[:1]), Account(who.slot, who.scopes[1:])
    own = Account(who.slot, who.scopes[:1])
    assert await store.seed(lived.slot, Seed())
    assert await store.seed(who.slot, Seed())
    assert (await store.admit(others, ask("another's", 100))).admitted
    past, opened = list[Past](), {}
    for n in range(12):
        verdict = await store.admit(lived, ask(f"{n}", 700, forced=n > 8))
        if verdict.admitted:
            await store.settle(lived, f"{n}", 700 + 40 * n)
            past.append(Past("key", "k", clock.now, 700 + 40 * n))
        if verdict.kind == "burst":
            opened = opened or {("key", "k"): clock.now}
        clock.now += 1
    assert opened
    assert await store.recall(own, Seed((), tuple(past), opened), clock.now)
    for wait in (0, 1, 40, 25, 30, 30, 60, 600, 3_000):
        clock.now += wait
        assert (await store.peek(own)).windows == (await store.peek(lived)).windows
        kinds = [(await store.admit(account, ask(f"after {clock.now}", 900))).kind for account in (own, lived)]
        assert kinds[0] == kinds[1]


async def test_what_a_key_used_elsewhere_is_added_to_what_it_used_here(
    store: QuotaStore, who: Account, clock: Clock
) -> None:
    own = Account(who.slot, who.scopes[:1])
    assert await store.seed(who.slot, Seed())
    assert (await store.admit(who, ask("here", 100))).admitted
    await store.settle(who, "here", 90)
    assert (await store.admit(who, ask("running", 30))).admitted
    past = (Past("key", "k", clock.now - 50, 500), Past("key", "k", clock.now - 3_000, 7, primary=False))
    assert await store.recall(own, Seed((), past), clock.now)
    assert await used(store, who) == [590, 590, 597, 90, 90, 90]
    assert [lease.held for lease in (await store.peek(who)).leases] == [30]
    clock.now += 12
    assert await used(store, who) == [90, 590, 597, 90, 90, 90]
    await store.settle(who, "running", 30)
    assert await used(store, who) == [120, 620, 627, 120, 120, 120]


async def test_of_several_that_recall_the_same_at_once_one_is_heard(
    store: QuotaStore, who: Account, clock: Clock
) -> None:
    own, seed = Account(who.slot, who.scopes[:1]), Seed((), (Past("key", "k", clock.now, 100),))
    assert not await store.recall(own, seed, clock.now)  # there is no mark
    assert await store.seed(who.slot, Seed())
    looked = clock.now
    clock.now += 0.5
    assert sum(await asyncio.gather(*(store.recall(own, seed, looked) for _ in range(20)))) == 1
    assert await used(store, own) == [100, 100, 100]
    clock.now += 0.5
    assert await store.recall(own, seed, clock.now)
    assert await used(store, own) == [200, 200, 200]


async def test_what_is_forgotten_is_unknown_and_may_be_told_anew(store: QuotaStore, who: Account, clock: Clock) -> None:
    assert await store.seed(who.slot, Seed())
    assert (await store.admit(who, ask("lost", 100))).admitted
    clock.now += 1_000
    assert (await store.admit(who, ask("ahead", 100))).admitted
    clock.now -= 1_000
    await store.forget(who.slot)
    with pytest.raises(Unseeded):
        await store.admit(who, ask("new", 100))
    assert await store.seed(who.slot, Seed(who.scopes, (Past("key", "k", clock.now - 10, 300),)))
    assert await used(store, who) == [300, 300, 300, 0, 0, 0]
    assert (await store.progress(who, "ahead", 10)).expired
    verdict = await store.admit(who, ask("new", 100))
    assert (verdict.kind, verdict.now) == ("base", clock.now)


async def test_forgetting_one_slot_leaves_the_others(store: QuotaStore, who: Account) -> None:
    other = Account(f"{who.slot}*", who.scopes)
    for account in (who, other):
        assert await store.seed(account.slot, Seed())
        assert (await store.admit(account, ask("running", 100))).admitted
    await store.forget(who.slot)
    assert not (await store.progress(other, "running", 10)).expired


async def test_a_thousand_scopes_are_seeded_at_once(store: QuotaStore, clock: Clock) -> None:
    scopes = tuple(Scope("key", f"k{n}", DEFAULTS) for n in range(1_000))
    past = tuple(
        Past("key", f"k{n}", clock.now - ago, 10) for ago in (3_000, 2_000, 1_000, 100, 10, 1) for n in range(1_000)
    )
    slot = f"team:large {next(serial)}"
    assert await store.seed(slot, Seed(scopes, past))
    for n in (0, 999):
        assert await used(store, Account(slot, (scopes[n],))) == [20, 30, 60]
