"""What only the shared store has: scripts, keys, connections, and a server that comes and goes."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import AsyncIterator, Callable
from urllib.parse import quote

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from quotas.policy import Limit, Policy
from quotas.redis import RedisStore
from quotas.store import Account, Ask, Scope, StoreUnavailable, Target
from tests.quotas.histories import Clock
from tests.quotas.stores import EmptyRedis
from tests.services.redis import RedisServer

CAPPED = Policy(None, None, Limit(1_000, 3_600), None)
serial = itertools.count()


def account(name: str, policy: Policy = CAPPED, *, slot: str | None = None, team: Policy | None = None) -> Account:
    scopes = [Scope("key", name, policy)] + ([Scope("team", "t", team)] if team else [])
    return Account(slot or f"key:{name}", tuple(scopes))


def ask(lease: str, tokens: int, targets: tuple[Target, ...] = ()) -> Ask:
    return Ask(lease, tokens, tokens, tokens, tokens, targets=targets)


async def used(store: RedisStore, who: Account) -> tuple[int, int]:
    window = (await store.peek(who)).windows[-1]
    return window.used, window.held


async def until(happens: Callable[[], object], seconds: float = 20) -> None:
    """Waits for a call to succeed, at most so long."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return await happens()  # type: ignore[misc]
        except StoreUnavailable:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    opened = EmptyRedis(redis_server.url, timeout=10)
    yield opened
    await opened.close()


@pytest.fixture
async def fragile(broken_server: RedisServer) -> AsyncIterator[RedisStore]:
    opened = EmptyRedis(broken_server.url, timeout=0.5)
    yield opened
    await opened.close()


@pytest.fixture
async def plain(redis_server: RedisServer) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis_server.url)
    yield client
    await client.aclose()


async def test_time_is_the_servers(store: RedisStore, plain: Redis) -> None:
    seconds, microseconds = await plain.time()
    verdict = await store.admit(account(f"timed {next(serial)}"), ask("x", 1))
    assert seconds + microseconds / 1e6 <= verdict.now <= await store.ping()


async def test_forgotten_scripts_are_loaded_again_in_the_middle_of_a_pipeline(store: RedisStore, plain: Redis) -> None:
    """T052"""
    who = account(f"flushed {next(serial)}")
    for round_ in range(3):
        await plain.script_flush()
        verdicts = await asyncio.gather(*(store.admit(who, ask(f"{round_} {n}", 5)) for n in range(20)))
        assert all(verdict.kind == "base" for verdict in verdicts)
        await plain.script_flush()
        await asyncio.gather(*(store.settle(who, f"{round_} {n}", 5) for n in range(20)))
    assert await used(store, who) == (300, 0)


async def test_every_key_has_an_expiry_and_all_of_an_account_share_a_slot(store: RedisStore, plain: Redis) -> None:
    """T054, T055"""
    slot = f"team:expiring {next(serial)}"
    policy = Policy(Limit(100, 60), Limit(200, 5), Limit(1_000, 3_600), 100)
    who = account("k", policy, slot=slot, team=CAPPED)
    for n in range(6):
        verdict = await store.admit(who, ask(f"l{n}", 60, (Target("cheap", Limit(120, 60)),)))
        if verdict.admitted and n % 2:
            await store.progress(who, f"l{n}", 30, 100)
            await store.settle(who, f"l{n}", 70)
    keys = [key async for key in plain.scan_iter("weir:{team%3Aexpiring*")]
    assert len(keys) == 4
    assert len({key_slot(key) for key in keys}) == 1
    for key in keys:
        longest = 3_600 + (3_600 if key.endswith(b":mark") else 30 + 660)
        assert 3_600 < await plain.ttl(key) <= longest


async def test_no_key_of_any_test_is_without_expiry(store: RedisStore, plain: Redis) -> None:
    """T054, of all that lies there by now."""
    await store.ping()
    assert [key async for key in plain.scan_iter("weir:*") if await plain.ttl(key) == -1] == []


async def test_what_idles_in_a_busy_team_is_forgotten(redis_server: RedisServer, plain: Redis) -> None:
    """A key, its overflow's own rate, an expired lease; of what is used, all that can still matter stays."""
    clock, slot = Clock(), f"team:busy {next(serial)}"
    rated = Policy(Limit(100, 60), None, Limit(1_000, 600), None)
    idle, busy = account("idle", rated, slot=slot, team=CAPPED), account("busy", rated, slot=slot, team=CAPPED)
    store = EmptyRedis(redis_server.url, timeout=10, clock=clock)
    cheap = (Target("cheap", Limit(50, 60)),)
    for lease, who, tokens in (("first", idle, 100), ("over", idle, 20), ("silent", idle, 20), ("running", busy, 100)):
        assert (await store.admit(who, ask(lease, tokens, cheap))).admitted
    for lease in ("first", "over"):
        await store.settle(idle, lease, 20)
    mine = []
    for _ in range(40):
        clock.now += 29
        await store.renew([(busy, "running")])
        fields = await plain.hkeys(f"weir:{{{quote(slot)}}}:w")
        mine.append(
            {field.rpartition(b":")[0] or field for field in fields if b"idle" in field or field == b"l:silent"}
        )
    kinds = (b"k", b"l", b"o:6:k", b"hk:idle", b"mk:idle", b"mo:6:k:idlecheap")
    assert set(kinds) <= mine[0]
    assert [b"l" in each for each in mine].index(False) * 29 == pytest.approx(630, abs=60)
    assert mine[-1] == set()
    assert (await store.peek(busy)).leases[0].lease == "running"
    assert (await store.admit(idle, ask("again", 100))).kind == "base"
    await store.close()


