"""A store whose clock is set counts as away for a minute; then it starts anew from what is on record, in its new time."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from quotas.guarded import GuardedStore
from quotas.policy import Limit, Policy
from quotas.redis import RedisStore
from quotas.store import Account, Ask, Past, QuotaStore, Scope, Seed, StoreUnavailable
from tests.quotas.histories import Clock
from tests.quotas.patience import answers, eventually
from tests.quotas.test_guarded_filling import held, used
from tests.services.redis import RedisServer

CAPPED = Policy(None, None, Limit(1_000, 3_600), None)
WHO = Account("key:k", (Scope("key", "k", CAPPED),))


def ask(lease: str, tokens: int) -> Ask:
    return Ask(lease, tokens, tokens, tokens, tokens)


class Shelf:
    """What ended, with its moment by a clock that nobody sets; `ours` is that clock."""

    def __init__(self, ours: Clock) -> None:
        self._ours = ours
        self._ended: list[tuple[str, int, float]] = []

    async def __call__(self, who: Account, store_time: float, unsettled: Callable[[], Collection[str]]) -> Seed:
        left_out = set(unsettled())
        ahead = store_time - self._ours.now
        past = tuple(Past("key", "k", at + ahead, tokens) for lease, tokens, at in self._ended if lease not in left_out)
        return Seed(who.scopes, past)

    async def end(self, store: QuotaStore, lease: str, tokens: int) -> None:
        self._ended.append((lease, tokens, self._ours.now))
        await store.settle(WHO, lease, tokens)


@pytest.fixture
def ours() -> Clock:
    return Clock(5_000.0)


@pytest.fixture
def shelf(ours: Clock) -> Shelf:
    return Shelf(ours)


@pytest.fixture
def told() -> list[bool]:
    return []


@pytest.fixture
async def store(broken_server: RedisServer, clock: Clock, ours: Clock, shelf: Shelf, told: list[bool]) -> GuardedStore:
    inner = RedisStore(broken_server.url, timeout=5, clock=clock)
    guard = GuardedStore(inner, on_down="deny", clock=ours, refill=shelf, on_change=told.append)
    await eventually(lambda: answers(guard.ping()))
    return guard


async def spend(store: GuardedStore, shelf: Shelf, lease: str, tokens: int) -> bool:
    if admitted := (await store.admit(WHO, ask(lease, tokens))).admitted:
        await shelf.end(store, lease, tokens)
    return admitted


def passes(seconds: float, *clocks: Clock) -> None:
    for each in clocks:
        each.now += seconds


@pytest.mark.parametrize("step", [3_700.0, 90.0, -90.0, -3_700.0])
async def test_a_step_empties_no_window_and_freezes_none(
    step: float, store: GuardedStore, shelf: Shelf, clock: Clock, ours: Clock, told: list[bool]
) -> None:
    assert await spend(store, shelf, "before", 700)
    assert (await store.admit(WHO, ask("runs", 100))).admitted
    clock.now += step
    passes(6, clock, ours)  # a step back shows when the store's time stands still
    with pytest.raises(StoreUnavailable, match="clock was set by"):
        await store.admit(WHO, ask("after", 400))
    assert (store.up, told) == (False, [False])

    async def is_told() -> bool:
        return f"clock was set by {step:+.0f} s" in str(store.trouble)

    await eventually(is_told)
    passes(30, clock, ours)
    with pytest.raises(StoreUnavailable):
        await store.admit(WHO, ask("still", 100))
    passes(31, clock, ours)
    await eventually(lambda: answers(store.admit(WHO, ask("accepted", 1))))
    assert (store.up, told, store.trouble) == (True, [False, True], None)
    await shelf.end(store, "accepted", 1)
    assert (await used(store, WHO), await held(store, WHO)) == (701, 100)
    assert not await spend(store, shelf, "too much", 300)
    await shelf.end(store, "runs", 60)
    assert await used(store, WHO) == 761
    passes(3_600 - 67 + 11, clock, ours)
    assert await used(store, WHO) == 61
    await store.close()


async def test_a_small_step_is_borne(store: GuardedStore, shelf: Shelf, clock: Clock, ours: Clock) -> None:
    for step in (0, -4.9, 4.9, 4.9):
        clock.now += step
        passes(1, clock, ours)
        assert await spend(store, shelf, f"step {step} {clock.now}", 100)
    assert await used(store, WHO) == 400
    await store.close()


async def test_a_step_that_is_undone_leaves_nothing_behind(
    store: GuardedStore, shelf: Shelf, clock: Clock, ours: Clock
) -> None:
    assert await spend(store, shelf, "before", 700)
    clock.now += 7_200
    with pytest.raises(StoreUnavailable):
        await store.admit(WHO, ask("meanwhile", 400))
    clock.now -= 7_200
    passes(10, clock, ours)
    await eventually(lambda: answers(store.admit(WHO, ask("after", 1))))
    await shelf.end(store, "after", 1)
    assert await used(store, WHO) == 701
    assert not await spend(store, shelf, "too much", 300)
    await store.close()


async def test_another_sidecar_starts_a_slot_anew_only_once(
    store: GuardedStore, shelf: Shelf, broken_server: RedisServer, clock: Clock, ours: Clock
) -> None:
    other = GuardedStore(
        RedisStore(broken_server.url, timeout=5, clock=clock), on_down="deny", clock=ours, refill=shelf
    )
    for guard in (store, other):
        assert await spend(guard, shelf, f"before {id(guard)}", 100)
    clock.now += 3_700
    for guard in (store, other):
        with pytest.raises(StoreUnavailable):
            await guard.admit(WHO, ask("after", 1))
    passes(61, clock, ours)
    await eventually(lambda: answers(store.admit(WHO, ask("runs here", 50))))
    await eventually(lambda: answers(other.admit(WHO, ask("runs there", 60))))
    assert (await used(store, WHO), await held(other, WHO)) == (200, 110)
    for guard in (store, other):
        await guard.close()


async def test_a_sidecar_with_nothing_to_do_notices_too(
    store: GuardedStore, clock: Clock, ours: Clock, told: list[bool]
) -> None:
    await store.watch()
    clock.now -= 3_700
    await store.watch()
    assert (store.up, told) == (False, [False])
    assert "clock was set by -3700 s" in str(store.trouble)
    await store.close()
