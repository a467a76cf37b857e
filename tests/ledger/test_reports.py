"""What finance asks, on SQLite and on Postgres."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta, timezone
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import delete, text
from sqlalchemy.ext.asyncio import AsyncEngine

from meter.ledger.database import DatabaseUnavailable, migrate, open_engine
from meter.ledger.merge import merge
from meter.ledger.partitions import ensure_partitions
from meter.ledger.record import UsageRecord
from meter.ledger.reports import BadQuery, Page, usage_records, usage_report
from meter.ledger.schema import usage_hourly
from tests.ledger.samples import NOON, record

DAY = timedelta(days=1)
START = datetime(2026, 3, 1, tzinfo=UTC)
END = datetime(2026, 4, 1, tzinfo=UTC)


def month_of_records() -> list[UsageRecord]:
    dice = random.Random(7)
    return [
        record(
            key_id=dice.choice(["key1", "key2", "key3"]),
            team_id=dice.choice([None, "search", "ads"]),
            model_requested=dice.choice(["assistant", "coder"]),
            backend=dice.choice(["gpu", "cheap"]),
            route=dice.choice(["primary", "overflow"]),
            tags=dice.choice([{}, {"feature": "chat"}, {"feature": "ü b:c", "other": "x"}]),
            started_at=START + timedelta(seconds=dice.uniform(0, 31 * 86_400)),
            prompt_tokens=dice.randrange(1_000),
            cached_prompt_tokens=dice.randrange(100),
            completion_tokens=dice.randrange(1_000),
            reasoning_tokens=dice.randrange(10),
            cost_nanousd=dice.choice([None, dice.randrange(10**9)]),
        )
        for _ in range(200)
    ]


RECORDS = month_of_records()


async def book(engine: AsyncEngine, records: list[UsageRecord]) -> None:
    async with engine.begin() as connection:
        for month in {each.started_at.date().replace(day=1) for each in records}:
            await ensure_partitions(connection, month)
        await merge(connection, records)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def books_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database with RECORDS in it, for tests that only read."""
    url: str = (
        f"sqlite+aiosqlite:///{tmp_path_factory.mktemp('books')}/ledger.db"
        if request.param == "sqlite"
        else request.getfixturevalue("postgres_server").create_database()
    )

    async def fill() -> None:
        await migrate(url)
        engine = open_engine(url)
        await book(engine, RECORDS)
        await engine.dispose()

    asyncio.run(fill())
    return url


@pytest.fixture
async def books(books_url: str) -> AsyncIterator[AsyncEngine]:
    engine = open_engine(books_url)
    yield engine
    await engine.dispose()


async def pages(engine: AsyncEngine, size: int, **question: Any) -> list[dict[str, Any]]:
    """All rows, a page at a time."""
    rows: list[dict[str, Any]] = []
    cursor = None
    while True:
        page = await usage_report(engine, **question, cursor=cursor, page_size=size)
        rows += page.rows
        if (cursor := page.next) is None:
            return rows
        assert len(page.rows) == size


def value(each: UsageRecord, group: str) -> str | None:
    if group.startswith("tag:"):
        return each.tags.get(group[4:])
    name = {"key": "key_id", "team": "team_id", "model": "model_requested"}.get(group, group)
    found: str | None = getattr(each, name)
    return found


def beginning(each: UsageRecord, bucket: str | None) -> str | None:
    formats = {"hour": "%Y-%m-%dT%H:00:00Z", "day": "%Y-%m-%dT00:00:00Z", "month": "%Y-%m-01T00:00:00Z"}
    return each.started_at.strftime(formats[bucket]) if bucket else None


def expected(start: datetime, end: datetime, groups: tuple[str, ...], bucket: str | None) -> dict[Any, tuple[Any, ...]]:
    """The same report, added up here."""
    sums: dict[Any, tuple[Any, ...]] = {}
    for each in RECORDS:
        if start <= each.started_at < end:
            key = (beginning(each, bucket), *(value(each, group) for group in groups))
            figures = (
                *(1, each.prompt_tokens, each.cached_prompt_tokens, each.completion_tokens, each.reasoning_tokens),
                *(each.total_tokens, Fraction(each.cost_nanousd or 0, 10**9), int(each.cost_nanousd is None)),
            )
            sums[key] = tuple(a + b for a, b in zip(sums.get(key, (0,) * 8), figures, strict=True))
    return sums


