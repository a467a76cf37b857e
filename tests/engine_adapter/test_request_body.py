"""What is sent on of a body: every value as it came, but for the fields that docs/callers.md names."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.request import DROPPED, Call, parse
from tests.engine_adapter.calls import call, json_values

untimed = settings(deadline=None)
"""What a property takes depends on the machine: the run's own time limit is enough."""

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "m1", "messages": MESSAGES, "max_tokens": 16}

BODIES: dict[Any, dict[str, Any]] = {
    "chat": {"messages": MESSAGES},
    "completions": {"prompt": "hi"},
    "embeddings": {"input": "hi"},
    "responses": {"input": "hi"},
    "messages": {"messages": MESSAGES, "max_tokens": 5000},
    "rerank": {"query": "hi", "documents": ["a", "b"]},
    "score": {"text_1": "hi", "text_2": ["a", "b"]},
}


def chat(**members: Any) -> Call:
    return parse("chat", json.dumps({**CHAT, **members}).encode())


def raw_chat(members: str) -> bytes:
    return b'{"model":"m1","messages":[{"role":"user","content":"hi"}],' + members.encode() + b"}"


def sent(call: Call, **changed: Any) -> Any:
    return json.loads(call.body(**{"model": "m1", "output_limit": None, "kind": "vllm", **changed}))


def test_values_are_sent_on_byte_for_byte_in_their_order() -> None:
    """T120."""
    members = '"seed": 12345678901234567890,"temperature":1.0, "top_p":0.1,"x":1e2,"y":"\\u00e9\\/","z":"é","a" : { "b":[ 1 ] }'
    body = parse("chat", raw_chat(members)).body(model="m2", output_limit=None, kind="vllm")
    expected = (
        '{"model":"m2","messages":[{"role":"user","content":"hi"}],"seed":12345678901234567890,"temperature":1.0,'
    )
    expected += '"top_p":0.1,"x":1e2,"y":"\\u00e9\\/","z":"é","a":{ "b":[ 1 ] }}'
    assert body.decode() == expected


def test_of_doubled_keys_the_last_wins_and_is_sent_once() -> None:
    raw = b'{"model":"m0","max_tokens":1,"messages":[{}],"model":"m1","max_tokens":5,"x":1,"x":2}'
    call = parse("chat", raw)
    assert (call.model, call.asked_output) == ("m1", 5)
    assert call.body(model="m1", output_limit=5, kind="vllm") == b'{"model":"m1","max_tokens":5,"messages":[{}],"x":2}'


@pytest.mark.parametrize(
    ("endpoint", "limits", "expected"),
    [
        ("chat", {}, {"max_tokens": 7}),
        ("chat", {"max_tokens": None}, {"max_tokens": 7}),
        ("chat", {"max_tokens": 100}, {"max_tokens": 7}),
        ("chat", {"max_completion_tokens": 100}, {"max_completion_tokens": 7}),
        ("chat", {"max_tokens": 3, "max_completion_tokens": 100}, {"max_tokens": 7, "max_completion_tokens": 7}),
        ("completions", {}, {"max_tokens": 7}),
        ("completions", {"max_completion_tokens": 100}, {"max_completion_tokens": 7, "max_tokens": 7}),
    ],
)
def test_the_output_limit_is_in_every_limit_that_was_sent(endpoint: Any, limits: Any, expected: Any) -> None:
    body = {"model": "m1", "messages": MESSAGES, "prompt": "x", **limits}
    out = sent(parse(endpoint, json.dumps(body).encode()), output_limit=7)
    assert out == {"model": "m1", "messages": MESSAGES, "prompt": "x", **expected}


RUNNING = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize(
    ("options", "kind", "expected"),
    [
        (None, "vllm", RUNNING),
        ({}, "vllm", RUNNING),
        (
            {"include_usage": None, "x_extra": 1},
            "vllm",
            {"include_usage": True, "x_extra": 1, "continuous_usage_stats": True},
        ),
        ({"include_usage": False}, "openai", {"include_usage": True}),
        ({"continuous_usage_stats": False}, "openai", {"continuous_usage_stats": False, "include_usage": True}),
    ],
)
def test_a_stream_is_always_asked_for_usage(options: Any, kind: Any, expected: Any) -> None:
    """T001, T002."""
    assert sent(chat(stream=True, stream_options=options), kind=kind)["stream_options"] == expected
    assert sent(chat(stream=True), kind=kind)["stream_options"]["include_usage"] is True


def test_stream_options_that_ask_already_are_left_as_they_are() -> None:
    options = b'{ "include_usage" : true,"x": 1e0, "continuous_usage_stats":true }'
    body = parse("chat", raw_chat('"stream":true,"stream_options":' + options.decode())).body(
        model="m1", output_limit=None, kind="vllm"
    )
    assert options in body


def test_a_plain_call_keeps_its_stream_options() -> None:
    assert sent(chat(stream_options={"include_usage": False}))["stream_options"] == {"include_usage": False}
    assert "stream_options" not in sent(chat(stream=None))


