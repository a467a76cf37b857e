"""The bound of a prompt holds whatever a template makes of it, for a tokenizer that knows single bytes alone.

Prompts are written here as vLLM 0.32 and the templates of common models write them, in the widest form that each has: tools
and calls read and written anew by Python's json, characters beyond ASCII escaped, a value a line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.prompt_size import bound
from engine_adapter.request import parse

untimed = settings(deadline=None)
"""What a property takes depends on the machine: the run's own time limit is enough."""

MARK = "\x02"
"""A special token such as <|im_start|>."""
PARAGRAPH = "You may call these functions; write a call as JSON between the two marks." * 3

Message = dict[str, Any]
Writer = Callable[[Any], str]
WRITERS: list[Writer] = [
    lambda value: json.dumps(value, ensure_ascii=False),
    lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":")),
    lambda value: json.dumps(value, ensure_ascii=True),
    lambda value: json.dumps(value, ensure_ascii=False, indent=4),
]


def chatml(messages: list[Message], tools: list[Any], write: Writer) -> int:
    """Tokens, each a byte, of the ChatML template that Qwen and Hermes have; Llama's indents its tools."""
    text = ""
    if tools:
        text += f"{MARK}system\n{PARAGRAPH}{MARK}" + "".join("\n" + write(tool) for tool in tools) + f"{MARK}\n{MARK}\n"
    for message in messages:
        said = "\n".join(message["texts"])
        if message["role"] == "tool":
            said = f"<tool_response>\n{said}\n</tool_response>"
        text += f"{MARK}{message['role']}\n{said}"
        for name, arguments in message.get("calls", ()):
            one_line = write(arguments) if write is not WRITERS[-1] else json.dumps(arguments, ensure_ascii=False)
            text += f'{MARK}\n{{"name": "{name}", "arguments": {one_line}}}\n{MARK}'
        text += f"{MARK}\n"
    return len(f"{text}{MARK}assistant\n".encode())


def as_function(tool: Any) -> Any:
    """A tool with what vLLM adds to it."""
    return {"type": "function", "function": {"description": None, "parameters": None, **tool}}


texts = st.text(max_size=20)
names = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=8)
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=25,
)
arguments = st.dictionaries(texts, values, max_size=4)
tool_lists = st.lists(st.fixed_dictionaries({"name": names}, optional={"parameters": arguments}), max_size=3)
turns = st.lists(
    st.one_of(
        st.tuples(st.just("said"), st.sampled_from(["user", "assistant"]), st.lists(texts, min_size=1, max_size=12)),
        st.tuples(st.just("call"), names, arguments),
        st.tuples(st.just("result"), names, texts),
    ),
    min_size=1,
    max_size=5,
)
forms = st.sampled_from([(ascii_only, blanks) for ascii_only in (True, False) for blanks in (True, False)])


def raw(body: Any, form: tuple[bool, bool]) -> bytes:
    ascii_only, blanks = form
    return json.dumps(
        {"model": "m", **body}, ensure_ascii=ascii_only, separators=None if blanks else (",", ":")
    ).encode()


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@untimed
@given(turns, tool_lists, forms, st.sampled_from(WRITERS))
def test_of_chat(conversation: Any, tools: Any, form: Any, write: Writer) -> None:
    asked, written = [], []
    for kind, *turn in conversation:
        if kind == "said":
            role, said = turn
            asked.append({"role": role, "content": [{"type": "text", "text": text} for text in said]})
            written.append({"role": role, "texts": said})
        elif kind == "call":
            name, values = turn
            function = {"name": name, "arguments": compact(values)}
            asked.append({"role": "assistant", "tool_calls": [{"function": function}]})
            written.append({"role": "assistant", "texts": [], "calls": [(name, values)]})
        else:
            asked.append({"role": "tool", "tool_call_id": turn[0], "content": turn[1]})
            written.append({"role": "tool", "texts": [turn[1]]})
    functions = [as_function(tool) for tool in tools]
    body = {"messages": asked, "tools": [{"type": "function", "function": tool} for tool in tools]}
    assert chatml(written, functions, write) <= bound(parse("chat", raw(body, form)).prompt)


@untimed
@given(turns, tool_lists, texts, forms, st.sampled_from(WRITERS))
def test_of_messages(conversation: Any, tools: Any, system: str, form: Any, write: Writer) -> None:
    asked, written = [], [{"role": "system", "texts": [system]}]
    for kind, *turn in conversation:
        if kind == "said":
            role, said = turn
            asked.append({"role": role, "content": [{"type": "text", "text": text} for text in said]})
            written.append({"role": role, "texts": said})
        elif kind == "call":
            name, values = turn
            block = {"type": "tool_use", "id": "", "name": name, "input": values}
            asked.append({"role": "assistant", "content": [block]})
            written.append({"role": "assistant", "texts": [], "calls": [(name, values)]})
        else:
            block = {"type": "tool_result", "tool_use_id": turn[0], "content": [{"type": "text", "text": turn[1]}]}
            asked.append({"role": "user", "content": [block]})
            written.append({"role": "tool", "texts": [turn[1]]})
    functions = [
        as_function({**tool, "parameters": {**tool.get("parameters", {}), "type": "object"}}) for tool in tools
    ]
    schemas = [{"name": tool["name"], "input_schema": tool.get("parameters", {})} for tool in tools]
    body = {"messages": asked, "system": system, "tools": schemas, "max_tokens": 9}
    assert chatml(written, functions, write) <= bound(parse("messages", raw(body, form)).prompt)


@untimed
@given(turns, tool_lists, texts, forms, st.sampled_from(WRITERS))
def test_of_responses(conversation: Any, tools: Any, system: str, form: Any, write: Writer) -> None:
    asked, written = [], [{"role": "system", "texts": [system]}]
    for kind, *turn in conversation:
        if kind == "said":
            role, said = turn
            asked.append({"role": role, "content": [{"type": "input_text", "text": text} for text in said]})
            written.append({"role": role, "texts": said})
        elif kind == "call":
            name, values = turn
            asked.append({"type": "function_call", "call_id": "", "name": name, "arguments": compact(values)})
            written.append({"role": "assistant", "texts": [], "calls": [(name, values)]})
        else:
            asked.append({"type": "function_call_output", "call_id": turn[0], "output": turn[1]})
            written.append({"role": "tool", "texts": [turn[1]]})
    body = {"input": asked, "instructions": system, "tools": [{"type": "function", **tool} for tool in tools]}
    functions = [as_function(tool) for tool in tools]
    assert chatml(written, functions, write) <= bound(parse("responses", raw(body, form)).prompt)


@untimed
@given(texts, st.lists(texts, min_size=1, max_size=6), forms)
def test_of_pairs(query: str, documents: list[str], form: Any) -> None:
    """As XLM-RoBERTa has them: a mark before, two between, one after."""
    tokens = sum(len(query.encode()) + len(document.encode()) + 4 for document in documents)
    reranked = parse("rerank", raw({"query": query, "documents": documents}, form)).prompt
    scored = parse("score", raw({"text_1": query, "text_2": documents}, form)).prompt
    assert tokens == bound(reranked) - reranked.text_growth == bound(scored) - scored.text_growth