def as_sums(rows: list[dict[str, Any]], groups: tuple[str, ...]) -> dict[Any, tuple[Any, ...]]:
    figures = (
        "requests",
        "prompt_tokens",
        "cached_prompt_tokens",
        "completion_tokens",
        "reasoning_tokens",
        "total_tokens",
    )
    return {
        (row.get("bucket"), *(row[group] for group in groups)): (
            *(row[name] for name in figures),
            Fraction(row["cost_usd"]),
            row["unpriced_requests"],
        )
        for row in rows
    }


HALF_HOUR = timedelta(minutes=30)


@pytest.mark.parametrize("bounds", [(START, END), (START + DAY, START + 3 * DAY), (START + HALF_HOUR, END - HALF_HOUR)])
@pytest.mark.parametrize(
    ("groups", "bucket"),
    [
        ((), "day"),
        ((), "month"),
        (("key",), None),
        (("team", "model"), None),
        (("key", "team", "model", "backend", "route"), "hour"),
        (("tag:feature",), None),
        (("tag:feature", "tag:nobody's", "team"), "day"),
    ],
)
async def test_a_report_is_the_sum_of_its_records(
    books: AsyncEngine, bounds: tuple[datetime, datetime], groups: tuple[str, ...], bucket: str | None
) -> None:
    start, end = bounds
    rows = await pages(books, 7, start=start, end=end, group_by=groups, bucket=bucket)
    sums = as_sums(rows, groups)
    assert sums == expected(start, end, groups, bucket)
    assert len(rows) == len(sums)


async def test_without_groups_there_is_one_row_of_sums(books: AsyncEngine) -> None:
    [row] = (await usage_report(books, start=START, end=END)).rows
    assert as_sums([row], ()) == expected(START, END, (), None)
    assert set(row) == {
        *("requests", "prompt_tokens", "cached_prompt_tokens", "completion_tokens", "reasoning_tokens"),
        *("total_tokens", "cost_usd", "unpriced_requests"),
    }
    [none] = (await usage_report(books, start=START, end=START)).rows
    assert (none["requests"], none["total_tokens"], none["cost_usd"]) == (0, 0, "0")


async def test_whole_hours_come_from_the_roll_up_and_parts_of_them_from_the_records(engine: AsyncEngine) -> None:
    await book(engine, [record()])
    async with engine.begin() as connection:
        await connection.execute(delete(usage_hourly))
    [rolled] = (await usage_report(engine, start=START, end=END)).rows
    [counted] = (await usage_report(engine, start=START, end=END + timedelta(microseconds=1))).rows
    assert (rolled["requests"], counted["requests"]) == (0, 1)


