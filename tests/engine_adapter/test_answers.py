"""What a plain answer cost, and how it is passed on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.answers import NotAnAnswer, read_answer
from engine_adapter.choices import LARGE
from engine_adapter.estimate import MOST_VALUES
from engine_adapter.splice import without_usage
from engine_adapter.usage import Usage

untimed = settings(deadline=None)
"""What a property takes depends on the machine: the run's own time limit is enough."""


def answer(usage: Any = ..., *, said: Any = "ok", finish: str = "stop", **more: Any) -> bytes:
    message = {"role": "assistant", "content": said} if isinstance(said, str) else said
    body: dict[str, Any] = {
        "id": "chatcmpl-1",
        "model": "served",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
    }
    return json.dumps({**body, **({} if usage is ... else {"usage": usage}), **more}).encode()


def repeat_of(text: str) -> str:
    """A long text's name."""
    return text[:6]


def usage_of(body: bytes, endpoint: Any = "chat") -> Usage:
    return read_answer(endpoint, body, prompt_estimate=11, rename=None).usage


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}, Usage(9, 0, 4, 0, "engine")),
        ({"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}, Usage(0, 0, 0, 0, "engine")),
        ({"prompt_tokens": 7, "completion_tokens": 5}, Usage(7, 0, 5, 0, "engine")),
        ({"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 5}, Usage(7, 0, 5, 0, "engine")),
        ({"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": "12"}, Usage(7, 0, 5, 0, "engine")),
        ({"prompt_tokens": 1_500_000_000, "completion_tokens": 1_500_000_000}, Usage(1_500_000_000, 0, 1_500_000_000, 0, "engine")),
        (
            {"prompt_tokens": 2008, "completion_tokens": 266, "completion_tokens_details": {"reasoning_tokens": 261}},
            Usage(2008, 0, 266, 261, "engine"),
        ),
        (
            {"prompt_tokens": 338, "completion_tokens": 73, "prompt_tokens_details": {"cached_tokens": 256, "created_cache_tokens": 0}},
            Usage(338, 256, 73, 0, "engine"),
        ),
        ({"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 6}}, Usage(5, 0, 3, 0, "engine")),
        ({"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": -1}}, Usage(5, 0, 3, 0, "engine")),
        ({"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": "none"}, Usage(5, 0, 3, 0, "engine")),
        ({"prompt_tokens": 1, "completion_tokens": 10**15 - 1}, Usage(1, 0, 10**15 - 1, 0, "engine")),
    ],
)  # fmt: skip
def test_the_engines_figures_are_believed(figures: dict[str, Any], expected: Usage) -> None:
    """T010, T011, T064."""
    assert usage_of(answer(figures)) == expected
    assert usage_of(answer(figures)).total == expected.prompt + expected.completion


@pytest.mark.parametrize(
    ("figures", "prompt"),
    [
        (None, 11),
        ([], 11),
        ({}, 11),
        ({"prompt_tokens": 9, "completion_tokens": -1618, "total_tokens": -1609}, 9),
        ({"prompt_tokens": -9, "completion_tokens": 4}, 11),
        ({"prompt_tokens": 9, "completion_tokens": 4.5}, 9),
        ({"prompt_tokens": "9", "completion_tokens": True}, 11),
        ({"prompt_tokens": 9, "completion_tokens": 2**60}, 9),
        ({"prompt_tokens": 9, "completion_tokens": 10**15}, 9),
        ({"prompt_tokens": 10**15 + 1, "completion_tokens": 4}, 11),
        ({"prompt_tokens": 9}, 9),
    ],
)
def test_without_figures_that_can_be_true_the_text_is_weighed(figures: Any, prompt: int) -> None:
    """T015."""
    assert usage_of(answer(figures, said="twelve bytes")) == Usage(prompt, 0, 3, 0, "estimated")


def test_a_hundred_words_are_about_as_many_tokens() -> None:
    """T016."""
    usage = usage_of(answer(said="weir mill stream sluice water " * 20))
    assert usage.source == "estimated"
    assert 80 <= usage.completion <= 250


@pytest.mark.parametrize(
    "message",
    [
        {
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": "x" * 29}}],
        },
        {"content": None, "function_call": {"name": "get_weather", "arguments": "x" * 29}},
        {"content": "x" * 20, "reasoning": "y" * 20},
        {"content": "x" * 20, "reasoning": "y" * 20, "reasoning_content": "y" * 20},
        {"content": None, "refusal": "x" * 40},
        {"content": [{"type": "text", "text": "x" * 40}]},
        {"content": "", "tool_calls": [{"function": {"name": "get_weather", "arguments": {"zone": "x" * 18}}}]},
        {"content": "é" * 20},
    ],
)
def test_everything_the_model_wrote_is_weighed(message: dict[str, Any]) -> None:
    assert usage_of(answer(said={"role": "assistant", **message})).completion == 10


def test_embeddings_have_only_a_prompt() -> None:
    """T012."""
    assert usage_of(b'{"data":[],"usage":{"prompt_tokens":8,"total_tokens":8}}', "embeddings") == Usage(
        8, 0, 0, 0, "engine"
    )
    assert usage_of(b'{"data":[]}', "embeddings") == Usage(11, 0, 0, 0, "estimated")


def test_completions_are_read_like_chat() -> None:
    """T012."""
    body = b'{"choices":[{"index":0,"text":"abcdefgh","finish_reason":"length"}]%b}'
    plain = read_answer("completions", body % b"", prompt_estimate=3, rename=None)
    assert (plain.usage, plain.finish_reason) == (Usage(3, 0, 2, 0, "estimated"), "length")
    assert usage_of(body % b',"usage":{"prompt_tokens":3,"completion_tokens":5}', "completions").total == 8


def test_an_answer_that_says_nothing_costs_nothing() -> None:
    assert usage_of(b'{"error":{"message":"m"}}') == Usage()


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b'{"choices":[', b"[]", b"null", b"7", b"\xff", b"[" * 100_000, b'{"choices":7,"x":tru}']
)
def test_what_is_no_json_object_is_no_answer(body: bytes) -> None:
    with pytest.raises(NotAnAnswer):
        read_answer("chat", body, prompt_estimate=1, rename=None)


def test_an_abort_is_told_as_the_finish_reason() -> None:
    assert read_answer("chat", answer(finish="abort"), prompt_estimate=1, rename=None).finish_reason == "abort"


# ---- the caller's name for the model ---------------------------------------------------------------------------------


def renamed(body: bytes) -> bytes:
    return read_answer("chat", body, prompt_estimate=1, rename=("served", "mine")).body


def test_a_body_that_needs_no_change_is_the_same_object() -> None:
    for body in (answer(), answer(model="mine"), answer(model=None), answer(model=5)):
        assert read_answer("chat", body, prompt_estimate=1, rename=None).body is body
    for body in (answer(model="mine"), answer(model=None), answer(model=5)):
        assert renamed(body) is body


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"served","x":1e0}', b'{"model":"mine","x":1e0}'),
        (b'{ "x" : 1, "model" :\n "served" }', b'{ "x" : 1, "model" :\n "mine" }'),
        (b'{"model":"served-2024-08-06"}', b'{"model":"mine"}'),
        (b'{"model":"ser\\u0076ed"}', b'{"model":"mine"}'),
        (b'{"x":{"model":"served"},"model":"served"}', b'{"x":{"model":"served"},"model":"mine"}'),
        (b'{"x":"\\"model\\":\\"served\\"","model":"served"}', b'{"x":"\\"model\\":\\"served\\"","model":"mine"}'),
        (b'{"x":{"model":"served"}}', b'{"x":{"model":"served"}}'),
        (b'{"x":"model","model":"served"}', b'{"x":"model","model":"mine"}'),
        (b'{"model":"a","model":"served"}', b'{"model":"mine"}'),
    ],
)
def test_only_the_top_level_name_is_replaced(body: bytes, expected: bytes) -> None:
    assert renamed(body) == expected