def test_fields_that_reach_past_the_own_request_are_dropped() -> None:
    call = chat(priority=-5, request_id="r", cache_salt="s")
    assert sent(call) == {**CHAT, "cache_salt": "s"}


unread = st.dictionaries(st.text(min_size=1, max_size=8).map(lambda name: "x_" + name), json_values, max_size=6)


@untimed
@given(unread, st.booleans(), st.sampled_from([None, 1, 7]), st.sampled_from(["vllm", "openai"]), st.booleans())
def test_the_body_is_the_callers_but_for_the_documented_fields(
    members: dict[str, Any], stream: bool, limit: int | None, kind: Any, ascii_only: bool
) -> None:
    body = {"x_first": 1, **CHAT, **members, "stream": stream}
    out = sent(
        parse("chat", json.dumps(body, ensure_ascii=ascii_only).encode()), output_limit=limit, kind=kind, model="other"
    )
    asked = {"include_usage": True} | ({"continuous_usage_stats": True} if kind == "vllm" else {})
    expected = {**body, "model": "other", "max_tokens": limit or 16} | ({"stream_options": asked} if stream else {})
    assert out == expected
    assert list(out) == list(expected)


# ---- what running figures are asked for ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("live", "kind", "options", "ids"),
    [
        ("token_ids", "vllm", {"include_usage": True}, True),
        ("usage", "vllm", RUNNING, None),
        ("none", "vllm", {"include_usage": True}, None),
        ("nothing", "vllm", None, None),
        ("nothing", "openai", None, None),
        ("token_ids", "openai", {"include_usage": True}, None),
    ],
)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_stream_is_asked_for_the_running_figures_that_the_backend_has(
    endpoint: Any, live: Any, kind: Any, options: Any, ids: Any
) -> None:
    out = sent(call(endpoint, **BODIES[endpoint], stream=True), live=live, kind=kind)
    assert (out.get("stream_options"), out.get("return_token_ids")) == (options, ids)
    plain = sent(call(endpoint, **BODIES[endpoint]), live=live, kind=kind)
    assert not {"stream_options", "return_token_ids"} & plain.keys()


def test_token_ids_that_the_client_asked_for_are_left_as_they_are() -> None:
    for live in ("token_ids", "none"):
        asked = chat(stream=True, return_token_ids=True)
        assert (asked.wants_token_ids, sent(asked, live=live)["return_token_ids"]) == (True, True)
    assert chat(return_token_ids=True).wants_token_ids
    assert not chat(return_token_ids=None).wants_token_ids


@pytest.mark.parametrize("endpoint", ["responses", "messages"])
def test_streams_that_always_say_their_usage_are_not_asked_for_it(endpoint: Any) -> None:
    options = {"include_obfuscation": "of no concern here"}
    out = sent(call(endpoint, **BODIES[endpoint], stream=True, stream_options=options), live="token_ids")
    assert out["stream_options"] == options
    assert "return_token_ids" not in out


@pytest.mark.parametrize(
    ("endpoint", "fields", "choices", "answers"),
    [
        ("chat", {}, 1, 1),
        ("chat", {"n": 3}, 3, 3),
        ("completions", {"n": None, "best_of": 4}, 4, 1),
        ("completions", {"n": 2, "best_of": 4}, 4, 2),
        ("embeddings", {"n": 3}, 1, 1),
        ("messages", {"n": 3}, 1, 1),
    ],
)
def test_best_of_may_cost_more_answers_than_come_back(endpoint: Any, fields: Any, choices: int, answers: int) -> None:
    asked = call(endpoint, **BODIES[endpoint], **fields)
    assert (asked.choices, asked.answers) == (choices, answers)


# ---- limits, and what must stay below them ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "limits", "expected"),
    [
        ("responses", {}, {"max_output_tokens": 7}),
        ("responses", {"max_output_tokens": None}, {"max_output_tokens": 7}),
        ("responses", {"max_output_tokens": 100, "max_tokens": 50}, {"max_output_tokens": 7, "max_tokens": 50}),
        ("messages", {"max_tokens": 100}, {"max_tokens": 7}),
        ("embeddings", {"max_tokens": 100}, {"max_tokens": 100}),
        ("rerank", {}, {}),
        ("score", {}, {}),
    ],
)
def test_each_dialect_has_its_own_name_for_the_limit(endpoint: Any, limits: Any, expected: Any) -> None:
    out = sent(call(endpoint, **BODIES[endpoint] | limits), output_limit=7, kind="openai")
    assert out == {"model": "m1", **BODIES[endpoint], **expected}


@pytest.mark.parametrize(
    ("least", "asked", "limit", "expected"),
    [
        (500, None, 200, 200),
        (500, 1000, 200, 200),
        (100, 1000, 200, 100),
        (500, 200, 200, 500),
        (None, 1000, 200, None),
    ],
)
def test_the_least_output_is_lowered_with_the_limit(least: Any, asked: Any, limit: int, expected: Any) -> None:
    """vLLM refuses one above the limit; what the client itself asked for is its own affair."""
    assert sent(chat(min_tokens=least, max_tokens=asked), output_limit=limit)["min_tokens"] == expected


