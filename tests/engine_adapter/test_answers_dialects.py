"""What plain answers of responses, messages, score and rerank cost, and how they ended."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.answers import NotAnAnswer, PlainAnswer, read_answer
from engine_adapter.usage import Usage

untimed = settings(deadline=None)
"""What a property takes depends on the machine: the run's own time limit is enough."""

ENDPOINTS: list[Any] = ["chat", "completions", "embeddings", "responses", "messages", "rerank", "score"]


def read(endpoint: Any, value: Any, rename: tuple[str, str] | None = None) -> PlainAnswer:
    return read_answer(endpoint, json.dumps(value).encode(), prompt_estimate=11, rename=rename)


# Recorded of vLLM 0.32, shortened where nothing is read.
RESPONSE = {
    "id": "resp_99a715de6b210239",
    "incomplete_details": {"reason": "max_output_tokens"},
    "model": "tiny",
    "object": "response",
    "output": [
        {
            "id": "msg_88834bde49456acb",
            "content": [{"annotations": [], "text": " repetition sign auditing Data", "type": "output_text", "logprobs": None}],
            "role": "assistant",
            "status": "completed",
            "type": "message",
        }
    ],
    "status": "incomplete",
    "usage": {
        "input_tokens": 24,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 1, "tool_output_tokens": 0},
        "total_tokens": 28,
    },
}  # fmt: skip
MESSAGE = {
    "id": "chatcmpl-b59ff0973b820d89",
    "type": "message",
    "role": "assistant",
    "content": [{"type": "text", "text": " retrieving letters"}],
    "model": "tiny",
    "stop_reason": "max_tokens",
    "usage": {
        "input_tokens": 45,
        "output_tokens": 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 1024,
    },
}


def test_a_response_costs_what_the_engine_says() -> None:
    """T013."""
    answer = read("responses", RESPONSE)
    assert (answer.usage, answer.finish_reason) == (Usage(24, 16, 4, 1, "engine"), "max_output_tokens")


def test_a_messages_input_is_the_sum_of_its_parts() -> None:
    answer = read("messages", MESSAGE)
    assert (answer.usage, answer.finish_reason) == (Usage(1069, 1024, 2, 0, "engine"), "max_tokens")


@pytest.mark.parametrize(
    ("usage", "prompt"),
    [
        ({"prompt_tokens": 8, "total_tokens": 8}, 8),
        ({"prompt_tokens": 8, "total_tokens": 8, "completion_tokens": 0, "prompt_tokens_details": None}, 8),
        ({"total_tokens": 8}, 8),
        ({"prompt_tokens": "8", "total_tokens": 8}, 8),
    ],
)
@pytest.mark.parametrize("endpoint", ["embeddings", "score", "rerank"])
def test_what_only_reads_has_only_a_prompt(endpoint: Any, usage: Any, prompt: int) -> None:
    """T012."""
    answer = read(endpoint, {"model": "tiny", "data": [{"index": 0, "score": 0.5}], "usage": usage})
    assert (answer.usage, answer.finish_reason) == (Usage(prompt, 0, 0, 0, "engine"), None)


@pytest.mark.parametrize(
    "usage", [None, [], {}, {"prompt_tokens": -1}, {"total_tokens": 8.5}, {"prompt_tokens": 10**16}]
)
@pytest.mark.parametrize("endpoint", ["embeddings", "score", "rerank"])
def test_what_only_reads_is_estimated_without_good_figures(endpoint: Any, usage: Any) -> None:
    assert read(endpoint, {"results": [], "usage": usage}).usage == Usage(11, 0, 0, 0, "estimated")


BAD_USAGE = [
    None,
    [],
    {},
    {"input_tokens": 24},
    {"output_tokens": "4", "input_tokens": 24},
    {"input_tokens": 24, "output_tokens": -4},
]


@pytest.mark.parametrize("usage", BAD_USAGE)
@pytest.mark.parametrize(
    ("item", "completion"),
    [
        ({"type": "message", "content": [{"type": "output_text", "text": "eight by"}]}, 2),
        ({"type": "message", "content": "eight by"}, 2),
        ({"type": "function_call", "id": "x" * 99, "call_id": "x" * 99, "name": "fn", "arguments": '{"a":1}'}, 3),
        ({"type": "reasoning", "summary": [{"text": "eight by"}], "content": [{"type": "reasoning_text", "text": "eight by"}]}, 4),
        ({"type": "reasoning", "encrypted_content": "x" * 99}, 0),
        (["eight by"], 2),
        (7, 0),
    ],
)  # fmt: skip
def test_without_good_figures_a_responses_output_is_weighed(usage: Any, item: Any, completion: int) -> None:
    prompt = 24 if usage and usage.get("input_tokens") == 24 else 11
    assert read("responses", {**RESPONSE, "output": [item], "usage": usage}).usage == Usage(
        prompt, 0, completion, 0, "estimated"
    )