keys = st.sampled_from(["model", "usage", "x", "}", "{", '"', "\\", ","])
values = st.recursive(
    st.sampled_from(["served", "usage", "model", '","usage":{', "}", '\\"usage\\":{}']) | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
spacing = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : ")])


@untimed
@given(st.dictionaries(keys, values, max_size=5), spacing)
def test_renaming_changes_the_name_and_nothing_else(body: dict[str, Any], spaces: tuple[str, str]) -> None:
    out = json.loads(renamed(json.dumps(body, separators=spaces).encode()))
    assert out == {**body, **({"model": "mine"} if isinstance(body.get("model"), str) else {})}


@untimed
@given(
    st.dictionaries(keys, values, max_size=5),
    st.dictionaries(keys, values, max_size=3),
    spacing,
    st.permutations(range(2)),
)
def test_taking_usage_out_changes_nothing_else(
    body: dict[str, Any], usage: dict[str, Any], spaces: tuple[str, str], order: list[int]
) -> None:
    body.pop("usage", None)
    halves = [body, {"usage": usage}]
    whole = halves[order[0]] | halves[order[1]]
    assert json.loads(without_usage(json.dumps(whole, separators=spaces).encode())) == body


# ---- answers of very many values -------------------------------------------------------------------------------------

MANY = MOST_VALUES + 2
NO_FIGURES = b'"usage":{"prompt_tokens":"3"}'


@pytest.mark.parametrize(
    "choices",
    [
        b"{}" + b",{}" * MANY,
        b'{"text":5}' + b",\n{}" * MANY,
        b"[]" + b",[]" * MANY,
        b'{"message":{"content":[""%b]}}' % (b',""' * MANY),
        b'{"message":{"content":[0%b]}}' % (b",0" * MANY),
        b'{"message":{"tool_calls":[{}%b]}}' % (b",{}" * MANY),
        b'{"text":5,%b}' % b",".join(b'"%d":0' % number for number in range(MANY)),
    ],
    ids=["objects", "odd objects", "lists", "strings", "numbers", "tool calls", "names"],
)
def test_choices_of_very_many_values_are_weighed_as_they_are(choices: bytes) -> None:
    body = b'{"choices":[%b],%b}' % (choices, NO_FIGURES)
    json.loads(body)
    assert usage_of(body) == Usage(11, 0, -(-len(b"[%b]" % choices) // 4), 0, "estimated")


def test_of_very_many_choices_figures_and_ending_are_read() -> None:
    choices = b'{"finish_reason":"abort"}' + b",{}" * MANY
    body = b'{"choices":[%b],"model":"served","usage":{"prompt_tokens":3,"completion_tokens":5}}' % choices
    plain = read_answer("chat", body, prompt_estimate=1, rename=("served", "mine"))
    assert (plain.usage, plain.finish_reason) == (Usage(3, 0, 5, 0, "engine"), "abort")
    assert plain.body == body.replace(b"served", b"mine")


@pytest.mark.parametrize("said", ["," * 200_000, ",{" * 200_000, '"' * 200_000, '\\",{' * 100_000], ids=repeat_of)
def test_what_stands_in_an_answers_text_is_no_structure(said: str) -> None:
    for content in (said, [said]):
        assert usage_of(answer(said={"content": content})).completion == -(-len(said) // 4)


def test_the_probabilities_of_a_long_answer_are_not_weighed() -> None:
    likely = [{"token": "a", "logprob": -0.5, "bytes": [97]}] * 20
    choice = {
        "index": 0,
        "message": {"content": "a" * 4000},
        "logprobs": {"content": [{"top_logprobs": likely}] * 4000},
    }
    assert usage_of(json.dumps({"choices": [choice]}).encode()).completion == 1000


@pytest.mark.parametrize("member", ["usage", "model", "error"])
def test_a_member_larger_than_any_real_one_is_not_read(member: str) -> None:
    body = answer(**{"said": "x" * 40, member: {"prompt_tokens": 3, "completion_tokens": 2, "x": [0] * LARGE}})
    assert usage_of(body).completion in (2, 10)