async def test_accounts_spread_over_slots(store: RedisStore, plain: Redis) -> None:
    for n in range(100):
        await store.admit(account(f"spread {n} {next(serial)}"), ask("x", 1))
    assert len({key_slot(key) async for key in plain.scan_iter("weir:{key%3Aspread*")}) > 50


ODD = ["a}b{c", "a:b", "a", "b", "a b\n", "ключ", "*", "x" * 300, "a%3Ab", "{}", "", "a\0b", "?", "[a]"]


async def test_odd_names_never_share_a_key(store: RedisStore) -> None:
    """T056"""
    mark = next(serial)
    for as_slot in (True, False):
        accounts = [
            Account(f"{mark}{name}" if as_slot else f"same {mark}", (Scope("key", name, CAPPED),)) for name in ODD
        ]
        for spent, who in enumerate(accounts):
            assert (await store.admit(who, ask("l", 10 + spent))).admitted
            await store.settle(who, "l", 10 + spent)
        assert [await used(store, who) for who in accounts] == [(10 + spent, 0) for spent in range(len(ODD))]


async def test_key_and_team_of_one_name_are_two_scopes(store: RedisStore) -> None:
    who = Account(f"team:same {next(serial)}", (Scope("key", "same", CAPPED), Scope("team", "same", CAPPED)))
    assert (await store.admit(who, ask("l", 10))).admitted
    await store.settle(who, "l", 10)
    assert [window.used for window in (await store.peek(who)).windows] == [10, 10]


async def test_replies_of_cancelled_calls_never_reach_another(store: RedisStore) -> None:
    accounts = [account(f"cancelled {n} {next(serial)}") for n in range(30)]
    for n, who in enumerate(accounts):
        await store.admit(who, ask("l", n + 1))
    for round_ in range(20):
        tasks = [asyncio.create_task(store.peek(who)) for who in accounts]
        for _ in range(round_ % 5):
            await asyncio.sleep(0)
        for task in tasks[round_ % 3 :: 3]:
            task.cancel()
        views = await asyncio.gather(*tasks, return_exceptions=True)
        held = [None if isinstance(view, BaseException) else view.windows[0].held for view in views]
        assert all(tokens in (None, n + 1) for n, tokens in enumerate(held))
        assert any(tokens is not None for tokens in held)


async def test_a_paused_server_costs_the_deadline_and_its_late_replies_are_lost(
    fragile: RedisStore, broken_server: RedisServer
) -> None:
    accounts = [account(f"paused {n}") for n in range(20)]
    for n, who in enumerate(accounts):
        await until(lambda who=who, n=n: fragile.admit(who, ask("l", n + 1)))
    broken_server.pause()
    answers = await asyncio.gather(*(fragile.peek(who) for who in accounts), return_exceptions=True)
    assert all(isinstance(answer, StoreUnavailable) for answer in answers)
    assert "did not answer within 0.5 s" in str(answers[0])
    broken_server.resume()
    await until(fragile.ping)
    for n, who in enumerate(accounts):
        await until(lambda who=who: fragile.peek(who))
        assert await used(fragile, who) == (0, n + 1)


async def test_a_server_killed_and_started_again_is_used_again(fragile: RedisStore, broken_server: RedisServer) -> None:
    who = account("restarted")
    await until(lambda: fragile.admit(who, ask("before", 10)))
    broken_server.kill()
    for _ in range(5):
        with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1"):
            await fragile.admit(who, ask("meanwhile", 10))
    broken_server.start()
    await until(lambda: fragile.admit(who, ask("after", 20)))
    assert await used(fragile, who) == (0, 20)


async def test_a_node_that_takes_no_writes_counts_as_unavailable(
    fragile: RedisStore, broken_server: RedisServer
) -> None:
    """T057"""
    who = account("read-only")
    await until(lambda: fragile.admit(who, ask("before", 10)))
    async with Redis.from_url(broken_server.url) as admin:
        await admin.replicaof(
            "127.0.0.1", str(broken_server.port)
        )  # a replica of itself: never in step, takes no writes
        for call in (fragile.admit(who, ask("x", 1)), fragile.settle(who, "before", 5), fragile.ping()):
            with pytest.raises(StoreUnavailable):
                await call
        await admin.replicaof("NO", "ONE")
    await until(lambda: fragile.settle(who, "before", 5))
    assert await used(fragile, who) == (5, 0)


async def test_an_unreachable_address_is_a_plain_sentence_without_the_password() -> None:
    store = EmptyRedis("redis://:secret@127.0.0.1:1/0", timeout=5)
    with pytest.raises(StoreUnavailable) as trouble:
        await store.ping()
    assert re.match(r"the quota store at 127\.0\.0\.1:1 cannot be reached", str(trouble.value))
    assert "secret" not in str(trouble.value) + repr(store)
    await store.close()


async def test_closing_ends_calls_under_way(broken_server: RedisServer) -> None:
    store = EmptyRedis(broken_server.url, timeout=60)
    await store.ping()
    broken_server.pause()
    call = asyncio.create_task(store.peek(account("closed")))
    await asyncio.sleep(0)
    await store.close()
    with pytest.raises(StoreUnavailable):
        await call
