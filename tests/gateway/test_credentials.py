"""What a head says before anything is believed."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from meter.callers.caller import UnknownKey
from meter.gateway import credentials
from meter.gateway.replies import Reply


def head(*fields: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(fields))


@pytest.mark.parametrize(
    "fields",
    [
        [("Authorization", "Bearer wk-a-b")],
        [("authorization", "bearer wk-a-b")],
        [("AUTHORIZATION", "BEARER   wk-a-b")],
        [("x-api-key", "wk-a-b")],
        [("api-key", "wk-a-b"), ("Authorization", "Bearer wk-a-b")],
    ],
)
def test_one_key_is_found_wherever_it_stands(fields: list[tuple[str, str]]) -> None:
    assert credentials.presented(head(*fields)) == "wk-a-b"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ([], "missing"),
        ([("Authorization", "")], "missing"),
        ([("Authorization", "Bearer")], "missing"),
        ([("Authorization", "Basic eDp5")], "missing"),
        ([("Authorization", "Bearer a"), ("Authorization", "Bearer b")], "ambiguous"),
        ([("Authorization", "Bearer a"), ("x-api-key", "b")], "ambiguous"),
        ([("Authorization", "Basic eDp5"), ("x-api-key", "b")], "ambiguous"),
    ],
)
def test_none_or_two_different_ones_open_nothing(fields: list[tuple[str, str]], reason: str) -> None:
    with pytest.raises(UnknownKey) as refusal:
        credentials.presented(head(*fields))
    assert refusal.value.reason == reason


def test_tags_of_the_request_stand_over_those_of_the_key() -> None:
    fields = head(("x-weir-tags", "feature=chat, team = b"))
    assert credentials.tags(fields, {"team": "a", "cost": "1"}) == {"team": "b", "cost": "1", "feature": "chat"}


@pytest.mark.parametrize("value", ["a", "=b", ",".join(f"t{i}=1" for i in range(9)), "a=" + "x" * 65, "n" * 65 + "=x"])
def test_wrong_tags_are_refused_with_their_name(value: str) -> None:
    with pytest.raises(Reply) as refusal:
        credentials.tags(head(("x-weir-tags", value)), {})
    assert (refusal.value.status, refusal.value.param) == (400, "x-weir-tags")


@pytest.mark.parametrize(("value", "strict"), [(None, False), ("reject", True), ("REJECT", True), ("overflow", False)])
def test_a_request_may_only_be_stricter(value: str | None, strict: bool) -> None:
    fields = [] if value is None else [("x-weir-on-overage", value)]
    assert credentials.refuses_overage(head(*fields)) is strict


def test_an_unknown_wish_about_overage_is_refused() -> None:
    with pytest.raises(Reply):
        credentials.refuses_overage(head(("x-weir-on-overage", "maybe")))


@pytest.mark.parametrize(("value", "kept"), [("abc-1", True), ("x" * 129, False), ("a b", False), ("", False)])
def test_a_client_request_id_is_kept_if_short_and_printable(value: str, kept: bool) -> None:
    assert credentials.client_request_id(head(("x-request-id", value))) == (value if kept else None)
