"""What every quota store promises: the rule, watched by the monitor, whatever the history; and the same answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings

from quotas.policy import MAX_SECONDS, Limit, Policy
from quotas.store import Account, Ask, QuotaStore, Scope, Target
from tests.quotas.conftest import ServerOf
from tests.quotas.histories import Clock, History, Play, asks, histories
from tests.quotas.stores import EmptyMemory, EmptyRedis
from tests.services.redis import binaries

serial = itertools.count()


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def shared_clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def stores(runner: asyncio.Runner, shared_clock: Clock, server_of: ServerOf) -> Iterator[list[QuotaStore]]:
    """In memory, and on every kind of server that is here."""
    servers = [server_of(binary) for binary in binaries()]
    stores: list[QuotaStore] = [EmptyMemory(shared_clock)]
    stores += [EmptyRedis(server.url, timeout=5, clock=shared_clock) for server in servers]
    yield stores
    for store in stores:
        runner.run(store.close())


@given(history=histories)
def test_any_history_keeps_the_rule_and_both_stores_answer_alike(
    runner: asyncio.Runner, shared_clock: Clock, stores: list[QuotaStore], history: History
) -> None:
    runner.run(Play(history, stores, shared_clock).run())


# ---- the rule in words, on either store --------------------------------------------------------------------------------


def account(policy: Policy, *, team: Policy | None = None, key: str = "k", slot: str | None = None) -> Account:
    scopes = [Scope("key", key, policy)] + ([Scope("team", "t", team)] if team else [])
    return Account(slot or f"contract {next(serial)}", tuple(scopes))


def ask(
    lease: str, tokens: int, *, targets: tuple[Target, ...] = (), on_cap: str = "clamp", least: int | None = None
) -> Ask:
    return Ask(lease, tokens, tokens, tokens, tokens if least is None else least, on_cap, targets=targets)  # type: ignore[arg-type]


async def spend(store: QuotaStore, who: Account, tokens: int) -> str:
    """One request from admission to end, with what it was expected to use; the verdict."""
    lease = f"spent {next(serial)}"
    verdict = await store.admit(who, ask(lease, tokens))
    if verdict.admitted:
        await store.settle(who, lease, tokens)
    return verdict.kind


async def used(store: QuotaStore, who: Account, name: str = "hour") -> tuple[int, int]:
    view = await store.peek(who)
    return next((window.used, window.held) for window in view.windows if window.name == name)


async def test_the_defaults_give_base_then_a_burst_then_nothing_until_it_is_paid_back(
    store: QuotaStore, clock: Clock
) -> None:
    who = account(Policy())
    assert [await spend(store, who, 1_000) for _ in range(5)] == ["base", "base", "burst", "burst", "rate"]
    clock.now += 62  # the minute is empty again, the burst is not paid back
    assert [await spend(store, who, 1_000) for _ in range(2)] == ["rate", "rate"]
    clock.now += 60
    assert await spend(store, who, 2_000) == "base"


async def test_the_hour_stops_absolutely_and_says_when_it_has_room(store: QuotaStore, clock: Clock) -> None:
    who = account(Policy(rate=None, burst=None, cap=Limit(1_000, 3_600), max_parallel=None))
    assert await spend(store, who, 900) == "base"
    clamped = await store.admit(who, ask("clamped", 400, least=50))
    assert (clamped.kind, clamped.ceiling, clamped.hold) == ("base", 100, 100)
    await store.settle(who, "clamped", 100)
    refused = await store.admit(who, ask("refused", 400, least=50))
    assert (refused.kind, refused.scope, refused.by_holds) == ("cap", "key", False)
    assert refused.retry_after is not None
    clock.now += refused.retry_after
    assert (await store.admit(who, ask("later", 400, least=50))).kind == "base"


async def test_a_cap_full_of_holds_only_is_told_apart(store: QuotaStore) -> None:
    who = account(Policy(rate=None, burst=None, cap=Limit(1_000, 60), max_parallel=None))
    assert (await store.admit(who, ask("running", 1_000))).admitted
    refused = await store.admit(who, ask("waiting", 10))
    assert refused.by_holds
    assert refused.guess
    assert refused.retry_after is not None
    assert 1 <= refused.retry_after <= 1.5


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        (Policy(max_parallel=0), "parallel"),
        (Policy(rate=None, burst=None, cap=Limit(0, 60)), "cap"),
        (Policy(rate=Limit(0, 60), burst=None, cap=None), "rate"),
    ],
)
async def test_a_limit_of_zero_blocks_for_good(store: QuotaStore, policy: Policy, kind: str) -> None:
    verdict = await store.admit(account(policy), ask("x", 5))
    assert (verdict.kind, verdict.blocked, verdict.impossible, verdict.retry_after) == (kind, True, False, None)


async def test_a_rate_of_zero_may_still_overflow(store: QuotaStore) -> None:
    who = account(Policy(rate=Limit(0, 60), burst=None))
    verdict = await store.admit(who, ask("x", 5, targets=(Target("cheap"),)))
    assert (verdict.kind, verdict.target) == ("overflow", "cheap")


async def test_what_could_never_fit_is_called_impossible(store: QuotaStore) -> None:
    who = account(Policy())
    for tokens, kind in ((4_001, "rate"), (50_001, "cap")):
        verdict = await store.admit(who, ask("x", tokens))
        assert (verdict.kind, verdict.impossible, verdict.retry_after) == (kind, True, None)
    assert (await store.admit(who, ask("x", 4_001, targets=(Target("cheap"),)))).kind == "overflow"


async def test_overage_takes_the_first_target_with_room_and_only_the_cap_counts_it(
    store: QuotaStore, clock: Clock
) -> None:
    who = account(Policy(rate=Limit(100, 60), burst=None))
    targets = (Target("small", Limit(150, 60)), Target("large", Limit(500, 60)))
    assert await spend(store, who, 100) == "base"
    taken = [await store.admit(who, ask(f"o{n}", 100, targets=targets)) for n in range(7)]
    assert [v.target for v in taken] == ["small", "large", "large", "large", "large", "large", None]
    assert (await used(store, who, "minute"), await used(store, who, "hour")) == ((100, 0), (100, 600))
    assert taken[-1].kind == "rate"


async def test_one_scope_refusing_books_nothing_in_the_other(store: QuotaStore) -> None:
    """T045"""
    who = account(Policy(Limit(1_000, 60), None, None, None), team=Policy(None, None, Limit(1_500, 86_400), None))
    assert [await spend(store, who, 745) for _ in range(2)] == ["base", "rate"]
    other = replace(who, scopes=(replace(who.scopes[0], name="another key"), who.scopes[1]))
    assert await spend(store, other, 745) == "base"
    for n in range(20):
        verdict = await store.admit(who, ask(f"refused {n}", 100))
        assert (verdict.kind, verdict.scope) == ("cap", "team")
    assert [(w.used, w.held) for w in (await store.peek(who)).windows] == [(745, 0), (1_490, 0)]


async def test_fifty_at_once_against_room_for_ten(store: QuotaStore) -> None:
    """T042, over and over: a hundred times, or a thousand."""
    for _ in range(settings.default.max_examples):
        who = account(Policy(None, None, Limit(1_000, 3_600), None))
        verdicts = await asyncio.gather(*(store.admit(who, ask(f"p{n}", 100, on_cap="refuse")) for n in range(50)))
        assert sum(verdict.admitted for verdict in verdicts) == 10
        assert await used(store, who) == (0, 1_000)


async def test_a_hold_never_ages_out_and_its_charge_is_dated_at_the_end(store: QuotaStore, clock: Clock) -> None:
    """T046"""
    who = account(Policy(None, None, Limit(100, 10), None))
    assert (await store.admit(who, ask("stream", 90))).admitted
    clock.now += 11
    assert (await store.admit(who, ask("other", 50))).kind == "cap"
    clock.now += 1
    await store.settle(who, "stream", 10)
    assert await used(store, who) == (10, 0)
    assert (await store.admit(who, ask("other", 95))).kind == "cap"


async def test_the_window_slides_over_any_boundary(store: QuotaStore, clock: Clock) -> None:
    """T047"""
    who = account(Policy(None, None, Limit(100, 10), None))
    clock.now = 1_000_009.5
    assert await spend(store, who, 100) == "base"
    told = []
    for wait in (1, 4.5, 5.5):
        clock.now += wait
        told.append(await spend(store, who, 100))
    assert told == ["cap", "cap", "base"]


async def test_a_lease_that_expires_is_booked_and_may_be_corrected_for_ten_minutes(
    store: QuotaStore, clock: Clock
) -> None:
    who = account(Policy(None, None, Limit(1_000, 3_600), None))
    for lease in ("soon", "late"):
        assert (await store.admit(who, ask(lease, 400))).admitted
    clock.now += 31
    assert await used(store, who) == (800, 0)
    assert (await store.progress(who, "soon", 5, 10)).expired
    await store.settle(who, "soon", 150)
    await store.settle(who, "soon", 300)
    assert await used(store, who) == (550, 0)
    clock.now += 601
    await store.settle(who, "late", 1)
    assert await used(store, who) == (550, 0)


async def test_another_keys_lease_expires_in_the_middle_of_a_refusal(store: QuotaStore, clock: Clock) -> None:
    """Its team's books change with it, and its overflow's own rate does, though nobody asked about that key."""
    targets, slot = (Target("cheap", Limit(500, 60)),), f"contract {next(serial)}"
    policy, team = Policy(Limit(100, 60), None, None, None), Policy(Limit(1_000, 60), None, Limit(1_000, 3_600), None)
    silent, asking = (account(policy, team=team, key=key, slot=slot) for key in ("silent", "asking"))
    assert (await store.admit(silent, ask("overflow", 400, targets=targets))).target == "cheap"
    assert await spend(store, asking, 100) == "base"
    clock.now += 31
    refused = await store.admit(asking, ask("refused", 400))
    assert (refused.kind, refused.scope) == ("rate", "key")
    assert [(window.used, window.held) for window in refused.windows] == [(100, 0), (100, 0), (500, 0)]
    assert await used(store, asking) == (500, 0)
    clock.now += 20
    await store.settle(silent, "overflow", 300)
    assert await used(store, silent) == (400, 0)
    assert (await store.admit(silent, ask("more", 300, targets=targets))).kind == "rate"
    assert (await store.admit(silent, ask("less", 200, targets=targets))).target == "cheap"


async def test_renewing_keeps_a_lease_from_expiring(store: QuotaStore, clock: Clock) -> None:
    who = account(Policy(None, None, Limit(1_000, 3_600), None))
    assert (await store.admit(who, ask("kept", 400))).admitted
    for _ in range(5):
        clock.now += 20
        await store.renew([(who, "kept"), (who, "unknown")])
    assert await used(store, who) == (0, 400)


async def test_saying_it_again_changes_nothing(store: QuotaStore) -> None:
    who = account(Policy(max_parallel=1))
    first, again = [await store.admit(who, ask("same", 500)) for _ in range(2)]
    assert (first.kind, first.hold) == (again.kind, again.hold)
    for consumed in (200, 200, 100):
        told = await store.progress(who, "same", consumed, 600)
    assert (told.covered, await used(store, who)) == (600, (200, 400))
    for _ in range(2):
        await store.settle(who, "same", 300)
    assert await used(store, who) == (300, 0)


async def test_what_is_forced_is_booked_over_any_limit(store: QuotaStore) -> None:
    who = account(Policy(Limit(10, 60), None, Limit(10, 60), 0))
    for primary, rate in ((True, 100), (False, 100)):
        lease = f"forced {primary}"
        assert (await store.admit(who, replace(ask(lease, 0), primary=primary, forced=True))).admitted
        await store.settle(who, lease, 100)
        assert await used(store, who, "minute") == (rate, 0)
    assert await used(store, who, "hour") == (200, 0)


async def test_the_largest_limits_are_exact(store: QuotaStore) -> None:
    most = 10**15
    who = account(Policy(Limit(most, 60), Limit(most, 5), Limit(most, MAX_SECONDS), None))
    assert await spend(store, who, most - 1) == "base"
    verdicts = [await store.admit(who, ask(f"one more {n}", 1)) for n in range(2)]
    assert [verdict.kind for verdict in verdicts] == ["base", "cap"]
    assert await used(store, who) == (most - 1, 1)


async def test_time_running_back_stands_still(store: QuotaStore, clock: Clock) -> None:
    who = account(Policy(None, None, Limit(100, 10), None))
    assert await spend(store, who, 100) == "base"
    clock.now -= 4
    assert await spend(store, who, 1) == "cap"
    assert (await store.peek(who)).now == clock.now + 4
    clock.now += 15
    assert await spend(store, who, 100) == "base"


@pytest.mark.parametrize("seconds", [30, 61, 400, 7_200])
async def test_changing_a_windows_seconds_carries_its_charges_over(
    store: QuotaStore, clock: Clock, seconds: int
) -> None:
    who = account(Policy(None, None, Limit(1_000, 60), None))
    for _ in range(4):
        assert await spend(store, who, 100) == "base"
        clock.now += 5
    changed = replace(who, scopes=(replace(who.scopes[0], policy=Policy(None, None, Limit(1_000, seconds), None)),))
    assert await used(store, changed) == (400, 0)
    clock.now += 2 * seconds + 61
    assert await used(store, changed) == (0, 0)


@settings(max_examples=settings.default.max_examples // 4)
@given(history=histories, last=asks())
def test_the_named_moment_comes_true(
    runner: asyncio.Runner, shared_clock: Clock, stores: list[QuotaStore], history: History, last: Ask
) -> None:
    async def story() -> None:
        play = Play(history, stores[:1], shared_clock)
        await play.run()
        refused = await stores[0].admit(play.account(0), replace(last, lease="last"))
        if refused.retry_after is not None and not refused.guess:
            shared_clock.now += refused.retry_after
            assert (await stores[0].admit(play.account(0), replace(last, lease="last"))).admitted

    runner.run(story())


async def test_idle_accounts_are_forgotten(clock: Clock) -> None:
    store = EmptyMemory(clock)
    for n in range(100):
        assert await spend(store, account(Policy(), key=f"key {n}"), 500) == "base"
    assert "100 scopes" in repr(store)
    clock.now += 3_700
    await store.peek(account(Policy()))
    assert "<MemoryStore 0 scopes" in repr(store)