@pytest.fixture(params=["Asia/Kolkata", "America/Los_Angeles"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The machine is in this time zone."""
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


async def test_days_are_utc_days_wherever_the_machine_is(zone: str, engine: AsyncEngine) -> None:
    """T065"""
    if engine.dialect.name == "postgresql":
        async with engine.begin() as connection:
            name = await connection.scalar(text("SELECT current_database()"))
            await connection.execute(text(f"ALTER DATABASE {name} SET timezone = '{zone}'"))
        await engine.dispose()
    midnights = [START + number * DAY for number in range(4)]
    instants = [midnight + timedelta(microseconds=step) for midnight in midnights for step in (-1, 0, 1)]
    await book(engine, [record(started_at=instant) for instant in instants])
    by_day = (await usage_report(engine, start=START - DAY, end=START + 4 * DAY, bucket="day")).rows
    assert [(row["bucket"][:10], row["requests"]) for row in by_day] == [
        ("2026-02-28", 1),
        ("2026-03-01", 3),
        ("2026-03-02", 3),
        ("2026-03-03", 3),
        ("2026-03-04", 2),
    ]
    single = [(await usage_report(engine, start=a, end=b)).rows[0]["requests"] for a, b in pairwise(midnights)]
    assert single == [3, 3, 3]
    [whole] = (await usage_report(engine, start=midnights[0], end=midnights[-1])).rows
    assert whole["requests"] == sum(single)


async def test_an_offset_in_the_bounds_is_honoured(engine: AsyncEngine) -> None:
    kolkata = timezone(timedelta(hours=5, minutes=30))
    midnight = datetime(2026, 3, 14, tzinfo=kolkata)
    await book(engine, [record(started_at=midnight + step) for step in (-timedelta(microseconds=1), timedelta(0), DAY)])
    [row] = (await usage_report(engine, start=midnight, end=midnight + DAY)).rows
    assert row["requests"] == 1


@pytest.mark.parametrize(
    ("field", "question"),
    [
        ("from", {"start": datetime(2026, 1, 1)}),  # noqa: DTZ001
        ("to", {"end": datetime(2026, 1, 1)}),  # noqa: DTZ001
        ("to", {"end": START - DAY}),
        ("group_by", {"group_by": ["caller"]}),
        ("group_by", {"group_by": ["tag:"]}),
        ("group_by", {"group_by": ['tag:"']}),
        ("group_by", {"group_by": ["key", "key"]}),
        ("bucket", {"bucket": "week"}),
        ("cursor", {"bucket": "day", "cursor": "no cursor"}),
        ("cursor", {"bucket": "day", "cursor": "ö"}),
        ("cursor", {"bucket": "day", "cursor": "WyJhIiwiYiJd"}),
        ("cursor", {"bucket": "day", "cursor": "WyJcdTAwMDAiXQ"}),
    ],
)
async def test_a_question_that_makes_no_sense_names_its_field(
    books: AsyncEngine, field: str, question: dict[str, Any]
) -> None:
    with pytest.raises(BadQuery) as caught:
        await usage_report(books, **({"start": START, "end": END} | question))
    assert caught.value.field == field


async def record_pages(engine: AsyncEngine, size: int, **question: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    page = Page([], None)
    while True:
        page = await usage_records(engine, **question, cursor=page.next, page_size=size)
        rows += page.rows
        if page.next is None:
            return rows


async def test_records_come_newest_first_in_pages(books: AsyncEngine) -> None:
    rows = await record_pages(books, 33)
    newest_first = sorted(RECORDS, key=lambda each: (each.started_at, each.exchange_id), reverse=True)
    assert [row["exchange_id"] for row in rows] == [str(each.exchange_id) for each in newest_first]


async def test_records_of_one_moment_are_not_lost_between_pages(engine: AsyncEngine) -> None:
    await book(engine, [record() for _ in range(10)])
    rows = await record_pages(engine, 3)
    assert len({row["exchange_id"] for row in rows}) == len(rows) == 10


async def test_a_record_is_shown_as_json_has_it(engine: AsyncEngine) -> None:
    shown = record(tags={"a": "b"}, cost_nanousd=1_500_000, started_at=NOON.replace(microsecond=5))
    await book(engine, [shown])
    [row] = (await usage_records(engine)).rows
    assert set(row) == {*UsageRecord.__struct_fields__, "total_tokens", "cost_usd"}
    assert row["exchange_id"] == str(shown.exchange_id)
    assert row["started_at"] == "2026-03-14T12:00:00.000005Z"
    assert (row["tags"], row["total_tokens"], row["cost_usd"], row["team_id"]) == ({"a": "b"}, 13, "0.0015", None)


@pytest.mark.parametrize(
    ("filters", "chosen"),
    [
        ({"key": "key1"}, lambda each: each.key_id == "key1"),
        ({"team": "ads", "model": "coder"}, lambda each: (each.team_id, each.model_requested) == ("ads", "coder")),
        ({"backend": "cheap", "route": "overflow"}, lambda each: (each.backend, each.route) == ("cheap", "overflow")),
        ({"request_id": str(RECORDS[5].request_id)}, lambda each: each.request_id == RECORDS[5].request_id),
        ({"ending": "crashed"}, lambda each: False),
        ({"key": "ke\0y1"}, lambda each: each.key_id == "key1"),
    ],
)
async def test_records_are_chosen_by_filters_and_bounds(
    books: AsyncEngine, filters: dict[str, str], chosen: Any
) -> None:
    start, end = RECORDS[0].started_at, RECORDS[0].started_at + 10 * DAY
    rows = await record_pages(books, 1_000, start=start, end=end, filters=filters)
    within = [each for each in RECORDS if chosen(each) and start <= each.started_at < end]
    assert {row["exchange_id"] for row in rows} == {str(each.exchange_id) for each in within}


@pytest.mark.parametrize(
    ("field", "question"),
    [
        ("colour", {"filters": {"colour": "red"}}),
        ("request_id", {"filters": {"request_id": "7"}}),
        ("cursor", {"cursor": "WyJhIiwiYiJd"}),
        ("from", {"start": datetime(2026, 1, 1)}),  # noqa: DTZ001
    ],
)
async def test_a_question_about_records_that_makes_no_sense_names_its_field(
    books: AsyncEngine, field: str, question: dict[str, Any]
) -> None:
    with pytest.raises(BadQuery) as caught:
        await usage_records(books, **question)
    assert caught.value.field == field


async def test_a_report_without_database_is_said_plainly() -> None:
    engine = open_engine("postgresql+asyncpg://me@127.0.0.1:1/db")
    with pytest.raises(DatabaseUnavailable, match="cannot be used"):
        await usage_report(engine, start=START, end=END)
    await engine.dispose()
