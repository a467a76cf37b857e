"""Prompt sizes: a bound that holds, an estimate that learns."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter import prompt_size
from engine_adapter.prompt_size import IMAGE_BOUND, LARGEST_ALLOWANCE, AnswerSizes, Estimator, bound
from engine_adapter.request import parse
from tests.engine_adapter.calls import call, picture, prompts, said

untimed = settings(deadline=None)
"""What a property takes depends on the machine: the run's own time limit is enough."""

RECORDED = [
    json.loads(line) for line in Path(__file__).with_name("wire").joinpath("prompts.jsonl").read_text().splitlines()
]


# ---- the bound -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: str(recorded["prompt_tokens"]))
def test_the_bound_holds_for_what_vllm_counted(recorded: dict[str, Any]) -> None:
    """Prompts and their token numbers recorded from vLLM 0.32 with three tokenizers, one of them of single letters."""
    prompt = parse(recorded["endpoint"], json.dumps(recorded["body"]).encode()).prompt
    assert recorded["prompt_tokens"] <= bound(prompt)
    assert 1 <= Estimator().estimate("m", prompt) <= bound(prompt)


@pytest.mark.parametrize(("prompt", "tokens"), [([1, 2, 3], 3), ([[1, 2, 3], [4, 5]], 5), ([0] * 10_000, 10_000)])
def test_token_ids_are_exact(prompt: Any, tokens: int) -> None:
    """T037."""
    parts = call("completions", prompt=prompt).prompt
    estimator = Estimator()
    assert bound(parts) == estimator.bound("m", parts) == estimator.estimate("m", parts) == tokens


@untimed
@given(st.text(), st.text(), st.booleans())
def test_the_bound_is_at_least_the_bytes_of_all_text(one: str, other: str, escaped: bool) -> None:
    parts = [{"type": "text", "text": one}, {"type": "text", "text": other}]
    bodies = [
        {"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": other}]},
        {"messages": [{"role": "user", "content": parts}]},
        {"messages": [{"role": "tool", "tool_call_id": one, "name": other, "content": None}]},
        {"messages": [{"role": "user", "content": one}], "tools": [{"function": {"description": other}}]},
    ]
    for body in bodies:
        raw = json.dumps({"model": "m", **body}, ensure_ascii=escaped).encode()
        assert bound(parse("chat", raw).prompt) >= len(one.encode()) + len(other.encode())
    raw = json.dumps({"model": "m", "prompt": [one, other]}, ensure_ascii=escaped).encode()
    assert bound(parse("completions", raw).prompt) >= len(one.encode()) + len(other.encode())


@untimed
@given(st.text(min_size=1))
def test_escapes_do_not_make_a_prompt_larger(text: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    one, other = (parse("chat", json.dumps(body, ensure_ascii=escaped).encode()).prompt for escaped in (True, False))
    assert bound(one) == bound(other)


@pytest.mark.parametrize("field", ["tools", "functions", "response_format", "documents", "chat_template_kwargs"])
def test_schemas_and_documents_are_part_of_the_prompt(field: str) -> None:
    """T041."""
    large = {"x": "word " * 40_000}
    parts = said("hi", **{field: [large] if field in ("tools", "functions", "documents") else large}).prompt
    assert bound(parts) > 200_000
    assert Estimator().estimate("m", parts) > 60_000


def test_tool_calls_are_part_of_the_prompt() -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "x" * 5000}}]
    assert bound(call(messages=[{"role": "assistant", "content": None, "tool_calls": calls}]).prompt) > 5000


def test_a_large_prompt_with_little_output_is_large() -> None:
    """T034."""
    parts = said("lorem ipsum " * 10_000, max_tokens=1).prompt
    assert bound(parts) >= 120_000
    assert 20_000 <= Estimator().estimate("m", parts) <= 60_000


def test_pictures_are_not_text() -> None:
    """T038."""
    parts = said([{"type": "text", "text": "hi"}, picture(1_300_000)], max_tokens=16).prompt
    assert IMAGE_BOUND <= bound(parts) <= 10_000 - 16
    assert Estimator().estimate("m", parts) < bound(parts)
    two = said([picture(10), picture(10)]).prompt
    assert bound(two) >= 2 * IMAGE_BOUND


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "word " * 1000, "image_url": {"url": "x"}},
        {"image_url": "x", "text": "word " * 1000},
        {"type": "text", "text": ["word " * 1000]},
        "word " * 1000,
    ],
)
def test_text_does_not_hide_beside_a_picture(part: Any) -> None:
    assert bound(said([part]).prompt) >= 5000


def test_a_picture_that_is_not_there_is_a_picture() -> None:
    assert bound(said([{"type": "image_url"}]).prompt) >= IMAGE_BOUND


@pytest.mark.parametrize("medium", ["input_audio", "audio_url", "video_url"])
def test_sounds_and_films_have_a_bound_of_their_own(medium: str) -> None:
    parts = said([{"type": medium, medium: {"url": "A" * 1_000_000}}]).prompt
    assert 4000 < bound(parts) < 20_000


# ---- the estimate ----------------------------------------------------------------------------------------------------


