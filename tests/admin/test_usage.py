from __future__ import annotations

import csv
import io
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from meter.ledger.schema import USAGE_SUMS, usage_hourly, usage_record
from tests.admin.person import Person

HOUR = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)


def record(number: int, **fields: Any) -> dict[str, Any]:
    row = dict.fromkeys(usage_record.c.keys())
    row |= dict.fromkeys(USAGE_SUMS, 0)
    row |= {"exchange_id": UUID(int=number), "request_id": UUID(int=number), "attempt": 1, "key_id": "abcd"}
    row |= {"tags": {}, "endpoint": "/v1/completions", "model_requested": "assistant", "model_served": "real"}
    row |= {"backend": "gpu", "route": "primary", "verdict": "base", "streamed": False, "usage_source": "engine"}
    row |= {"expected_tokens": 1, "ceiling_tokens": 1, "ending": "completed", "started_at": HOUR, "duration_ms": 5}
    return {**row, **fields}


@pytest.fixture
async def three_records(engine: AsyncEngine) -> None:
    rows = [
        record(1, prompt_tokens=10, completion_tokens=5, cost_nanousd=1_500, tags={"feature": "=cmd()"}),
        record(2, prompt_tokens=20, completion_tokens=1, cost_nanousd=500, team_id="search"),
        record(3, key_id="other", prompt_tokens=1),
    ]
    async with engine.begin() as connection:
        await connection.execute(insert(usage_record), rows)
        for row in rows:
            sums = {name: row[name] for name in USAGE_SUMS} | {"requests": 1, "unpriced": row["cost_nanousd"] is None}
            names = {
                "hour": HOUR,
                "team_id": row["team_id"] or "",
                "model": "assistant",
                "cost_nanousd": row["cost_nanousd"] or 0,
            }
            same = {name: row[name] for name in ("key_id", "backend", "route")}
            await connection.execute(insert(usage_hourly).values(**names, **same, **sums))


async def test_usage_is_grouped_and_paged(admin: Person, three_records: None) -> None:
    page = (await admin.get("/usage?group_by=key&page_size=1")).json
    assert page.keys() == {"from", "to", "rows", "next"}
    (row,) = page["rows"]
    assert (row["key"], row["requests"], row["total_tokens"], row["cost_usd"]) == ("abcd", 2, 36, "0.000002")
    rest = (await admin.get(f"/usage?group_by=key&page_size=1&cursor={page['next']}")).json
    assert ([row["key"] for row in rest["rows"]], rest["next"]) == (["other"], None)
    by_team = (await admin.get("/usage?group_by=team,model&bucket=day")).json["rows"]
    assert sorted((row["team"] or "", row["requests"]) for row in by_team) == [("", 2), ("search", 1)]


async def test_usage_as_csv_is_whole_whatever_the_page_and_runs_nothing_in_a_spreadsheet(
    admin: Person, three_records: None
) -> None:
    answer = await admin.get("/usage?group_by=tag:feature&group_by=key&format=csv&page_size=1")
    assert answer.headers["Content-Type"] == "text/csv; charset=utf-8"
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert sorted((row["tag:feature"], row["key"], row["requests"]) for row in rows) == [
        ("", "abcd", "1"),
        ("", "other", "1"),
        ("'=cmd()", "abcd", "1"),
    ]


async def test_head_is_get_without_a_body(admin: Person, three_records: None) -> None:
    for path in ("/usage?format=csv&group_by=key", "/usage", "/keys", "/tiers/standard"):
        answer = await admin.ask("HEAD", path)
        assert (answer.status, answer.text) == (200, "")
        assert answer.headers["Content-Type"] == (await admin.get(path)).headers["Content-Type"]


async def test_records_are_chosen_and_paged(admin: Person, three_records: None) -> None:
    page = (await admin.get("/usage/records?key=abcd&page_size=1")).json
    rest = (await admin.get(f"/usage/records?key=abcd&page_size=1&cursor={page['next']}")).json
    found = [*page["items"], *rest["items"]]
    assert sorted(item["total_tokens"] for item in found) == [15, 21]
    assert rest["next"] is None
    assert (await admin.get(f"/usage/records?request_id={UUID(int=3)}")).json["items"][0]["cost_usd"] is None
    assert (await admin.get("/usage/records?to=2020-01-01")).json["items"] == []


async def test_a_deleted_keys_records_stay(admin: Person, engine: AsyncEngine) -> None:
    """T107"""
    made = await admin.make_key()
    async with engine.begin() as connection:
        await connection.execute(insert(usage_record), [record(9, key_id=made["id"])])
    assert (await admin.ask("DELETE", f"/keys/{made['id']}", If_Match="*")).status == 204
    assert len((await admin.get(f"/usage/records?key={made['id']}")).json["items"]) == 1
