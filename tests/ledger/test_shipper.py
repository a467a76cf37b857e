"""From the journal into the ledger, on SQLite and on Postgres: all of it, each exchange once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncEngine

from meter.ledger.database import migrate, open_engine
from meter.ledger.journal import Journal
from meter.ledger.merge import merge
from meter.ledger.record import UsageRecord
from meter.ledger.schema import USAGE_SUMS, usage_hourly, usage_record
from meter.ledger.shipper import REJECTED, Shipped, Shipper
from tests.ledger.cutter import Cutter
from tests.ledger.samples import NOON, record
from tests.services.postgres import PostgresServer

DEADLINE = 30.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def shipping(journal: Journal, engine: AsyncEngine, **terms: Any) -> AsyncIterator[Shipper]:
    shipper = Shipper(journal, engine, **({"batch_seconds": 0.02} | terms))
    shipper.start()
    try:
        yield shipper
    finally:
        await shipper.stop(0)


async def ship(journal: Journal, engine: AsyncEngine, records: Sequence[UsageRecord], **terms: Any) -> Shipper:
    """Writes and ships all of them."""
    for each in records:
        journal.finished(each)
    async with shipping(journal, engine, **terms) as shipper:
        await until(lambda: shipper.backlog_rows == 0)
    return shipper


async def booked(engine: AsyncEngine) -> list[UsageRecord]:
    """What the ledger has, in the order of exchange ids."""
    async with engine.connect() as connection:
        rows = (await connection.execute(select(usage_record).order_by(usage_record.c.exchange_id))).mappings().all()
    return [UsageRecord(**row) for row in rows]


def in_order(records: Sequence[UsageRecord]) -> list[UsageRecord]:
    return sorted(records, key=lambda each: each.exchange_id)


async def hourly(engine: AsyncEngine) -> dict[tuple[Any, ...], tuple[int, ...]]:
    async with engine.connect() as connection:
        rows = (await connection.execute(select(usage_hourly))).all()
    return {tuple(row[:6]): tuple(row[6:]) for row in rows}


def summed(records: Sequence[UsageRecord]) -> dict[tuple[Any, ...], tuple[int, ...]]:
    """The same, added up here."""
    sums: dict[tuple[Any, ...], tuple[int, ...]] = {}
    for each in records:
        hour = each.started_at.replace(minute=0, second=0, microsecond=0)
        key = (hour, each.key_id, each.team_id or "", each.model_requested, each.backend, each.route)
        tokens = tuple(getattr(each, name) for name in USAGE_SUMS)
        row = (1, *tokens, each.cost_nanousd or 0, int(each.cost_nanousd is None))
        sums[key] = tuple(a + b for a, b in zip(sums.get(key, (0,) * len(row)), row, strict=True))
    return sums


def varied(count: int, seed: int = 1) -> list[UsageRecord]:
    """Records over keys, teams, backends, hours; some without a price."""
    dice = random.Random(seed)
    return [
        record(
            key_id=dice.choice(["key1", "key2"]),
            team_id=dice.choice([None, "search"]),
            backend=dice.choice(["gpu", "cheap"]),
            tags=dice.choice([{}, {"feature": "chat"}]),
            started_at=NOON + timedelta(seconds=dice.uniform(-7200, 7200)),
            prompt_tokens=dice.randrange(10**6),
            cost_nanousd=dice.choice([None, dice.randrange(10**12)]),
        )
        for _ in range(count)
    ]


async def test_records_arrive_as_they_were_written(journal: Journal, engine: AsyncEngine) -> None:
    full = record(
        attempt=2, team_id="search", tags={"a": "ä", "b": "😀"}, reason="rate", streamed=True, cached_prompt_tokens=3,
        reasoning_tokens=2, engine_prompt_tokens=18, engine_completion_tokens=10**18, expected_tokens=50, ceiling_tokens=60,
        finish_reason="stop", started_at=NOON.replace(microsecond=123_456), first_token_ms=7, duration_ms=900,
        price_id=4, cost_nanousd=2**62,
    )  # fmt: skip
    await ship(journal, engine, [full, bare := record()])
    assert await booked(engine) == in_order([full, bare])


async def test_the_roll_up_is_the_sum_of_the_records(journal: Journal, engine: AsyncEngine) -> None:
    records = varied(300)
    told: list[Shipped] = []
    shipper = await ship(journal, engine, records, batch_rows=64, on_shipped=told.append)
    assert await booked(engine) == in_order(records)
    assert await hourly(engine) == summed(records)
    assert shipper.results() == {"written": 300, "duplicate": 0, "rejected": 0}
    assert sum(told, Shipped()) == Shipped(300)
    assert (shipper.lag_seconds, shipper.failing, shipper.failures) == (0, None, 0)


async def test_an_exchange_is_booked_once_however_often_it_is_sent(journal: Journal, engine: AsyncEngine) -> None:
    records = varied(50)
    await ship(journal, engine, records)
    shipper = await ship(journal, engine, [*records, *records, *(more := varied(10, seed=2)), more[0]], batch_rows=45)
    assert await booked(engine) == in_order(records + more)
    assert await hourly(engine) == summed(records + more)
    assert shipper.results() == {"written": 10, "duplicate": 101, "rejected": 0}


async def test_rows_are_told_apart_by_our_id_alone(journal: Journal, engine: AsyncEngine) -> None:
    """T063: everything that others may repeat is the same in all of them."""
    same = uuid4()
    await ship(journal, engine, [record(request_id=same) for _ in range(5)])
    await ship(journal, engine, [record(request_id=same) for _ in range(2)])
    assert len(await booked(engine)) == 7


async def test_large_figures_are_kept_exactly(journal: Journal, engine: AsyncEngine) -> None:
    """T064"""
    large = {"prompt_tokens": 1_500_000_000, "completion_tokens": 1_500_000_000, "cost_nanousd": 10**17 + 1}
    await ship(journal, engine, [record(**large), record(**large)])
    [sums] = (await hourly(engine)).values()
    assert sums == (2, 3_000_000_000, 0, 3_000_000_000, 0, 0, 0, 2 * 10**17 + 2, 0)
    assert all(each.total_tokens == 3_000_000_000 for each in await booked(engine))


async def test_a_zero_byte_in_a_text_stops_nobody(journal: Journal, engine: AsyncEngine) -> None:
    """T059"""
    records = [record() for _ in range(9)]
    odd = record(reason="a\0b", tags={"us\0er": "\0x", "k": "\\u0000"})
    shipper = await ship(journal, engine, [*records[:4], odd, *records[4:]])
    clean = msgspec.structs.replace(odd, reason="ab", tags={"user": "x", "k": "\\u0000"})
    assert await booked(engine) == in_order([*records, clean])
    assert shipper.failures == 0


@pytest.mark.parametrize("position", [0, 7, 19])
async def test_a_poison_row_is_set_aside_and_the_rest_goes_in(
    journal: Journal, engine: AsyncEngine, position: int
) -> None:
    records = varied(19)
    poison = record(prompt_tokens=2**63)
    shipper = await ship(journal, engine, [*records[:position], poison, *records[position:]])
    assert await booked(engine) == in_order(records)
    assert await hourly(engine) == summed(records)
    [line] = (journal.directory / REJECTED).read_bytes().splitlines()
    kept = msgspec.json.decode(line)
    assert msgspec.convert(kept["record"], UsageRecord, strict=False) == poison
    assert "too large" in kept["reason"] or "out of" in kept["reason"]
    assert shipper.results() == {"written": 19, "duplicate": 0, "rejected": 1}


async def test_a_row_that_the_database_itself_refuses_is_set_aside(
    journal: Journal, postgres_server: PostgresServer
) -> None:
    url = postgres_server.create_database()
    await migrate(url)
    engine = open_engine(url)
    async with engine.begin() as connection:
        await connection.execute(text("ALTER TABLE usage_record ADD CONSTRAINT sane CHECK (duration_ms >= 0)"))
    records = varied(30)
    too_much = [record(prompt_tokens=2**62) for _ in range(2)]  # fine alone; their hour's sum is not
    shipper = await ship(journal, engine, [*records, too_much[0], record(duration_ms=-1), too_much[1]])
    assert await booked(engine) == in_order([*records, too_much[0]])
    assert await hourly(engine) == summed([*records, too_much[0]])
    assert shipper.results() == {"written": 31, "duplicate": 0, "rejected": 2}
    reasons = [msgspec.json.decode(line)["reason"] for line in (journal.directory / REJECTED).open("rb")]
    assert ["sane" in reason for reason in reasons] == [True, False]
    assert "out of range" in reasons[1]
    await engine.dispose()


async def test_a_stop_ships_what_is_there(journal: Journal, engine: AsyncEngine) -> None:
    """T058"""
    shipper = Shipper(journal, engine, batch_seconds=60)
    shipper.start()
    for _ in range(25):
        journal.finished(record())
    await shipper.stop(DEADLINE)
    assert len(await booked(engine)) == 25


async def test_many_ship_into_one_ledger(tmp_path: Path, engine: AsyncEngine, database: str) -> None:
    journals = [Journal(tmp_path / "shared", fsync_seconds=1, max_bytes=1 << 26) for _ in range(4)]
    engines = [open_engine(database) for _ in journals]
    records = varied(800)
    for number, each in enumerate(journals):
        each.start()
        for one in records[number::4]:
            each.finished(one)
    pairs = list(zip(journals, engines, strict=True))
    shippers = [Shipper(journal, own, batch_rows=20, batch_seconds=0.01) for journal, own in pairs]
    for shipper in shippers:
        shipper.start()
    await until(lambda: not any(shipper.backlog_rows for shipper in shippers))
    for shipper, (journal, own) in zip(shippers, pairs, strict=True):
        await shipper.stop(0)
        journal.stop()
        await own.dispose()
    assert await booked(engine) == in_order(records)
    assert await hourly(engine) == summed(records)


async def test_a_ledger_without_tables_is_waited_for(journal: Journal, database: str) -> None:
    engine = open_engine(database)
    journal.finished(record())
    async with shipping(journal, engine) as shipper:
        await until(lambda: shipper.failures > 1)
        assert "run `weir migrate`" in (shipper.failing or "")
        await migrate(database)
        await until(lambda: shipper.backlog_rows == 0)
        assert shipper.failing is None
    assert len(await booked(engine)) == 1
    await engine.dispose()


async def test_records_of_any_month_find_a_place(journal: Journal, engine: AsyncEngine) -> None:
    months = [
        NOON.replace(year=year, month=month, day=1, hour=0) for year in (2019, 2026, 2041) for month in (1, 3, 12)
    ]
    edges = [month + timedelta(microseconds=step) for month in months for step in (-1, 0)]
    records = [record(started_at=moment) for moment in edges]
    shipper = await ship(journal, engine, records)
    assert await booked(engine) == in_order(records)
    assert await hourly(engine) == summed(records)
    assert shipper.failures == 0


async def test_a_month_that_was_dropped_is_made_again(journal: Journal, postgres_server: PostgresServer) -> None:
    url = postgres_server.create_database()
    await migrate(url)
    engine = open_engine(url)
    async with shipping(journal, engine) as shipper:
        journal.finished(record())
        await until(lambda: shipper.backlog_rows == 0)
        async with engine.begin() as connection:
            await connection.execute(text("DROP TABLE usage_record_202603"))
        journal.finished(later := record())
        await until(lambda: shipper.backlog_rows == 0)
        assert shipper.results() == {"written": 2, "duplicate": 0, "rejected": 0}
    assert await booked(engine) == [later]
    await engine.dispose()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15, deadline=None)
@given(batches=st.lists(st.lists(st.integers(0, 11), max_size=8), max_size=6))
def test_any_order_of_sending_books_each_once(tmp_path: Path, batches: list[list[int]]) -> None:
    records = varied(12)

    async def send() -> None:
        url = f"sqlite+aiosqlite:///{tmp_path}/{uuid4()}.db"
        await migrate(url)
        engine = open_engine(url)
        new = 0
        for batch in filter(None, batches):
            async with engine.begin() as connection:
                new += await merge(connection, [records[number] for number in batch])
        sent = [records[number] for number in {number for batch in batches for number in batch}]
        assert new == len(sent)
        assert await booked(engine) == in_order(sent)
        assert await hourly(engine) == summed(sent)
        await engine.dispose()

    asyncio.run(send())


async def test_the_answer_to_a_commit_is_lost(journal: Journal, postgres_server: PostgresServer) -> None:
    """T062"""
    url = postgres_server.create_database()
    await migrate(url)
    direct, later = open_engine(url), varied(20)
    async with Cutter.before(url) as cutter:
        engine = open_engine(cutter.url)
        async with shipping(journal, engine) as shipper:
            journal.finished(first := record())  # so that its month and the connection are there
            await until(lambda: shipper.backlog_rows == 0)
            for batch in (later[:10], later[10:]):
                cutter.cuts = 1
                for each in batch:
                    journal.finished(each)
                await until(lambda: shipper.backlog_rows == 0)
        await engine.dispose()
    assert (cutter.cuts, shipper.failures) == (0, 2)
    assert shipper.results() == {"written": 1, "duplicate": 20, "rejected": 0}
    assert await booked(direct) == in_order([first, *later])
    assert await hourly(direct) == summed([first, *later])
    await direct.dispose()


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_a_database_that_goes_and_comes_back_has_everything_once(journal: Journal, end: str) -> None:
    """T060: under load, and nobody who finishes a request waits for it."""
    with PostgresServer() as server:
        url = server.create_database()
        await migrate(url)
        engine = open_engine(url)
        records = varied(600)
        async with shipping(journal, engine, batch_rows=50) as shipper:
            loop = asyncio.get_running_loop()
            for number, each in enumerate(records):
                journal.finished(each)
                await asyncio.sleep(0)
                if number == 300:
                    await loop.run_in_executor(None, getattr(server, end))
                if number == 400:
                    await until(lambda: bool(shipper.failing))
            assert shipper.failures > 0
            assert shipper.lag_seconds > 0
            assert shipper.backlog_rows >= 200
            assert "failing" in repr(shipper)
            await loop.run_in_executor(None, server.start)
            await until(lambda: shipper.backlog_rows == 0)
            assert shipper.failing is None
        assert await booked(engine) == in_order(records)
        assert await hourly(engine) == summed(records)
        await engine.dispose()


async def test_a_database_that_hangs_holds_up_no_stop(journal: Journal) -> None:
    with PostgresServer() as server:
        url = server.create_database()
        await migrate(url)
        engine = open_engine(url)
        await ship(journal, engine, [record()])
        server.pause()
        journal.finished(record())
        shipper = Shipper(journal, engine, batch_seconds=0.01)
        shipper.start()
        async with asyncio.timeout(DEADLINE):
            await shipper.stop(0.2)
        assert journal.backlog_rows == 1
        server.resume()
        await ship(journal, engine, [])
        assert len(await booked(engine)) == 2
        await engine.dispose()
