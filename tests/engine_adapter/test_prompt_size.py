"""Prompt sizes: a bound that holds, an estimate that learns, exact counts."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from engine_adapter import prompt_size
from engine_adapter.prompt_size import (
    CHARACTERS_AT_ONCE,
    IMAGE_BOUND,
    LARGEST_ALLOWANCE,
    AnswerSizes,
    Estimator,
    FileTokenizer,
    TiktokenTokenizer,
    TokenizerUnavailable,
    bound,
    tokenize_body,
    tokenize_count,
)
from engine_adapter.prompts import JSON_FIELDS
from engine_adapter.request import Call, parse

untimed = settings(deadline=None)
"""What a property takes depends on the machine: the run's own time limit is enough."""

RECORDED = [
    json.loads(line) for line in Path(__file__).with_name("wire").joinpath("prompts.jsonl").read_text().splitlines()
]


def call(endpoint: Any = "chat", **members: Any) -> Call:
    return parse(endpoint, json.dumps({"model": "m", **members}).encode())


def said(content: Any, **more: Any) -> Call:
    return call(messages=[{"role": "user", "content": content}], **more)


def picture(size: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * size}}


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


prompts = st.builds(
    lambda texts, tools: (
        call(messages=[{"role": "user", "content": text} for text in texts], **({"tools": [1]} if tools else {})).prompt
    ),
    st.lists(st.text(max_size=50), min_size=1, max_size=4),
    st.booleans(),
)


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


# ---- exact counts ----------------------------------------------------------------------------------------------------

