from __future__ import annotations

from base64 import urlsafe_b64encode
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from meter.ledger.refusals import RefusalCounts
from tests.admin.person import Person

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)
COUNTED = [
    (0, "alice", "rate", False, 3),
    (0, "alice", "rate", True, 1),
    (1, "bob", "cap", False, 2),
    (2, "alice", "parallel", False, 1),
]


@pytest.fixture
async def counted(engine: AsyncEngine) -> None:
    moment = NOON
    counts = RefusalCounts(engine, lambda: moment)
    for minute, key, rule, shadow, times in COUNTED:
        moment = NOON + timedelta(minutes=minute)
        for _ in range(times):
            counts.add(key, rule, shadow=shadow)
    await counts.flush()


def item(minute: int, key: str, rule: str, shadow: bool, times: int) -> dict[str, Any]:
    return {"minute": f"2030-01-31T12:0{minute}:00Z", "key_id": key, "rule": rule, "shadow": shadow, "refusals": times}


NEWEST_FIRST = [item(*row) for row in sorted(COUNTED, reverse=True)]


async def test_refusals_are_counts_by_minute_key_and_rule(admin: Person, counted: None) -> None:
    assert (await admin.get("/refusals")).json == {"items": NEWEST_FIRST, "next": None}


async def test_refusals_come_in_pages(admin: Person, counted: None) -> None:
    found, cursor = [], ""
    while True:
        page = (await admin.get(f"/refusals?page_size=1{cursor}")).json
        found += page["items"]
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert found == NEWEST_FIRST


@pytest.mark.parametrize(
    ("query", "minutes"),
    [
        ("key=alice", [2, 0, 0]),
        ("rule=cap", [1]),
        ("shadow=true", [0]),
        ("shadow=false&key=alice", [2, 0]),
        ("from=2030-01-31T12:01:00Z", [2, 1]),
        ("to=2030-01-31T13:01:00+01:00", [0, 0]),
        ("from=2030-01-31&to=2030-02-01", [2, 1, 0, 0]),
        ("from=2030-02-01", []),
    ],
)
async def test_refusals_are_chosen_by_what_they_are(
    admin: Person, counted: None, query: str, minutes: list[int]
) -> None:
    items = (await admin.get(f"/refusals?{query}")).json["items"]
    assert [int(each["minute"][14:16]) for each in items] == minutes


async def test_refusals_are_asked_in_words_that_make_sense(admin: Person) -> None:
    for query, field in (
        ("from=yesterday", "from"),
        ("to=2026-01-01T00:00:00", "to"),
        ("from=2026-02-01&to=2026-01-01", "to"),
        ("key=%00", "key"),
        ("shadow=perhaps", "shadow"),
        ("page_size=0", "page_size"),
        ("group_by=key", "group_by"),
    ):
        answer = await admin.get(f"/refusals?{query}")
        assert (answer.status, answer.fields) == (422, [field]), query


def cursor(*place: object) -> str:
    return urlsafe_b64encode(msgspec.json.encode(["refusals", *place])).decode().rstrip("=")


@pytest.mark.parametrize(
    "forged",
    [
        "x",
        cursor(),
        cursor("2030-01-31T12:00:00Z", "alice", "rate"),
        cursor("2030-01-31T12:00:00", "alice", "rate", 0),
        cursor("0001-01-01T00:00:00+23:00", "alice", "rate", 0),
        cursor("noon", "alice", "rate", 0),
        cursor("2030-01-31T12:00:00Z", "\0", "rate", 0),
        cursor("2030-01-31T12:00:00Z", 1, "rate", 0),
    ],
)
async def test_a_cursor_that_is_not_of_this_list_is_400(admin: Person, forged: str) -> None:
    answer = await admin.get(f"/refusals?cursor={forged}")
    assert (answer.status, answer.error["code"]) == (400, "invalid_cursor")


async def test_operators_and_finance_may_read_refusals(operator: Person, finance: Person, counted: None) -> None:
    for person in (operator, finance):
        assert (await person.get("/refusals")).json["items"] == NEWEST_FIRST


async def test_shadow_limits_that_make_no_sense_are_refused_with_every_mistake(admin: Person) -> None:
    rate, none, small = {"tokens": 10, "seconds": 60}, {"tokens": 0, "seconds": 5}, {"tokens": 9, "seconds": 3600}
    shadow = {"rate": rate, "burst": none, "cap": small}
    made = await admin.ask("PUT", "/tiers/tried", {"shadow": shadow, "cap": small}, If_None_Match="*")
    assert (made.status, made.fields) == (422, ["cap.tokens", "shadow.burst.tokens", "shadow.cap.tokens"])
    key = await admin.make_key()
    quota = f"/keys/{key['id']}/quota"
    refused = await admin.ask("PUT", quota, {"shadow": shadow}, If_Match="*")
    assert (refused.status, refused.fields) == (422, ["shadow.burst.tokens", "shadow.cap.tokens"])
    assert (await admin.ask("PUT", quota, {"shadow": {"cap": small}}, If_Match="*")).status == 200
    in_force = (await admin.get(quota)).json["effective"]["shadow"]
    assert in_force == {"rate": None, "burst": None, "cap": small}
