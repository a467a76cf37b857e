"""Cursors that no page gave: whoever makes one up is told that it is none, on every list."""

from __future__ import annotations

import base64
import json
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.admin.person import Person

LISTS = {
    "/keys": "keys",
    "/tiers": "tier",
    "/teams": "team",
    "/prices": "prices",
    "/audit": "audit",
    "/refusals": "refusals",
    "/usage/records": None,
    "/usage?group_by=key": None,
    "/usage?group_by=key,tag:a&bucket=hour": None,
    "/usage?format=csv&bucket=day": None,
}
"""Paths, and the name that the cursors of each begin with, if they have one."""
TIMES = (
    "2026-01-01T00:00:00",
    "2026-01-01",
    "0001-01-01T00:00:00+14:00",
    "9999-12-31T23:59:59-23:59",
    "2026-01-01T00:00:00Z",
    "20260101T000000,5+0000",
    "",
    "soon",
)
NUMBERS = (0, 1, -1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**400)
PARTS = (
    st.sampled_from((*TIMES, *NUMBERS, str(uuid4()), "a\0b", "😀"))
    | st.text(max_size=8)
    | st.none()
    | st.booleans()
    | st.floats(allow_nan=False)
    | st.just([1])
    | st.just({"a": 1})
)


def cursor(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def at(path: str, text: str) -> str:
    return f"{path}{'&' if '?' in path else '?'}cursor={quote(text)}"


@pytest.mark.parametrize("moment", TIMES)
async def test_a_moment_of_ones_own_in_a_cursor_is_never_an_error_of_the_server(admin: Person, moment: str) -> None:
    for path, parts in (
        ("/keys", ["keys", moment, "x"]),
        ("/refusals", ["refusals", moment, "key", "cap", 0]),
        ("/usage/records", [moment, str(uuid4())]),
    ):
        answer = await admin.get(at(path, cursor(parts)))
        proper = moment in {"2026-01-01T00:00:00Z", "20260101T000000,5+0000"}
        assert answer.status in ({200} if proper else {400, 422}), (path, answer.text)


async def test_a_cursor_of_another_list_is_refused(admin: Person) -> None:
    for path, name in LISTS.items():
        for other in set(LISTS.values()) - {name, None}:
            answer = await admin.get(at(path, cursor([other, 1])))
            assert answer.status in {400, 422}, (path, other, answer.text)
            assert answer.error["param"] == "cursor"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(parts=st.lists(PARTS, max_size=5), named=st.booleans())
async def test_whatever_a_cursor_holds_the_answer_is_a_page_or_a_refusal(
    admin: Person, parts: list[Any], named: bool
) -> None:
    for path, name in LISTS.items():
        answer = await admin.get(at(path, cursor([name, *parts] if named and name else parts)))
        assert answer.status in {200, 400, 422}, (path, answer.text)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(
    text=st.text(min_size=1, max_size=20)
    | st.binary(min_size=1, max_size=20).map(lambda raw: base64.urlsafe_b64encode(raw).decode())
)
async def test_text_that_is_no_cursor_is_refused(admin: Person, text: str) -> None:
    for path in LISTS:
        answer = await admin.get(at(path, text))
        assert answer.status in {400, 422}, (path, answer.text)
