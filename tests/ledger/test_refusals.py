"""Refusals by minute, on SQLite and on Postgres: a storm is a few rows, each refusal is in them once."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from meter.ledger.database import DatabaseUnavailable, migrate, open_engine
from meter.ledger.refusals import MARKS_DAYS, RefusalCounts, refusals
from meter.ledger.schema import refusal_flush, refusal_minute
from tests.ledger.cutter import Cutter
from tests.ledger.samples import NOON
from tests.services.postgres import PostgresServer

MINUTE = timedelta(minutes=1)


@dataclass
class Clock:
    now: datetime = NOON

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def total(engine: AsyncEngine) -> int:
    async with engine.connect() as connection:
        return int(await connection.scalar(select(func.sum(refusal_minute.c.refusals))) or 0)


async def marks(engine: AsyncEngine) -> list[int]:
    async with engine.connect() as connection:
        return list(await connection.scalars(select(refusal_flush.c.number)))


def row(minute: datetime, key: str, rule: str, shadow: bool, count: int) -> dict[str, Any]:
    return {"minute": minute, "key_id": key, "rule": rule, "shadow": shadow, "refusals": count}


async def test_a_storm_is_a_row_for_each_minute_key_and_rule(engine: AsyncEngine, clock: Clock) -> None:
    counts = RefusalCounts(engine, clock)
    for second in range(120):
        clock.now = NOON + timedelta(seconds=second)
        for _ in range(500):
            counts.add("alice", "rate", shadow=False)
        counts.add("alice", "rate", shadow=True)
        counts.add("bob", "cap", shadow=False)
    await counts.flush()
    assert counts.waiting_rows == 0
    assert await refusals(engine) == [
        row(minute, key, rule, shadow, count)
        for minute in (NOON + MINUTE, NOON)
        for key, rule, shadow, count in (
            ("bob", "cap", False, 60),
            ("alice", "rate", True, 60),
            ("alice", "rate", False, 30_000),
        )
    ]


async def test_what_several_processes_count_is_added_up(engine: AsyncEngine, clock: Clock) -> None:
    """Each meets the same keys in another order; none waits for a row that the other has while holding what it needs."""
    processes = [RefusalCounts(engine, clock) for _ in range(4)]
    keys = [f"key{number:03}" for number in range(300)]
    for _ in range(3):
        for number, process in enumerate(processes):
            for key in keys[:: -1 if number % 2 else 1]:
                process.add(key, "rate", shadow=False)
        await asyncio.gather(*(process.flush() for process in processes))
        assert [process.failing for process in processes] == [None] * 4
    assert {each["key_id"]: each["refusals"] for each in await refusals(engine, limit=1_000)} == dict.fromkeys(keys, 12)
    assert await marks(engine) == [3] * 4


async def test_a_backlog_of_many_rows_goes_in_with_one_flush(engine: AsyncEngine, clock: Clock) -> None:
    counts = RefusalCounts(engine, clock)
    for key in range(12_000):
        counts.add(f"key{key}", "cap", shadow=False)
    await counts.flush()
    assert (counts.waiting_rows, await total(engine), await marks(engine)) == (0, 12_000, [3])


async def test_a_batch_whose_commit_was_never_answered_is_added_once(
    postgres_server: PostgresServer, clock: Clock
) -> None:
    url = postgres_server.create_database()
    await migrate(url)
    async with Cutter.before(url) as cutter:
        engine = open_engine(cutter.url)
        counts = RefusalCounts(engine, clock)
        for _ in range(3):
            counts.add("alice", "rate", shadow=False)
        cutter.cuts = 1
        await counts.flush()
        assert counts.failing
        assert await total(engine) == 3  # it was committed, and nobody here knows
        counts.add("alice", "rate", shadow=False)
        await counts.flush()
        assert [counts.failing, counts.waiting_rows] == [None, 0]
        assert await total(engine) == 4
        await engine.dispose()


async def test_a_flush_that_is_broken_off_anywhere_counts_nothing_twice(engine: AsyncEngine, clock: Clock) -> None:
    counts = RefusalCounts(engine, clock)
    for steps in range(40):
        counts.add("alice", "rate", shadow=False)
        flush = asyncio.create_task(counts.flush())
        for _ in range(steps):
            await asyncio.sleep(0)
        flush.cancel()
        await asyncio.wait({flush})
    await counts.flush()
    assert await total(engine) == 40


async def test_while_the_database_does_not_take_them_they_are_kept_and_summed(database: str, clock: Clock) -> None:
    engine = open_engine(database)
    counts = RefusalCounts(engine, clock)
    for _ in range(3):
        counts.add("alice", "rate", shadow=False)
        await counts.flush()  # there is no such table yet
        assert counts.failing
        counts.add("alice", "rate", shadow=False)
    assert counts.waiting_rows == 2  # one whose outcome is unclear, one of all that came later
    await migrate(database)
    await counts.flush()
    assert (counts.failing, counts.waiting_rows, await total(engine)) == (None, 0, 6)
    await engine.dispose()


async def test_beyond_the_bound_known_rows_go_on_and_what_is_lost_is_said(engine: AsyncEngine, clock: Clock) -> None:
    counts = RefusalCounts(engine, clock, most_rows=3)
    for key in ("a", "b", "c", "d", "a", "e", "d"):
        counts.add(key, "rate", shadow=False)
    assert (counts.waiting_rows, counts.lost) == (3, 3)
    await counts.flush()
    assert [(each["key_id"], each["refusals"]) for each in await refusals(engine)] == [("c", 1), ("b", 1), ("a", 2)]


async def test_a_stop_writes_what_is_left(engine: AsyncEngine, clock: Clock) -> None:
    counts = RefusalCounts(engine, clock)
    counts.add("alice", "parallel", shadow=False)
    await counts.stop(30)
    assert await total(engine) == 1


async def test_a_stop_waits_for_no_database(clock: Clock) -> None:
    """A server that is stopped in its tracks takes connections and says nothing."""
    with PostgresServer() as server:
        url = server.create_database()
        await migrate(url)
        engine = open_engine(url)
        counts = RefusalCounts(engine, clock)
        counts.add("alice", "rate", shadow=False)
        server.pause()
        await counts.stop(0.2)
        server.resume()
        assert counts.waiting_rows == 1
        await engine.dispose()


async def test_the_marks_of_processes_that_ended_long_ago_go(engine: AsyncEngine, clock: Clock) -> None:
    for days in (0, MARKS_DAYS - 1, MARKS_DAYS + 1):
        clock.now = NOON + timedelta(days=days)
        counts = RefusalCounts(engine, clock)
        counts.add("alice", "rate", shadow=False)
        await counts.flush()
    assert await marks(engine) == [1, 1]


async def some_rows(engine: AsyncEngine, clock: Clock) -> list[dict[str, Any]]:
    """Of three minutes, four keys and two rules; the newest first."""
    counts, expected = RefusalCounts(engine, clock), Counter[tuple[datetime, str, str, bool]]()
    for number in range(200):
        place = (NOON + MINUTE * (number % 3), f"key{number % 4}", "cap" if number % 5 else "rate", number % 7 == 0)
        clock.now = place[0]
        counts.add(place[1], place[2], shadow=place[3])
        expected[place] += 1
    await counts.flush()
    return [row(*place, expected[place]) for place in sorted(expected, reverse=True)]


@pytest.mark.parametrize("size", [1, 7, 100])
async def test_pages_of_any_size_are_the_whole(engine: AsyncEngine, clock: Clock, size: int) -> None:
    expected, found = await some_rows(engine, clock), list[dict[str, Any]]()
    after = None
    while page := await refusals(engine, after=after, limit=size):
        assert len(page) <= size
        found += page
        last = page[-1]
        after = (last["minute"], last["key_id"], last["rule"], last["shadow"])
    assert found == expected


@pytest.mark.parametrize(
    "filters",
    [
        {"key": "key1"},
        {"rule": "rate"},
        {"shadow": True},
        {"key": "key0", "rule": "cap", "shadow": False},
        {"key": "?"},
    ],
)
async def test_rows_are_chosen_by_what_they_are(engine: AsyncEngine, clock: Clock, filters: dict[str, object]) -> None:
    names = {"key_id" if name == "key" else name: value for name, value in filters.items()}
    expected = [each for each in await some_rows(engine, clock) if names.items() <= each.items()]
    assert await refusals(engine, filters=filters) == expected


async def test_bounds_are_half_open(engine: AsyncEngine, clock: Clock) -> None:
    rows = await some_rows(engine, clock)
    second = [each for each in rows if each["minute"] == NOON + MINUTE]
    assert await refusals(engine, start=NOON + MINUTE, end=NOON + 2 * MINUTE) == second
    assert await refusals(engine, start=NOON + MINUTE, end=NOON + MINUTE) == []


async def test_a_database_that_is_away_is_said_plainly() -> None:
    engine = open_engine("postgresql+asyncpg://me@127.0.0.1:1/db")
    with pytest.raises(DatabaseUnavailable, match="cannot be used"):
        await refusals(engine)
    await engine.dispose()
