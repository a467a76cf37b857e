"""What is on record about a slot, wherever each exchange is at the moment: ledger, journal, or still to be settled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from meter.ledger.database import open_engine
from meter.ledger.journal import Journal
from meter.ledger.record import Opened, UsageRecord
from meter.ledger.shipper import Shipper
from meter.refill.refill import Refill
from quotas.memory import MemoryStore
from quotas.policy import UNLIMITED, Limit, Policy
from quotas.store import Account, Past, Scope, Seed, StoreUnavailable
from tests.ledger.samples import record
from tests.refill.test_sums import book

NOW = datetime(2026, 3, 14, 12, 30, tzinfo=UTC)
TEAM = Scope("team", "search", Policy(None, None, Limit(400_000, 3_600), None))


def alone(name: str = "key1", policy: Policy | None = None) -> Account:
    return Account(f"key:{name}", (Scope("key", name, policy or Policy()),))


def member(name: str) -> Account:
    return Account("team:search", (Scope("key", name, Policy()), TEAM))


def ended(ago: float, tokens: int, **changes: Any) -> UsageRecord:
    started = NOW - timedelta(seconds=ago)
    return record(started_at=started, prompt_tokens=tokens, completion_tokens=0, **changes)


@pytest.fixture
def adopted() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@pytest.fixture
def refill(engine: AsyncEngine, journal: Journal, adopted: asyncio.Event) -> Refill:
    def accounts(slot: str) -> list[Account]:
        return [member("key1"), member("key2")] if slot == "team:search" else []

    return Refill(engine, journal, accounts, clock=lambda: NOW, adopted=adopted)


@pytest.fixture
async def shipper(engine: AsyncEngine, journal: Journal) -> AsyncIterator[Shipper]:
    shipper = Shipper(journal, engine, batch_seconds=0.01)
    shipper.start()
    yield shipper
    await shipper.stop(5)


def nothing() -> tuple[str, ...]:
    return ()


def used(seed: Seed, kind: str = "key", name: str = "key1") -> int:
    return sum(past.tokens for past in seed.past if (past.kind, past.name) == (kind, name))


async def shown(account: Account, seed: Seed) -> dict[tuple[str, str], int]:
    """What a store says is used that starts from the seed."""
    store = MemoryStore(NOW.timestamp)
    await store.seed(account.slot, seed)
    return {(window.scope, window.name): window.used for window in (await store.peek(account)).windows}


async def test_ledger_and_journal_are_one_record(engine: AsyncEngine, journal: Journal, refill: Refill) -> None:
    await book(engine, [ended(30, 100), ended(90, 200), ended(1_000, 400, route="overflow")])
    journal.finished(ended(10, 1_600))
    journal.finished(ended(10, 9_999, key_id="key2"))
    seed = await refill(alone(), NOW.timestamp(), nothing)
    assert await shown(alone(), seed) == {("key", "minute"): 1_700, ("key", "burst"): 1_900, ("key", "hour"): 2_300}


async def test_an_exchange_that_is_in_both_counts_once(engine: AsyncEngine, journal: Journal, refill: Refill) -> None:
    twice = ended(30, 100)
    await book(engine, [twice])
    journal.finished(twice)
    assert used(await refill(alone(), NOW.timestamp(), nothing)) == 100


async def test_what_is_still_to_be_settled_is_left_out_wherever_it_is(
    engine: AsyncEngine, journal: Journal, refill: Refill
) -> None:
    booked, waiting = ended(30, 100), ended(20, 200)
    await book(engine, [booked, ended(40, 400)])
    for each in (waiting, ended(10, 800)):
        journal.finished(each)
    unsettled = [str(each.exchange_id) for each in (booked, waiting)] + ["away-1", "x~shadow"]
    assert used(await refill(alone(), NOW.timestamp(), lambda: unsettled)) == 1_200


async def test_while_records_are_shipped_each_counts_once(
    engine: AsyncEngine, journal: Journal, refill: Refill, shipper: Shipper
) -> None:
    for batch in range(1, 11):
        for _ in range(20):
            journal.finished(ended(30, 10))
        seeds = await asyncio.gather(*(refill(alone(), NOW.timestamp(), nothing) for _ in range(3)))
        assert [used(seed) for seed in seeds] == [batch * 200] * 3


async def test_a_team_is_filled_with_all_its_keys(engine: AsyncEngine, journal: Journal, refill: Refill) -> None:
    await book(
        engine, [ended(30, 100, key_id="key1", team_id="search"), ended(30, 200, key_id="gone", team_id="search")]
    )
    journal.finished(ended(20, 400, key_id="key2", team_id="search"))
    journal.finished(ended(20, 800, key_id="key2", team_id="ads"))
    seed = await refill(member("key1"), NOW.timestamp(), nothing)
    assert [used(seed, name=name) for name in ("key1", "key2")] == [100, 1_200]
    assert used(seed, "team", "search") == 700
    assert {scope.name for scope in seed.scopes} == {"key1", "key2", "search"}
    assert (await shown(member("key2"), seed))["team", "hour"] == 700


async def test_a_member_that_used_nothing_is_not_written(engine: AsyncEngine, refill: Refill) -> None:
    seed = await refill(member("key2"), NOW.timestamp(), nothing)
    assert {scope.name for scope in seed.scopes} == {"key2", "search"}


async def test_the_newest_burst_is_the_opening_also_of_one_that_runs(
    engine: AsyncEngine, journal: Journal, refill: Refill
) -> None:
    await book(engine, [ended(100, 10, verdict="burst", duration_ms=5_000), ended(80, 10)])
    seed = await refill(alone(), NOW.timestamp(), nothing)
    assert seed.opened == {("key", "key1"): pytest.approx(NOW.timestamp() - 100, abs=0.01)}
    running = ended(3, 50, verdict="burst")
    journal.opened(Opened(record=running, account_slot="key:key1", scope_names=(("key", "key1"),)))
    seed = await refill(alone(), NOW.timestamp(), nothing)
    assert seed.opened == {("key", "key1"): pytest.approx(NOW.timestamp() - 3, abs=0.01)}
    assert used(seed) == 20


async def test_it_is_told_in_the_stores_time(engine: AsyncEngine, journal: Journal, refill: Refill) -> None:
    journal.finished(ended(30, 100))
    seed = await refill(alone(), NOW.timestamp() + 1_000, nothing)
    assert seed.past == (Past("key", "key1", pytest.approx(NOW.timestamp() + 970, abs=0.01), 100),)


async def test_without_windows_nothing_is_asked(journal: Journal, adopted: asyncio.Event, tmp_path: Path) -> None:
    away = open_engine("postgresql+asyncpg://nobody@127.0.0.1:9/none")
    refill = Refill(away, journal, lambda slot: [], clock=lambda: NOW, adopted=adopted)
    assert await refill(alone(policy=UNLIMITED), NOW.timestamp(), nothing) == Seed(alone(policy=UNLIMITED).scopes)
    shadow = Account("shadow:key1", alone().scopes)
    assert await refill(shadow, NOW.timestamp(), nothing) == Seed(shadow.scopes)
    await away.dispose()


async def test_a_ledger_that_is_away_is_said_so(journal: Journal, adopted: asyncio.Event) -> None:
    away = open_engine("postgresql+asyncpg://nobody@127.0.0.1:9/none")
    refill = Refill(away, journal, lambda slot: [], clock=lambda: NOW, adopted=adopted)
    with pytest.raises(StoreUnavailable, match="The ledger cannot say what was used"):
        await refill(alone(), NOW.timestamp(), nothing)
    await away.dispose()


async def test_nothing_is_said_before_predecessors_were_looked_for(refill: Refill, adopted: asyncio.Event) -> None:
    adopted.clear()
    asked = asyncio.create_task(refill(alone(), NOW.timestamp(), nothing))
    done, _ = await asyncio.wait({asked}, timeout=0.1)
    assert not done
    adopted.set()
    assert used(await asked) == 0


async def test_a_slot_in_use_is_looked_at_again_once_others_have_shipped(
    engine: AsyncEngine, journal: Journal, adopted: asyncio.Event
) -> None:
    refill = Refill(engine, journal, lambda slot: [], clock=lambda: NOW, adopted=adopted, others_ship_within=0.3)
    looks = 0

    def count() -> tuple[str, ...]:
        nonlocal looks
        looks += 1
        return ()

    await book(engine, [ended(300, 100)])
    assert (used(await refill(alone(), NOW.timestamp(), count)), looks) == (100, 1)
    await book(engine, [ended(10, 200)])
    assert (used(await refill(alone(), NOW.timestamp(), count)), looks) == (300, 3)