PATTERN = r"""[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
RUNS = [letter * length for letter in (b"a", b"^", b" ") for length in (2, 4, 8, 16)]
ENCODING = tiktoken.Encoding(
    "small",
    pat_str=PATTERN,
    mergeable_ranks={bytes([byte]): byte for byte in range(256)} | {run: 256 + rank for rank, run in enumerate(RUNS)},
    special_tokens={"<|endoftext|>": 1000},
)


def test_a_tokenizer_counts_text_and_allows_for_the_template() -> None:
    parts = said("aaaa").prompt
    assert TiktokenTokenizer(ENCODING).count(parts) == bound(parts) - len("useraaaa") + len("user") + 1
    texts = call("completions", prompt=["aaaa", "b"]).prompt
    assert TiktokenTokenizer(ENCODING).count(texts) == bound(texts) - 3


@untimed
@given(prompts)
def test_an_exact_count_never_exceeds_the_bound(parts: Any) -> None:
    assert TiktokenTokenizer(ENCODING).count(parts) <= bound(parts)


@pytest.mark.parametrize("field", JSON_FIELDS)
def test_a_tokenizer_counts_no_json_below_the_bound(field: str) -> None:
    """A template writes it anew, with blanks and line ends of its own."""
    plain, more = said("aaaa"), said("aaaa", **{field: ["a" * 160]})
    counted = [TiktokenTokenizer(ENCODING).count(each.prompt) for each in (plain, more)]
    assert counted[1] - counted[0] == bound(more.prompt) - bound(plain.prompt) > 160


def test_a_tokenizer_counts_no_tool_call_below_the_bound() -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "a" * 1600}}]
    parts = call(messages=[{"role": "assistant", "content": None, "tool_calls": calls}]).prompt
    assert TiktokenTokenizer(ENCODING).count(parts) == bound(parts)


def test_a_special_tokens_name_in_a_text_is_text() -> None:
    """T039."""
    parts = said("what does <|endoftext|> mean?").prompt
    assert TiktokenTokenizer(ENCODING).count(parts) == bound(parts)


@pytest.mark.parametrize("letter", ["a", "^", " "])
def test_a_million_equal_letters_are_counted(letter: str) -> None:
    """T040."""
    parts = said(letter * 1_000_000).prompt
    around = bound(parts) - parts.text_bytes + len("user")
    counted = TiktokenTokenizer(ENCODING).count(parts) - around
    assert 1_000_000 // 16 <= counted <= 1_000_000 // 16 + 4 * (1_000_000 // CHARACTERS_AT_ONCE + 1)


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    """A byte-level vocabulary in which "aa" and "aaaa" are tokens, of a file that cuts and fills what it encodes."""
    letters = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    model = BPE(letters | {"aa": 256, "aaaa": 257}, [("a", "a"), ("aa", "aa")])
    made = Tokenizer(model)
    made.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    made.enable_truncation(3)
    made.enable_padding(length=3)
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


def test_a_tokenizer_file_counts_as_its_model_does(small_file: Path) -> None:
    small = prompt_size.tokenizer(f"file:{small_file}")
    for content, tokens in (("aaaa", 1), ("aaaab", 2), ("a" * 4000, 1000), ("", 0), ("\u00e9", 2)):
        parts = said(content).prompt
        assert small.count(parts) == bound(parts) - len(content.encode()) + tokens
    letters = said("a" * 1_000_000).prompt
    assert small.count(letters) == bound(letters) - 1_000_000 + 250_000
    tools = said("aaaa", tools=["a" * 160]).prompt
    assert small.count(tools) == bound(tools) - 4 + 1


@untimed
@given(parts=prompts)
def test_a_vocabulary_of_single_bytes_counts_up_to_the_bound(parts: Any) -> None:
    made = Tokenizer(BPE({letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    assert FileTokenizer(made).count(parts) == bound(parts)


def test_without_the_package_a_tokenizer_file_says_how_to_get_it(small_file: Path) -> None:
    """In a process that cannot import it."""
    code = (
        "import sys; sys.modules['tokenizers'] = None\n"
        "from engine_adapter.prompt_size import TokenizerUnavailable, tokenizer\n"
        "try: tokenizer(sys.argv[1])\n"
        "except TokenizerUnavailable as error: print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", code, f"file:{small_file}"], capture_output=True, text=True, timeout=60)
    assert "pip install 'tokenweir[tokenizer-files]'" in ran.stdout


@pytest.mark.parametrize(
    "spec", ["tiktoken:no_such_encoding", "file:/no/tokenizer.json", "file:/dev/null", "words:x", ""]
)
def test_a_tokenizer_that_is_not_there_says_what_to_do(spec: str) -> None:
    with pytest.raises(TokenizerUnavailable) as unavailable:
        prompt_size.tokenizer(spec)
    assert "bytes" in str(unavailable.value)
    assert "\n" not in str(unavailable.value)


@pytest.mark.parametrize(
    ("wanted", "body"),
    [
        (said("hi", max_tokens=4, stream=True), {"model": "served", "messages": [{"role": "user", "content": "hi"}]}),
        (said("hi", tools=[], add_generation_prompt=False), {"model": "served", "messages": [{"role": "user", "content": "hi"}], "tools": [], "add_generation_prompt": False}),
        (call("completions", prompt="a\u00e9"), {"model": "served", "prompt": "a\u00e9"}),
        (call("embeddings", input=["abc"]), {"model": "served", "prompt": "abc"}),
    ],
)  # fmt: skip
def test_the_engine_is_asked_with_what_the_template_needs(wanted: Call, body: Any) -> None:
    assert json.loads(tokenize_body(wanted, "served")) == body


@pytest.mark.parametrize(
    "wanted", [call("completions", prompt=["a", "b"]), call("completions", prompt=[1, 2]), said([picture(3)])]
)
def test_the_engine_is_not_asked_what_it_cannot_count(wanted: Call) -> None:
    with pytest.raises(ValueError, match="one prompt of text"):
        tokenize_body(wanted, "served")


@pytest.mark.parametrize("field", ["functions", "documents", "response_format", "suffix", "reasoning_effort"])
def test_the_engine_is_not_asked_where_it_would_leave_out_part_of_the_prompt(field: str) -> None:
    wanted = said("hi", **{field: ["word " * 1000]})
    with pytest.raises(ValueError, match=f"does not count {field}"):
        tokenize_body(wanted, "served")
    assert json.loads(tokenize_body(said("hi", **{field: None}), "served")).keys() == {"model", "messages"}


def test_whatever_the_bound_counts_is_asked_of_the_engine_or_nothing_is() -> None:
    """A member that enters the prompt is never left out of an exact count."""
    for field in JSON_FIELDS:
        try:
            asked = json.loads(tokenize_body(said("hi", **{field: ["x"]}), "served"))
        except ValueError:
            continue
        assert asked[field] == ["x"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url"},
        {"type": "text", "text": "a", "image_url": "x"},
        {"type": 5, "text": "a"},
        {"type": "thinking", "thinking": "a"},
    ],
)
def test_the_engine_is_asked_about_text_alone(part: Any) -> None:
    with pytest.raises(ValueError, match="one prompt of text"):
        tokenize_body(said([{"type": "text", "text": "hi"}, part]), "served")


def test_a_picture_that_is_not_there_is_a_picture() -> None:
    assert bound(said([{"type": "image_url"}]).prompt) >= IMAGE_BOUND


def test_the_engines_count_is_read() -> None:
    assert tokenize_count(b'{"count":6,"max_model_len":4096,"tokens":[42,71,78,324,1268,1468],"token_strs":null}') == 6


@pytest.mark.parametrize(
    "answer", [b"", b"{}", b'{"count":-1}', b'{"count":"6"}', b'{"count":6.5}', b'{"detail":"Not Found"}', b"[6]"]
)
def test_an_answer_without_a_count_is_an_error(answer: bytes) -> None:
    with pytest.raises(ValueError):
        tokenize_count(answer)
