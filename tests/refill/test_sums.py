"""What a slot used lately, out of the ledger: on SQLite and on Postgres, against the records themselves."""

from __future__ import annotations

import random
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import insert, text
from sqlalchemy.ext.asyncio import AsyncEngine

from meter.callers.tables import reading
from meter.ledger.merge import merge
from meter.ledger.partitions import ensure_partitions
from meter.ledger.record import UsageRecord
from meter.ledger.schema import api_key
from meter.refill.reach import Reach
from meter.refill.sums import Look, Slot, Sum, _query, of_ledger, of_records
from quotas.policy import Policy
from tests.ledger.samples import record

NOW = datetime(2026, 3, 1, 0, 20, 0, 123_000, tzinfo=UTC)  # the windows reach into the month before
REACH = Reach.of([Policy()])
ALONE = Slot(team=None, key="key1")
TEAM = Slot(team="search", key=None)


def ended(ago: float, lasted: float = 1.0, **changes: Any) -> UsageRecord:
    """A record that ended so many seconds before NOW."""
    started = NOW - timedelta(seconds=ago + lasted)
    return record(started_at=started, duration_ms=round(lasted * 1_000), **changes)


async def book(engine: AsyncEngine, records: list[UsageRecord]) -> None:
    async with engine.begin() as connection:
        for month in {each.started_at.date().replace(day=1) for each in records}:
            await ensure_partitions(connection, month)
        await merge(connection, records)


async def join(engine: AsyncEngine, key_id: str, team: str | None) -> None:
    async with engine.begin() as connection:
        await connection.execute(
            insert(api_key).values(
                id=key_id, name=key_id, tier="t", team=team, tags={}, policy={}, disabled=False, secret_sha256="",
                managed_by="rest", created_at=NOW, version=1,
            )
        )  # fmt: skip


async def look(engine: AsyncEngine, slot: Slot, *left_out: UUID, ahead: float = 0.0, reach: Reach = REACH) -> list[Sum]:
    async with reading(engine, 20) as connection:
        return await of_ledger(connection, Look(slot, reach, NOW, ahead), left_out)


def tokens(sums: Iterable[Sum], **kind: bool) -> int:
    return sum(each.tokens for each in sums if all(getattr(each, name) == value for name, value in kind.items()))


async def test_a_key_alone_has_its_own_records_of_the_hour(engine: AsyncEngine) -> None:
    await book(
        engine,
        [
            ended(5, prompt_tokens=100, completion_tokens=1),
            ended(3_590, prompt_tokens=200, completion_tokens=2),
            ended(3_700, prompt_tokens=400, completion_tokens=4),
            ended(10, lasted=5_000, prompt_tokens=800, completion_tokens=8),
            ended(5, key_id="key2", prompt_tokens=1_600, completion_tokens=16),
            ended(7, route="overflow", prompt_tokens=3_200, completion_tokens=32),
        ],
    )
    sums = await look(engine, ALONE)
    assert tokens(sums) == 101 + 202 + 808 + 3_232
    assert tokens(sums, primary=True) == 101 + 202 + 808
    assert not any(each.in_team for each in sums)
    assert [each.at for each in sums] == sorted(each.at for each in sums)


async def test_a_team_has_its_keys_and_those_that_left_it(engine: AsyncEngine) -> None:
    await join(engine, "key1", "search")
    await join(engine, "key2", "ads")
    await join(engine, "key3", None)
    await book(
        engine,
        [
            ended(5, key_id="key1", team_id="search", prompt_tokens=100),
            ended(6, key_id="key1", team_id="ads", prompt_tokens=200),  # before it joined
            ended(7, key_id="key2", team_id="search", prompt_tokens=400),  # before it left
            ended(8, key_id="key3", prompt_tokens=800),
            ended(9, key_id="gone", team_id="search", prompt_tokens=1_600),
        ],
    )
    sums = await look(engine, TEAM)
    assert {each.key for each in sums} == {"key1", "key2", "gone"}
    assert tokens(sums, in_team=True) == 104 + 404 + 1_604
    assert tokens([each for each in sums if each.key == "key1"]) == 104 + 204