def test_the_estimate_starts_at_a_third_and_follows_the_engine() -> None:
    estimator, parts = Estimator(), said("x" * 6000).prompt
    assert 2000 <= estimator.estimate("m", parts) <= 2020
    for _ in range(60):
        estimator.learn("m", parts, 1500)
    assert 1480 <= estimator.estimate("m", parts) <= 1530
    assert 2000 <= estimator.estimate("other", parts) <= 2020
    for _ in range(150):
        estimator.learn("m", parts, 5000)
    assert 4900 <= estimator.estimate("m", parts) <= 5100


def test_one_odd_prompt_does_not_turn_the_estimate() -> None:
    estimator, parts = Estimator(), said("x" * 4000).prompt
    for _ in range(60):
        estimator.learn("m", parts, 1000)
    estimator.learn("m", said("y" * 4000).prompt, 4000)
    assert 1000 <= estimator.estimate("m", parts) <= 1250


@untimed
@given(st.lists(st.tuples(prompts, st.integers(0, 10**7)), max_size=10), prompts)
def test_the_estimate_never_exceeds_the_bound(history: list[Any], parts: Any) -> None:
    estimator = Estimator()
    for learned, tokens in history:
        estimator.learn("m", learned, tokens)
    assert 0 <= estimator.estimate("m", parts) <= estimator.bound("m", parts)
    assert bound(parts) <= estimator.bound("m", parts) <= bound(parts) + LARGEST_ALLOWANCE


@untimed
@given(prompts, st.integers(0, LARGEST_ALLOWANCE))
def test_a_template_larger_than_allowed_for_is_learned_at_once(parts: Any, more: int) -> None:
    estimator = Estimator()
    tokens = bound(parts) + more
    estimator.learn("m", parts, tokens)
    assert estimator.bound("m", parts) >= tokens


def test_figures_that_are_no_templates_doing_teach_nothing() -> None:
    estimator = Estimator()
    for parts in (said("hi").prompt, said(["hi", picture(5)]).prompt, call("completions", prompt=[1, 2]).prompt):
        before = estimator.bound("m", parts), estimator.estimate("m", parts)
        estimator.learn("m", parts, 10**9)
        assert (estimator.bound("m", parts), estimator.estimate("m", parts)) == before


def test_the_allowance_is_for_each_prompt_of_a_list() -> None:
    estimator, two = Estimator(), call("embeddings", input=["abc", "abc"]).prompt
    estimator.learn("m", two, bound(two) + 20)
    assert (
        estimator.bound("m", call("embeddings", input="abc").prompt)
        == bound(call("embeddings", input="abc").prompt) + 10
    )


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_before_any_answer_the_default_is_expected() -> None:
    sizes = AnswerSizes()
    assert sizes.expected_output("k", "m", 512) == 512
    assert sizes.expected_output("k", "m", 512, ceiling=100) == 100


@pytest.mark.parametrize("length", [1, 3, 20, 100, 512, 700, 4000, 60_000])
def test_equal_answers_are_expected_within_a_fifth(length: int) -> None:
    sizes = AnswerSizes()
    for _ in range(20):
        sizes.learn("k", "m", length)
    assert length <= sizes.expected_output("k", "m", 512) <= length * 1.19 + 1
    assert sizes.expected_output("k", "m", 512, ceiling=2) == min(2, sizes.expected_output("k", "m", 512))
    assert sizes.expected_output("k", "other", 512) == sizes.expected_output("other", "m", 512) == 512


def test_the_80th_percentile_of_a_skewed_distribution_is_learned() -> None:
    draw = random.Random(7)
    sizes = AnswerSizes()
    lengths = [max(1, int(draw.lognormvariate(5, 1.3))) for _ in range(3000)]
    for length in lengths:
        sizes.learn("k", "m", length)
    recent = lengths[-100:]
    below = sum(length <= sizes.expected_output("k", "m", 512) for length in recent)
    assert 70 <= below <= 92


def test_a_change_is_followed() -> None:
    sizes = AnswerSizes()
    for length, rounds in ((2000, 500), (50, 300)):
        for _ in range(rounds):
            sizes.learn("k", "m", length)
    assert sizes.expected_output("k", "m", 512) <= 60


@untimed
@given(st.lists(st.integers(0, 2**40), max_size=300), st.integers(0, 2**40), st.integers(0, 2**40))
def test_any_answers_give_an_expectation_below_the_ceiling(lengths: list[int], default: int, ceiling: int) -> None:
    sizes = AnswerSizes()
    for length in lengths:
        sizes.learn("k", "m", length)
    assert 0 <= sizes.expected_output("k", "m", default, ceiling) <= ceiling


def test_the_least_recently_used_keys_are_forgotten() -> None:
    sizes = AnswerSizes()
    for number in range(prompt_size.SIZES + 1):
        for _ in range(3):
            sizes.learn(f"k{number}", "m", 9000)
        sizes.expected_output("k0", "m", 1)
    assert sizes.expected_output("k0", "m", 1) > 9000
    assert sizes.expected_output("k1", "m", 1) == 1
    assert sizes.expected_output("k2", "m", 1) > 9000
