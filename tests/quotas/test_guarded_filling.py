"""A store that came back empty: filled from what is on record, and no token is lost or counted twice.

The record here is a list that all sidecars share, as the ledger is: what ended stands in it before it is settled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import uuid4

import pytest

from quotas.guarded import GuardedStore
from quotas.memory import MemoryStore
from quotas.policy import Limit, Policy
from quotas.redis import RedisStore
from quotas.store import Account, Ask, Past, QuotaStore, Scope, Seed, StoreUnavailable, View
from tests.quotas.histories import Clock
from tests.quotas.patience import answers, eventually
from tests.services.redis import RedisServer

CAPPED = Policy(None, None, Limit(100_000, 3_600), None)
TEAM = Scope("team", "search", Policy(None, None, Limit(400_000, 3_600), None))


def account(name: str = "k") -> Account:
    return Account(f"key:{name}", (Scope("key", name, CAPPED),))


def member(name: str) -> Account:
    return Account("team:search", (Scope("key", name, CAPPED), TEAM))


def ask(lease: str, tokens: int, **more: Any) -> Ask:
    return Ask(lease, tokens, tokens, tokens, tokens, **more)


class Ended(NamedTuple):
    lease: str
    account: Account
    tokens: int
    at: float


@dataclass
class Record:
    """What ended, as a ledger has it. `moved`: slots whose keys belong to another one now."""

    ended: list[Ended] = field(default_factory=list)
    moved: dict[str, str] = field(default_factory=dict)
    away: bool = False
    asked: int = 0
    slow: float = 0.0

    async def __call__(self, who: Account, store_time: float, unsettled: Callable[[], Collection[str]]) -> Seed:
        self.asked += 1
        await asyncio.sleep(self.slow)
        if self.away:
            raise StoreUnavailable("the ledger is away")
        left_out = set(unsettled())
        mine = [each for each in self.ended if self._slot(each) == who.slot and each.lease not in left_out]
        scopes = {(s.kind, s.name): s for each in mine for s in each.account.scopes}
        scopes |= {(s.kind, s.name): s for s in who.scopes}
        past = [Past(s.kind, s.name, each.at, each.tokens) for each in mine for s in each.account.scopes]
        return Seed(tuple(scopes.values()), tuple(sorted(past, key=lambda each: each.at)))

    def _slot(self, ended: Ended) -> str:
        return self.moved.get(ended.account.slot, ended.account.slot)

    def add(self, lease: str, who: Account, tokens: int, ago: float = 0.0) -> None:
        self.ended.append(Ended(lease, who, tokens, time.time() - ago))

    def truth(self, slot: str) -> int:
        return sum(each.tokens for each in self.ended if each.account.slot == slot)

    def key_truth(self, name: str) -> int:
        return sum(each.tokens for each in self.ended if each.account.scopes[0].name == name)

    async def end(self, store: GuardedStore, who: Account, lease: str, tokens: int) -> None:
        """As the gateway ends an exchange: on record first, then settled."""
        self.add(lease, who, tokens)
        await store.settle(who, lease, tokens)


@pytest.fixture
def record() -> Record:
    return Record()


Open = Callable[..., Any]


@pytest.fixture
def sidecar(broken_server: RedisServer, record: Record) -> Open:
    """Opens a guard over the server, as one of several sidecars would."""

    @asynccontextmanager
    async def open_guard(on_down: str = "local", **more: Any) -> AsyncIterator[GuardedStore]:
        inner = RedisStore(broken_server.url, timeout=0.5)
        store = GuardedStore(inner, on_down=on_down, clock=time.time, timer=time.monotonic, refill=record, **more)  # type: ignore[arg-type]
        await eventually(lambda: answers(store.ping()))
        yield store
        await store.close()

    return open_guard


async def view(store: QuotaStore, who: Account) -> View:
    found: View | None = None

    async def seen() -> bool:
        nonlocal found
        try:
            found = await store.peek(who)
        except StoreUnavailable:
            return False
        return True

    await eventually(seen)
    assert found is not None
    return found


async def used(store: QuotaStore, who: Account, scope: str = "key") -> int:
    return next(window.used for window in (await view(store, who)).windows if window.scope == scope)


async def held(store: QuotaStore, who: Account) -> int:
    return next(window.held for window in (await view(store, who)).windows if window.scope == "key")


async def comes_to(store: QuotaStore, who: Account, tokens: int) -> None:
    async def there() -> bool:
        return (await used(store, who), await held(store, who)) == (tokens, 0)

    await eventually(there)


async def spend(store: GuardedStore, record: Record, who: Account, tokens: int) -> bool:
    lease = str(uuid4())
    if admitted := (await store.admit(who, ask(lease, tokens))).admitted:
        await record.end(store, who, lease, tokens)
    return admitted


async def restart(server: RedisServer, pause: float) -> None:
    """Killed, away for a while, and back without anything, while the sidecars go on."""
    await asyncio.to_thread(server.kill)
    await asyncio.sleep(pause)
    await asyncio.to_thread(server.start)


# ---- a Redis that was lost --------------------------------------------------------------------------------------------


async def test_the_hour_is_not_reset(sidecar: Open, record: Record, broken_server: RedisServer) -> None:
    async with sidecar() as store:
        for n in range(5):
            assert await spend(store, record, account(), 100 + n)
        broken_server.kill()
        broken_server.start()
        assert await used(store, account()) == 510
        assert await spend(store, record, account(), 1)
        assert await used(store, account()) == 511


async def test_it_is_not_reset_under_use_either_and_no_token_counts_twice(
    sidecar: Open, record: Record, broken_server: RedisServer
) -> None:
    whose = [account("a"), account("b"), member("c"), member("d")]
    async with sidecar() as store:
        stop = asyncio.Event()

        async def customer(who: Account) -> None:
            while not stop.is_set():
                lease = str(uuid4())
                if (await store.admit(who, ask(lease, 7))).admitted:
                    await store.progress(who, lease, 3, 7)
                    await asyncio.sleep(0.01)
                    await record.end(store, who, lease, 6)

        customers = [asyncio.create_task(customer(who)) for who in whose for _ in range(4)]
        for pause in (0.0, 0.1, 0.7):
            await asyncio.sleep(0.2)
            await restart(broken_server, pause)
        await asyncio.sleep(0.2)
        stop.set()
        await asyncio.gather(*customers)
        for who in whose[:2]:
            await comes_to(store, who, record.truth(who.slot))

        async def team_agrees() -> bool:
            return await used(store, whose[2], "team") == record.truth("team:search")

        await eventually(team_agrees)


async def test_two_sidecars_that_race_count_everything_once(
    sidecar: Open, record: Record, broken_server: RedisServer
) -> None:
    async with sidecar() as one, sidecar() as other:
        for store in (one, other):
            for _ in range(5):
                assert await spend(store, record, account(), 100)
        broken_server.kill()
        broken_server.start()
        record.asked = 0
        await asyncio.gather(*(store.peek(account()) for store in (one, other) for _ in range(20)))
        assert record.asked <= 2  # each sidecar once at a time, however many ask
        assert await used(one, account()) == await used(other, account()) == 1_000


async def test_sidecars_under_use_never_count_less_than_was_used(
    sidecar: Open, record: Record, broken_server: RedisServer
) -> None:
    async with sidecar() as one, sidecar() as other:
        stop, ended = asyncio.Event(), list[tuple[float, int]]()

        async def customer(store: GuardedStore) -> None:
            while not stop.is_set():
                lease = str(uuid4())
                if (await store.admit(account(), ask(lease, 7))).admitted:
                    await asyncio.sleep(0.01)
                    await record.end(store, account(), lease, 6)
                    ended.append((time.monotonic(), 6))

        customers = [asyncio.create_task(customer(store)) for store in (one, other) for _ in range(4)]
        await asyncio.sleep(0.3)
        lost = time.monotonic()
        await restart(broken_server, 0.2)
        await asyncio.sleep(0.5)
        stop.set()
        await asyncio.gather(*customers)
        truth = record.truth("key:k")

        async def told() -> bool:
            return not one.debts() and not other.debts() and await held(one, account()) == 0

        await eventually(told)
        around = sum(tokens for at, tokens in ended if at > lost - 1.5)
        assert truth <= await used(one, account()) <= truth + around


async def test_running_leases_are_carried_over(sidecar: Open, record: Record, broken_server: RedisServer) -> None:
    async with sidecar() as store:
        who = account()
        for lease in ("stream", "plain"):
            assert (await store.admit(who, ask(lease, 500))).admitted
        assert (await store.progress(who, "stream", 200)).covered == 500
        broken_server.kill()
        broken_server.start()
        assert (await used(store, who), await held(store, who)) == (200, 800)
        assert (await store.progress(who, "stream", 300, 900)).covered == 900
        await record.end(store, who, "stream", 800)
        await record.end(store, who, "plain", 100)
        await comes_to(store, who, 900)


async def test_a_sidecar_whose_slot_was_filled_by_another_loses_no_lease(
    sidecar: Open, record: Record, broken_server: RedisServer
) -> None:
    """No call of its own failed: it learns of it when the store does not know its lease."""
    async with sidecar() as one, sidecar() as other:
        who = account()
        for lease in ("stream", "plain"):
            assert (await other.admit(who, ask(lease, 500))).admitted
        broken_server.kill()
        broken_server.start()
        assert await spend(one, record, who, 50)
        told = await other.progress(who, "stream", 300, 900)
        assert (told.expired, told.covered) == (False, 900)
        await record.end(other, who, "plain", 400)
        await record.end(other, who, "stream", 700)
        await comes_to(one, who, 50 + 400 + 700)


async def test_a_plain_answer_that_ends_first_is_charged_too(
    sidecar: Open, record: Record, broken_server: RedisServer
) -> None:
    async with sidecar() as one, sidecar() as other:
        who = account()
        assert (await other.admit(who, ask("plain", 500))).admitted
        broken_server.kill()
        broken_server.start()
        assert await spend(one, record, who, 50)
        await record.end(other, who, "plain", 400)
        await comes_to(one, who, 450)


# ---- and the ledger is away too ---------------------------------------------------------------------------------------


async def lose_both(record: Record, server: RedisServer) -> None:
    record.away = True
    server.kill()
    server.start()


async def test_deny_refuses_that_slot_alone(sidecar: Open, record: Record, broken_server: RedisServer) -> None:
    async with sidecar("deny") as store:
        assert await spend(store, record, account(), 100)
        await lose_both(record, broken_server)
        with pytest.raises(StoreUnavailable, match="on_down is deny"):
            await spend(store, record, account(), 100)
        assert store.up
        assert "the ledger cannot say it" in str(store.trouble)
        record.away = False
        assert await spend(store, record, account("other"), 100)
        await eventually(lambda: answers(spend(store, record, account(), 100)))
        assert await used(store, account()) == 200
        assert store.trouble is None


async def test_local_spends_its_share_and_is_counted_once_afterwards(
    sidecar: Open, record: Record, broken_server: RedisServer
) -> None:
    async with sidecar("local", local_share=0.5) as store:
        who = account()
        assert await spend(store, record, who, 40_000)
        assert (await store.admit(who, ask("runs", 10_000))).admitted
        assert await used(store, who) == 40_000
        await lose_both(record, broken_server)
        assert [await spend(store, record, who, 10_000) for _ in range(4)] == [True, True, False, False]
        told = await store.progress(who, "runs", 4_000, 10_000)
        assert (told.expired, told.covered) == (False, 10_000)
        record.away = False

        async def whole() -> bool:
            return (await used(store, who), await held(store, who)) == (64_000, 6_000)

        await eventually(whole)
        await record.end(store, who, "runs", 9_000)
        await comes_to(store, who, record.truth(who.slot))


async def test_allow_admits_and_counts_it(sidecar: Open, record: Record, broken_server: RedisServer) -> None:
    async with sidecar("allow") as store:
        await lose_both(record, broken_server)
        assert [await spend(store, record, account(), 90_000) for _ in range(3)] == [True, True, True]
        assert store.unguarded == 3
        record.away = False
        await comes_to(store, account(), 270_000)


async def test_a_ledger_that_takes_its_time_holds_nobody_up_for_long(
    sidecar: Open, record: Record, broken_server: RedisServer
) -> None:
    async with sidecar("local") as store:
        record.slow = 60
        slow = asyncio.create_task(spend(store, record, account(), 100))
        record.slow = 0
        await asyncio.sleep(0)
        assert await spend(store, record, account("other"), 100)
        assert await slow
        assert record.asked >= 2


# ---- a store of one process --------------------------------------------------------------------------------------------


async def test_memory_starts_from_the_record(record: Record, clock: Clock) -> None:
    clock.now = time.time()
    record.add("before", account(), 300)
    store = GuardedStore(MemoryStore(clock), on_down="deny", clock=clock, refill=record)
    assert await used(store, account()) == 300
    assert (await store.admit(account(), ask("new", 99_700))).admitted
    assert not (await store.admit(account(), ask("too much", 1))).admitted
    await store.close()


async def test_a_slot_that_was_idle_for_long_is_looked_up_again(record: Record, clock: Clock) -> None:
    """Its mark is gone by then: an hour after its longest window."""
    store = GuardedStore(MemoryStore(clock), on_down="deny", clock=clock, refill=record)
    assert await spend(store, record, account(), 100)
    clock.now += 3_600 + 3_000
    assert await spend(store, record, account(), 100)
    assert record.asked == 1
    clock.now += 3_600 + 3_600 + 1_000
    record.ended.clear()
    assert await spend(store, record, account(), 100)
    assert (record.asked, await used(store, account())) == (2, 100)
    await store.close()