async def test_what_is_left_out_is_not_counted(engine: AsyncEngine) -> None:
    records = [ended(ago) for ago in range(1, 6)]
    await book(engine, records)
    left_out = [each.exchange_id for each in records[:3]]
    assert tokens(await look(engine, ALONE, *left_out)) == 2 * 13


async def test_the_newest_burst_is_told(engine: AsyncEngine) -> None:
    await book(
        engine,
        [
            ended(50, verdict="burst"),
            ended(20, lasted=10, verdict="burst"),
            ended(5, verdict="base"),
            ended(2, route="overflow", verdict="overflow"),
        ],
    )
    bursts = [each.burst for each in await look(engine, ALONE) if each.burst is not None]
    assert max(bursts) == pytest.approx((NOW - timedelta(seconds=30)).timestamp() * 1_000, abs=2)


async def test_every_window_counts_at_least_what_exact_ones_do_and_at_most_a_slot_more(engine: AsyncEngine) -> None:
    dice = random.Random(11)
    records = [
        ended(
            dice.uniform(0, 3_700),
            dice.choice([0.0, dice.uniform(0, 300)]),
            prompt_tokens=1 << dice.randrange(20),
            completion_tokens=0,
            route=dice.choice(["primary", "overflow"]),
        )
        for _ in range(300)
    ]
    await book(engine, records)
    for ahead in (0.0, 31.7, -7.35):
        sums = await look(engine, ALONE, ahead=ahead)
        exact = list(of_records(Look(ALONE, REACH, NOW, ahead), records))
        now = Look(ALONE, REACH, NOW, ahead).store_ms
        for primary, slot, span in ((True, 1, 60), (True, 1, 120), (False, 10, 3_600)):
            in_ledger, in_records = ([each for each in some if each.primary or not primary] for some in (sums, exact))
            for back in range(0, (span + 1) * 1_000, 7_919):
                assert tokens(each for each in in_ledger if each.at > now - back) >= tokens(
                    each for each in in_records if each.at > now - back
                )
                assert tokens(each for each in in_ledger if each.at > now - back) <= tokens(
                    each for each in in_records if each.at > now - back - slot * 1_000 - 2
                )


async def test_old_usage_is_summed_by_the_caps_slots(engine: AsyncEngine) -> None:
    await book(engine, [ended(1_000 + n / 10) for n in range(200)])
    sums = await look(engine, ALONE)
    assert len(sums) <= 4
    assert all(each.at % 10_000 == 0 for each in sums)
    assert tokens(sums) == 200 * 13


@pytest.mark.parametrize("slot", [ALONE, TEAM])
async def test_the_index_is_used_and_old_months_are_not_looked_at(engine: AsyncEngine, slot: Slot) -> None:
    await join(engine, "key1", "search")
    months = [NOW, NOW - timedelta(hours=1), NOW - timedelta(days=40)]
    rows = [
        record(key_id=f"key{n % 300}", started_at=at - timedelta(seconds=n / 3)) for at in months for n in range(3_000)
    ]
    await book(engine, rows)
    postgres = engine.dialect.name == "postgresql"
    query = _query(Look(slot, REACH, NOW), [UUID(int=1)], postgres=postgres)
    sql = str(query.compile(dialect=engine.dialect, compile_kwargs={"literal_binds": True}))
    async with engine.connect() as connection:
        if postgres:
            await connection.execute(text("ANALYZE"))
        explain = "EXPLAIN" if postgres else "EXPLAIN QUERY PLAN"
        plan = "\n".join(str(row[-1]) for row in await connection.exec_driver_sql(f"{explain} {sql}"))
    assert "key_id" in plan and "started_at" in plan
    assert "SCAN usage_record" not in plan
    if postgres:
        assert "usage_record_202601" not in plan
        assert not any(f"Seq Scan on usage_record_{month}" in plan for month in ("202602", "202603"))
