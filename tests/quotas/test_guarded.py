"""What happens while a real Redis is away, and what it is told when it is back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from quotas.guarded import GuardedStore
from quotas.policy import Limit, Policy
from quotas.redis import RedisStore
from quotas.store import Account, Ask, Scope, StoreUnavailable
from tests.quotas.histories import Clock
from tests.quotas.patience import answers, eventually
from tests.services.redis import RedisServer

CAPPED = Policy(None, None, Limit(1_000, 3_600), None)
RATED = Policy(Limit(1_000, 60), None, Limit(10_000, 3_600), None)


def account(policy: Policy = CAPPED, name: str = "k") -> Account:
    return Account(f"key:{name}", (Scope("key", name, policy),))


def ask(lease: str, tokens: int, **more: Any) -> Ask:
    return Ask(lease, tokens, tokens, tokens, tokens, **more)


Told = list[bool]


@pytest.fixture
def told() -> Told:
    return []


@pytest.fixture
def guard(broken_server: RedisServer, clock: Clock, told: Told) -> Callable[..., Any]:
    @asynccontextmanager
    async def open_guard(on_down: str, **more: Any) -> AsyncIterator[GuardedStore]:
        inner = RedisStore(broken_server.url, timeout=0.5, clock=clock)
        store = GuardedStore(inner, on_down=on_down, clock=clock, on_change=told.append, **more)  # type: ignore[arg-type]
        await eventually(lambda: answers(store.ping()))
        yield store
        await store.close()

    return open_guard


async def shows(store: GuardedStore, who: Account, name: str, used: int, held: int) -> bool:
    try:
        windows = (await store.peek(who)).windows
    except StoreUnavailable:
        return False
    return [(window.used, window.held) for window in windows if window.name == name] == [(used, held)]


async def is_told(store: GuardedStore, server: RedisServer, clock: Clock, who: Account, used: int) -> bool:
    """The outage is over and told, seen without asking the guard about the key."""
    other = RedisStore(server.url, timeout=5, clock=clock)
    try:
        told = any(window.name == "hour" and window.used == used for window in (await other.peek(who)).windows)
    finally:
        await other.close()
    return told and store.up


async def lose(store: GuardedStore) -> None:
    """Calls that fail, until the store counts as away."""

    async def away() -> bool:
        await store.renew([(account(), "nobody")])
        return not store.up

    await eventually(away)


async def test_deny_admits_nothing_ends_streams_at_their_hold_and_settles_later(
    guard: Callable[..., Any], broken_server: RedisServer, told: Told
) -> None:
    async with guard("deny") as store:
        who = account()
        assert (await store.admit(who, ask("running", 300))).admitted
        broken_server.pause()
        await lose(store)
        assert "away" in repr(store)
        with pytest.raises(StoreUnavailable, match="on_down is deny"):
            await store.admit(who, ask("new", 10))
        progress = await store.progress(who, "running", 200, 500)
        assert (progress.expired, progress.extended, progress.covered) == (False, False, 300)
        await store.settle(who, "running", 250)
        with pytest.raises(StoreUnavailable):
            await store.peek(who)
        broken_server.resume()
        await eventually(lambda: shows(store, who, "hour", 250, 0))
        assert store.up
        assert told == [False, True]
        assert (await store.admit(who, ask("after", 10))).admitted


async def test_a_store_killed_and_started_again_is_used_without_a_restart(
    guard: Callable[..., Any], broken_server: RedisServer
) -> None:
    """T053"""
    async with guard("deny") as store:
        broken_server.kill()
        for n in range(10):
            with pytest.raises(StoreUnavailable):
                await store.admit(account(), ask(f"x{n}", 1))
        assert not store.up
        broken_server.start()
        await eventually(lambda: answers(store.admit(account(), ask("after", 1))))


async def test_an_admission_whose_answer_never_came_is_settled_with_nothing(
    guard: Callable[..., Any], broken_server: RedisServer
) -> None:
    async with guard("deny") as store:
        broken_server.pause()
        with pytest.raises(StoreUnavailable):
            await store.admit(account(), ask("unclear", 400))
        broken_server.resume()
        await eventually(lambda: shows(store, account(), "hour", 0, 0))
        assert (await store.admit(account(), ask("all of it", 1_000))).admitted


async def test_allow_admits_all_counts_it_and_books_it_afterwards(
    guard: Callable[..., Any], broken_server: RedisServer
) -> None:
    async with guard("allow") as store:
        who = account(RATED)
        broken_server.pause()
        await lose(store)
        for n in range(5):
            assert (await store.admit(who, ask(f"a{n}", 2_000))).kind == "base"
        assert store.unguarded == 5
        for n in range(4):
            await store.settle(who, f"a{n}", 700)
        told = await store.progress(who, "a4", 100, 5_000)
        assert (told.extended, told.covered) == (True, 5_000)
        broken_server.resume()
        await eventually(lambda: shows(store, who, "hour", 2_900, 4_900))
        assert await shows(store, who, "minute", 2_900, 4_900)
        await store.settle(who, "a4", 300)
        assert await shows(store, who, "minute", 3_100, 0)


async def test_local_spends_its_share_of_what_was_left_and_books_it_afterwards(
    guard: Callable[..., Any], broken_server: RedisServer
) -> None:
    async with guard("local", local_share=0.5) as store:
        who = account()
        assert (await store.admit(who, ask("before", 400))).admitted
        await store.settle(who, "before", 400)
        assert await shows(store, who, "hour", 400, 0)
        broken_server.pause()
        await lose(store)
        kinds = [(await store.admit(who, ask(f"l{n}", 100))).kind for n in range(4)]
        assert kinds == ["base", "base", "base", "cap"]
        assert store.unguarded == 0
        for n in range(3):
            await store.settle(who, f"l{n}", 90)
        broken_server.resume()
        await eventually(lambda: shows(store, who, "hour", 670, 0))


async def test_outage_after_outage_the_share_is_of_what_the_last_one_left(
    guard: Callable[..., Any], broken_server: RedisServer, clock: Clock
) -> None:
    async with guard("local", local_share=0.5) as store:
        who, used = account(), 0
        assert (await store.admit(who, ask("before", 100))).admitted
        await store.settle(who, "before", 0)
        assert await shows(store, who, "hour", 0, 0)
        for outage, share in enumerate((500, 250, 125)):
            broken_server.pause()
            await lose(store)
            assert (await store.admit(who, ask(f"share{outage}", share))).admitted
            assert (await store.admit(who, ask(f"more{outage}", 1))).kind == "cap"
            await store.settle(who, f"share{outage}", share)
            broken_server.resume()
            used += share
            await eventually(lambda used=used: is_told(store, broken_server, clock, who, used))  # type: ignore[misc]


async def test_a_team_s_share_is_of_what_any_of_its_keys_saw_last(
    guard: Callable[..., Any], broken_server: RedisServer
) -> None:
    team = Scope("team", "search", CAPPED)
    first, second = (Account("team:search", (Scope("key", name, Policy()), team)) for name in ("a", "b"))
    async with guard("local", local_share=0.5) as store:
        for who, tokens in ((first, 10), (second, 790)):
            assert (await store.admit(who, ask(f"by {who.scopes[0].name}", tokens))).admitted
            await store.settle(who, f"by {who.scopes[0].name}", tokens)
        broken_server.pause()
        await lose(store)
        assert (await store.admit(first, ask("its share", 100))).admitted
        assert (await store.admit(first, ask("more", 1))).kind == "cap"
        broken_server.resume()


async def test_local_share_auto_is_one_of_the_sidecars_last_seen(broken_server: RedisServer, clock: Clock) -> None:
    stores = [RedisStore(broken_server.url, timeout=0.5) for _ in range(4)]
    guards = [GuardedStore(s, on_down="local", clock=clock, sidecars=lambda s=s: s.sidecars) for s in stores]  # type: ignore[misc]

    async def all_seen() -> bool:
        for each in guards:
            await each.watch()
        return [each.sidecars for each in stores] == [4] * 4

    await eventually(all_seen)
    broken_server.kill()
    for each in guards:
        await lose(each)
        kinds = [(await each.admit(account(), ask(f"l{n}", 125))).kind for n in range(3)]
        assert kinds == ["base", "base", "cap"]
        await each.close()


async def test_a_stream_extends_from_the_share_and_goes_on_when_the_store_is_back(
    guard: Callable[..., Any], broken_server: RedisServer, clock: Clock
) -> None:
    async with guard("local") as store:
        who = account()
        assert (await store.admit(who, ask("stream", 300))).admitted
        broken_server.pause()
        await lose(store)
        told = await store.progress(who, "stream", 250, 500)
        assert (told.extended, told.covered) == (True, 500)
        assert not (await store.progress(who, "stream", 450, 1_200)).extended
        clock.now += 40  # meanwhile the store lets the lease expire
        broken_server.resume()
        await eventually(lambda: shows(store, who, "hour", 450, 50))
        told = await store.progress(who, "stream", 500, 600)
        assert (told.expired, told.extended, told.covered) == (False, True, 600)
        await store.settle(who, "stream", 580)
        assert await shows(store, who, "hour", 580, 0)


async def test_one_lost_call_is_no_outage(guard: Callable[..., Any], broken_server: RedisServer, told: Told) -> None:
    async with guard("local") as store:
        broken_server.pause()
        verdict = await store.admit(account(), ask("lost", 100))
        broken_server.resume()
        assert verdict.admitted
        await eventually(lambda: shows(store, account(), "hour", 0, 100))
        assert told == []
        await store.settle(account(), "lost", 60)
        await eventually(lambda: shows(store, account(), "hour", 60, 0))


async def test_a_sidecar_with_nothing_to_do_notices_that_the_store_is_lost(
    guard: Callable[..., Any], broken_server: RedisServer, told: Told
) -> None:
    async with guard("deny") as store:
        await store.watch()
        assert store.up
        broken_server.kill()
        for _ in range(3):
            await store.watch()
        assert (store.up, told) == (False, [False])
        broken_server.start()

        async def back() -> bool:
            return store.up

        await eventually(back)
