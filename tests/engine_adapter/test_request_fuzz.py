"""Whatever the bytes of a body are, they are a call or a refusal in words."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.exact_size import question
from engine_adapter.prompt_size import Estimator, bound
from engine_adapter.prompts import JSON_FIELDS, MEDIA, MEDIA_MEMBERS, SCORED, UNSIZED
from engine_adapter.request import DROPPED, ENDPOINTS, FLAGS, NUMBERS, REFUSED, BadRequest, Call, parse
from tests.engine_adapter.calls import json_values

untimed = settings(deadline=None)
"""What a property takes depends on the machine: the run's own time limit is enough."""

endpoints = st.sampled_from(list(ENDPOINTS.values()))
words = st.sampled_from(["", "hi", "\u00e9\U0001f600", "<|im_end|>", "\x00", "x" * 50])


def objects(names: list[str], values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(st.sampled_from(names), values, max_size=6)


kinds = st.sampled_from([*MEDIA, *sorted(UNSIZED), "text", "input_text", "tool_use", "tool_result", "thinking"])
leaf = words | json_values
part_names = ["text", "source", "content", "input", "thinking", "signature", "uuid", *sorted(MEDIA_MEMBERS)]
parts = st.builds(lambda kind, rest: {**rest, "type": kind}, kinds | json_values, objects(part_names, leaf))
contents = words | st.lists(parts | words, max_size=4) | json_values
nested = st.builds(lambda part, content: {**part, "content": content}, parts, contents)
messages = st.builds(
    lambda rest, content: {**rest, "content": content},
    objects(["role", "name", "type", "output", "summary", "arguments", "tool_calls", "status"], leaf),
    contents | st.lists(nested, max_size=3),
)
prompts = words | st.lists(words | st.integers(-1, 9) | messages, max_size=4) | json_values
fields: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys([*REFUSED, *DROPPED, *JSON_FIELDS], json_values),
    **dict.fromkeys(FLAGS, st.booleans() | json_values),
    **dict.fromkeys([*NUMBERS, "n", "best_of", "max_output_tokens"], st.integers(-2, 2**54) | json_values),
    **{name: prompts for pair in (*SCORED, ("prompt", "input"), ("query", "system")) for name in pair},
    "max_tokens": st.integers(1, 99) | json_values,
    "messages": st.lists(messages, max_size=3) | json_values,
    "model": st.just("m") | json_values,
    "stream_options": objects(["include_usage", "continuous_usage_stats"], st.booleans()) | json_values,
    "tools": st.lists(objects(["type", "name"], leaf), max_size=3) | json_values,
    "cache_salt": words | json_values,
}


needed: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "chat": {"messages": st.lists(messages, min_size=1, max_size=3)},
    "completions": {"prompt": words | st.lists(words, min_size=1) | st.lists(st.integers(0, 9), min_size=1)},
    "embeddings": {"input": words | st.lists(st.lists(st.integers(0, 9), min_size=1), min_size=1)},
    "responses": {"input": words | st.lists(messages, min_size=1, max_size=3)},
    "messages": {"messages": st.lists(messages, min_size=1, max_size=3), "max_tokens": st.integers(1, 9999)},
    "rerank": {"query": words, "documents": st.lists(words | messages, min_size=1)},
    "score": {"text_1": words | messages, "text_2": st.lists(words | messages, min_size=1)},
}


@st.composite
def bodies(draw: st.DrawFn, endpoint: str) -> dict[str, Any]:
    """What the endpoint needs, mostly in order, and some of what else is looked at."""
    odd = draw(st.lists(st.sampled_from(sorted(fields)), max_size=3))
    made = {"model": st.just("m"), **needed[endpoint], **{name: fields[name] for name in odd}}
    return {name: draw(made[name]) for name in draw(st.permutations(list(made)))}


asked = endpoints.flatmap(lambda endpoint: st.tuples(st.just(endpoint), bodies(endpoint)))


def called(endpoint: Any, raw: bytes) -> Call | None:
    """The call, or None for a refusal in words."""
    try:
        call = parse(endpoint, raw)
    except BadRequest as refused:
        assert refused.message.endswith(".")
        assert len(refused.message) < 500
        return None
    return call


def holds(call: Call) -> None:
    """What is true of every call."""
    assert call.model and call.prompts >= 1 and call.choices >= 1
    assert 0 <= call.prompt.json_bytes <= call.prompt.text_bytes
    assert sum(len(text.encode()) * times for text, times in call.prompt.read()) <= call.prompt.text_bytes
    assert 0 <= Estimator().estimate("m", call.prompt) <= bound(call.prompt)
    for kind in ("vllm", "openai"):
        body = call.body(model=call.model, output_limit=3, kind=kind, live="token_ids", salt="s")
        assert parse(call.endpoint, body).prompt.text_bytes == call.prompt.text_bytes
    try:
        question(call, "served")
    except ValueError:
        return


@untimed
@given(endpoints, st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_do_worse_than_a_refusal(endpoint: Any, raw: bytes) -> None:
    assert called(endpoint, raw) is None


@untimed
@given(asked, st.booleans())
def test_no_values_do_worse_than_a_refusal(asked: tuple[Any, dict[str, Any]], ascii_only: bool) -> None:
    endpoint, body = asked
    if call := called(endpoint, json.dumps(body, ensure_ascii=ascii_only).encode()):
        assert call.model == body["model"]
        holds(call)


@untimed
@given(asked, st.data())
def test_no_broken_body_does_worse_than_a_refusal(asked: tuple[Any, dict[str, Any]], data: st.DataObject) -> None:
    """A byte changed, lost or doubled anywhere."""
    endpoint, body = asked
    raw = json.dumps(body, ensure_ascii=False).encode()
    at = data.draw(st.integers(0, len(raw) - 1))
    for instead in (b"", raw[at : at + 1] * 2, b"\xff", b'"', b"{", b"\\", b"0"):
        if call := called(endpoint, raw[:at] + instead + raw[at + 1 :]):
            holds(call)