@pytest.mark.parametrize("usage", BAD_USAGE)
@pytest.mark.parametrize(
    ("block", "completion"),
    [
        ({"type": "text", "text": "eight by"}, 2),
        ({"type": "thinking", "thinking": "eight by", "signature": "x" * 99}, 2),
        ({"type": "tool_use", "id": "x" * 99, "name": "fn", "input": {"a": [1, 2]}}, 4),
        ({"type": "tool_use", "id": "x" * 99, "name": "fn", "input": {}}, 1),
    ],
)
def test_without_good_figures_a_messages_content_is_weighed(usage: Any, block: Any, completion: int) -> None:
    prompt = 24 if usage and usage.get("input_tokens") == 24 else 11
    assert read("messages", {**MESSAGE, "content": [block], "usage": usage}).usage == Usage(
        prompt, 0, completion, 0, "estimated"
    )


@pytest.mark.parametrize(
    ("changed", "finish"),
    [
        ({"status": "completed", "incomplete_details": None}, "completed"),
        ({"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}, "content_filter"),
        ({"status": "incomplete", "incomplete_details": None}, "incomplete"),
        ({"status": "failed", "incomplete_details": None}, "failed"),
        ({"status": "cancelled", "incomplete_details": None}, "abort"),
        ({"status": "completed", "incomplete_details": None, "output": [], "usage": {"input_tokens": 9, "output_tokens": 0}}, "abort"),
        ({"status": "completed", "incomplete_details": None, "output": [], "usage": {"input_tokens": 9, "output_tokens": 1}}, "completed"),
        ({"status": 7, "incomplete_details": []}, None),
    ],
)  # fmt: skip
def test_how_a_response_ended(changed: Any, finish: str | None) -> None:
    assert read("responses", {**RESPONSE, **changed}).finish_reason == finish


@pytest.mark.parametrize(
    ("changed", "finish"),
    [
        ({"stop_reason": "end_turn"}, "end_turn"),
        ({"stop_reason": None}, "abort"),
        ({"stop_reason": "end_turn", "content": [], "usage": {"input_tokens": 9, "output_tokens": 0}}, "abort"),
        ({"stop_reason": "end_turn", "content": [], "usage": {"input_tokens": 9, "output_tokens": 1}}, "end_turn"),
        ({"stop_reason": "end_turn", "content": []}, "end_turn"),
        ({"stop_reason": None, "type": "other"}, None),
    ],
)
def test_how_a_message_ended(changed: Any, finish: str | None) -> None:
    """vLLM has no stop reason for what it gave up."""
    assert read("messages", {**MESSAGE, **changed}).finish_reason == finish


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_an_error_in_a_200_costs_nothing_where_something_is_made(endpoint: Any) -> None:
    usage = read(endpoint, {"type": "error", "error": {"type": "api_error", "message": "m"}}).usage
    assert usage.source != "engine"
    assert usage.completion == 0


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_the_callers_name_stands_where_the_engines_was(endpoint: Any) -> None:
    body = b'{"id":"x","model":"tiny","output":[],"content":[],"choices":[],"usage":{"total_tokens": 8}}'
    renamed = read_answer(endpoint, body, prompt_estimate=1, rename=("tiny", "mine")).body
    assert renamed == body.replace(b"tiny", b"mine")
    assert read_answer(endpoint, body, prompt_estimate=1, rename=None).body is body


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    "body", [b"", b"<html>", b'{"output":[', b"[]", b"null", b"7", b"\xff", b"[" * 100_000, b'{"a":tru}']
)
def test_what_is_no_json_object_is_no_answer(endpoint: Any, body: bytes) -> None:
    with pytest.raises(NotAnAnswer):
        read_answer(endpoint, body, prompt_estimate=1, rename=None)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(
    ["model", "usage", "output", "content", "choices", "error", "status", "type", "stop_reason", "incomplete_details", "data", "input_tokens", "output_tokens", "prompt_tokens", "completion_tokens", "total_tokens", "message", "text"]
)  # fmt: skip
answers = st.dictionaries(names, values | st.dictionaries(names, values, max_size=4), max_size=6)


@untimed
@given(st.sampled_from(ENDPOINTS), answers)
def test_answers_of_any_types_are_read(endpoint: Any, answer: dict[str, Any]) -> None:
    plain = read(endpoint, answer, rename=("tiny", "mine"))
    usage = plain.usage
    assert min(usage.prompt, usage.cached, usage.completion, usage.reasoning) >= 0
    assert usage.total <= 10**15 + 11
    assert json.loads(plain.body) == {**answer, **({"model": "mine"} if isinstance(answer.get("model"), str) else {})}


@untimed
@given(st.sampled_from(ENDPOINTS), st.binary(max_size=60))
def test_a_body_of_any_bytes_is_an_answer_or_none(endpoint: Any, body: bytes) -> None:
    with contextlib.suppress(NotAnAnswer):
        assert read_answer(endpoint, body, prompt_estimate=1, rename=None).body is body


def test_an_output_of_millions_of_values_is_weighed_by_its_size() -> None:
    body = b'{"output":[' + b'"",' * 1_000_000 + b'""]}'
    usage = read_answer("responses", body, prompt_estimate=1, rename=None).usage
    assert usage.completion == -(-(len(body) - len(b'{"output":}')) // 4)