@pytest.mark.parametrize(
    ("budget", "limit", "expected"),
    [
        (4000, 2000, {"type": "enabled", "budget_tokens": 1999, "display": "omitted"}),
        (2000, 2000, {"type": "enabled", "budget_tokens": 1999, "display": "omitted"}),
        (1500, 2000, {"type": "enabled", "budget_tokens": 1500, "display": "omitted"}),
        (4000, 1025, {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}),
        (4000, 1024, {"type": "adaptive"}),
        (9000, 5000, {"type": "enabled", "budget_tokens": 9000, "display": "omitted"}),
    ],
)
def test_a_thinking_budget_is_lowered_with_the_limit(budget: int, limit: int, expected: Any) -> None:
    thinking = {"type": "enabled", "budget_tokens": budget, "display": "omitted"}
    out = sent(call("messages", **BODIES["messages"], thinking=thinking), output_limit=limit)
    assert out["thinking"] == expected


# ---- what is ours ----------------------------------------------------------------------------------------------------


def test_nothing_is_stored_at_vllm() -> None:
    for store in (True, False, None):
        asked = call("responses", input="hi", store=store)
        assert sent(asked)["store"] is False
        assert sent(asked, kind="openai")["store"] is store
    assert "store" not in sent(chat())


def test_the_tenants_salt_keeps_its_prefix_cache_apart() -> None:
    for endpoint, members in BODIES.items():
        asked = call(endpoint, **members)
        assert sent(asked, salt="tenant")["cache_salt"] == "tenant"
        assert "cache_salt" not in sent(asked)
        assert "cache_salt" not in sent(asked, salt="tenant", kind="openai")


def test_a_clients_salt_only_divides_its_tenants_cache() -> None:
    def salt(own: str | None, tenant: str | None = "tenant") -> Any:
        return sent(chat(cache_salt=own), salt=tenant)["cache_salt"]

    assert salt(None) == "tenant"
    assert salt("a", None) == "a"
    salts = [salt(own, tenant) for own in ("a", "b", "tenant") for tenant in ("tenant", "other")]
    assert len({*salts, "tenant", "other", "a", "b"}) == len(salts) + 4
    assert all(len(each) <= 128 and each.isalnum() for each in salts)
    assert salt("a") == salt("a")


def test_what_reaches_past_the_own_request_is_left_out() -> None:
    reaching = dict.fromkeys(DROPPED, 5)
    for endpoint, members in BODIES.items():
        for kind in ("vllm", "openai"):
            assert not set(DROPPED) & sent(call(endpoint, **members, **reaching), kind=kind).keys()


# ---- all of it together ----------------------------------------------------------------------------------------------

limits = st.sampled_from([None, 1, 7, 4999])
asked_for = st.fixed_dictionaries(
    {
        "endpoint": st.sampled_from(sorted(BODIES)),
        "members": unread,
        "limit": limits,
        "live": st.sampled_from(["token_ids", "usage", "none"]),
    }
)


@untimed
@given(asked_for, st.booleans(), st.sampled_from(["vllm", "openai"]), st.sampled_from([None, "tenant"]), st.booleans())
def test_what_was_sent_on_is_sent_on_again_as_it_is(
    asked: dict[str, Any], stream: bool, kind: Any, salt: str | None, ascii_only: bool
) -> None:
    """The body that goes on says the same as the call, and is itself a body that needs no change but a client's salt."""
    endpoint, members = asked["endpoint"], {"model": "m1", **BODIES[asked["endpoint"]], **asked["members"]}
    if stream and endpoint not in ("embeddings", "rerank", "score"):
        members["stream"] = True
    first = parse(endpoint, json.dumps(members, ensure_ascii=ascii_only).encode())
    how = {"model": "m2", "output_limit": asked["limit"], "kind": kind, "live": asked["live"]}
    body = first.body(**how, salt=salt)
    again = parse(endpoint, body)
    assert again.body(**how) == body
    for same in ("endpoint", "stream", "prompts", "choices"):
        assert getattr(again, same) == getattr(first, same)
    assert again.asked_output == (asked["limit"] or first.asked_output if first.generates else None)
    assert sizes(again) == sizes(first)
    ours = {"model", "stream_options", "return_token_ids", "store", "cache_salt", "max_tokens", "max_output_tokens"}
    assert again.members.keys() - first.members.keys() <= ours
    for name, value in first.members.items():
        assert name in ours or again.members[name] == value
    assert [name for name in again.members if name in first.members] == list(first.members)


def sizes(made: Call) -> dict[str, Any]:
    """What is in the prompt, but for where it stands."""
    return {**msgspec.structs.asdict(made.prompt), "source": None}
