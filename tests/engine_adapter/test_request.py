"""What is read from a body, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.body import MOST_STRINGS
from engine_adapter.prompts import MOST_OBJECTS, MOST_VALUES
from engine_adapter.request import FLAGS, NUMBERS, BadRequest, Call, parse

untimed = settings(deadline=None)
"""What a property takes depends on the machine: the run's own time limit is enough."""

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "m1", "messages": MESSAGES, "max_tokens": 16}


def chat(**members: Any) -> Call:
    return parse("chat", json.dumps({**CHAT, **members}).encode())


def raw_chat(members: str) -> bytes:
    return b'{"model":"m1","messages":[{"role":"user","content":"hi"}],' + members.encode() + b"}"


def refusal(endpoint: Any, raw: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as refused:
        parse(endpoint, raw)
    return refused.value


def sent(call: Call, **changed: Any) -> Any:
    return json.loads(call.body(**{"model": "m1", "output_limit": None, "kind": "vllm", **changed}))


@pytest.mark.parametrize(
    "raw",
    [b"", b" ", b"{", b"[]", b"null", b'"x"', b"5", b"{}x", b"{}{}", b'{"a":1,}', b"{'a':1}", b"\xef\xbb\xbf{}"]
    + [json.dumps(CHAT).encode() + more for more in (b"x", b"\x00", json.dumps(CHAT).encode())]
    + [raw_chat(f'"x":{word}') for word in ("NaN", "Infinity", "-Infinity", "[NaN]", '{"y":NaN}', "01", "+1", "tru", ".5")]
    + [raw_chat('"x":"\\ud800"'), raw_chat('"x":"\\q"'), raw_chat('"x":"\n"')],
)  # fmt: skip
def test_what_is_not_one_json_object_is_refused(raw: bytes) -> None:
    """T116, T118."""
    assert "JSON" in refusal("chat", raw).message


@pytest.mark.parametrize("raw", [b'{"a":"\xff"}', b'{"a":["\xc3("]}', b'{"\xff":1}', b'{"a":"\xed\xa0\x80"}'])
def test_bytes_that_are_not_utf8_are_refused(raw: bytes) -> None:
    assert "UTF-8" in refusal("chat", raw).message


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 20_000 + b"]" * 20_000,
        raw_chat('"metadata":' + '{"a":' * 50_000 + "1" + "}" * 50_000),
        raw_chat('"tools":[{"parameters":' + "[" * 50_000 + "]" * 50_000 + "}]"),
        b'{"messages":' + b"[" * 100_000,
    ],
)
def test_deep_nesting_is_refused(raw: bytes) -> None:
    """T117."""
    assert refusal("chat", raw).param is None


@pytest.mark.parametrize("model", [None, 5, [], {}, "", True, 1.5])
def test_the_model_must_be_a_name(model: Any) -> None:
    """T119."""
    assert refusal("chat", json.dumps({**CHAT, "model": model}).encode()).param == "model"


def test_a_body_without_a_model_is_refused() -> None:
    assert refusal("chat", b'{"messages":[{}]}').param == "model"


@pytest.mark.parametrize("model", [" m1", "m1 ", "M1", "m1\n", "m1\u200b", "m\u0000x", "x" * 10_000, "é"])
def test_a_model_name_is_taken_exactly(model: str) -> None:
    assert chat(model=model).model == model


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "n", "best_of"])
@pytest.mark.parametrize(
    "value", ["0", "-1", "-0", "1.0", "1.5", '"16"', "true", "[]", "{}", "1e400", "1e2", "9223372036854775808", "9007199254740993"]
)  # fmt: skip
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_counts_must_be_whole_numbers_from_one(endpoint: Any, field: str, value: str) -> None:
    """T036. `max_tokens: 0` is refused with `echo` too."""
    raw = b'{"model":"m1","prompt":"x","messages":[{}],"echo":true,"%s":%s}' % (field.encode(), value.encode())
    assert refusal(endpoint, raw).param == field


@pytest.mark.parametrize(
    ("limits", "asked"),
    [
        ({"max_tokens": None}, None),
        ({"max_tokens": 9}, 9),
        ({"max_tokens": 9, "max_completion_tokens": 40}, 40),
        ({"max_tokens": 90, "max_completion_tokens": 40}, 90),
        ({"max_tokens": None, "max_completion_tokens": 40}, 40),
        ({"max_tokens": 2**53}, 2**53),
    ],
)
def test_of_two_limits_the_larger_counts(limits: dict[str, int | None], asked: int | None) -> None:
    assert chat(**limits).asked_output == asked


@pytest.mark.parametrize(
    ("n", "best_of", "choices"), [(None, None, 1), (3, None, 3), (2, 5, 5), (4, 2, 4), (None, 2, 2)]
)
def test_choices_are_the_larger_of_n_and_best_of(n: int | None, best_of: int | None, choices: int) -> None:
    assert chat(n=n, best_of=best_of).choices == choices


@pytest.mark.parametrize("value", ['"yes"', "1", "0", '"true"', "[]"])
@pytest.mark.parametrize("field", ["stream", "stream_options.include_usage", "stream_options.continuous_usage_stats"])
def test_flags_are_not_coerced(field: str, value: str) -> None:
    *outer, name = field.split(".")
    member = f'"{name}":{value}'
    raw = raw_chat(f'"stream_options":{{{member}}}' if outer else member)
    assert refusal("chat", raw).param == field


@pytest.mark.parametrize("options", ["x", 1, [], True])
def test_stream_options_must_be_an_object(options: Any) -> None:
    assert (
        refusal("chat", json.dumps({**CHAT, "stream": True, "stream_options": options}).encode()).param
        == "stream_options"
    )


@pytest.mark.parametrize(
    ("members", "usage", "live"),
    [
        ({"stream": True}, False, False),
        ({"stream": True, "stream_options": None}, False, False),
        ({"stream": True, "stream_options": {"include_usage": None, "x_extra": 1}}, False, False),
        ({"stream": True, "stream_options": {"include_usage": True}}, True, False),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, False, False),
        ({"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}, True, True),
        ({"stream": False, "stream_options": {"include_usage": True}}, False, False),
    ],
)
def test_what_usage_the_client_asked_for(members: dict[str, Any], usage: bool, live: bool) -> None:
    call = chat(**members)
    assert (call.wants_usage, call.wants_live_usage) == (usage, live)


@pytest.mark.parametrize("messages", [None, [], {}, "hi", [1], ["hi"], [MESSAGES[0], None]])
def test_messages_must_be_objects(messages: Any) -> None:
    assert refusal("chat", json.dumps({**CHAT, "messages": messages}).encode()).param == "messages"


@pytest.mark.parametrize(
    ("prompt", "prompts", "ids"),
    [
        ("abc", 1, 0), ("", 1, 0), (["a", "b"], 2, 0), ([1, 2, 3], 1, 3), ([[1, 2, 3], [4, 5]], 2, 5), ([[7]], 1, 1), ([0], 1, 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("endpoint", "field"), [("completions", "prompt"), ("embeddings", "input")])
def test_prompts_are_text_or_token_ids(endpoint: Any, field: str, prompt: Any, prompts: int, ids: int) -> None:
    """T037."""
    call = parse(endpoint, json.dumps({"model": "m1", field: prompt}, indent=2).encode())
    assert (call.prompts, call.prompt.token_ids) == (prompts, ids)


@pytest.mark.parametrize(
    "prompt",
    [None, [], {"a": 1}, 5, True, [1, "a"], ["a", 1], [[]], [[1], []], [[1], 2], [1, [2]], [-1], [1.0], [[["a"]]]],
)
@pytest.mark.parametrize(("endpoint", "field"), [("completions", "prompt"), ("embeddings", "input")])
def test_other_prompts_are_refused(endpoint: Any, field: str, prompt: Any) -> None:
    assert refusal(endpoint, json.dumps({"model": "m1", field: prompt}).encode()).param == field


@untimed
@given(st.lists(st.lists(st.integers(0, 10**9), min_size=1), min_size=1), st.sampled_from([None, 0, 3]))
def test_token_ids_are_counted_exactly(lists: list[list[int]], indent: int | None) -> None:
    call = parse("completions", json.dumps({"model": "m1", "prompt": lists}, indent=indent).encode())
    assert (call.prompts, call.prompt.token_ids) == (len(lists), sum(map(len, lists)))


def test_embeddings_take_messages_and_make_no_output() -> None:
    call = parse("embeddings", json.dumps({"model": "m1", "messages": MESSAGES, "n": 4, "max_tokens": 4}).encode())
    assert (call.prompts, call.choices, call.asked_output, call.prompt.messages) == (1, 1, None, 1)
    assert refusal("embeddings", b'{"model":"m1","input":"x","stream":true}').param == "stream"


REFUSED_ANYWHERE = [
    ("use_beam_search", True),
    ("use_beam_search", 1),
    ("prompt_embeds", "AAAA"),
    ("previous_response_id", "r"),
    ("chat_template", "x"),
    ("conversation", {"id": "c"}),
    ("background", True),
    ("mcp_servers", []),
    ("web_search_options", {}),
    ("mm_processor_kwargs", {"max_pixels": 10**9}),
    ("media_io_kwargs", {"video": {"num_frames": 10**6}}),
    ("kv_transfer_params", {"remote_host": "10.0.0.1"}),
    ("ec_transfer_params", {}),
    ("padding", "max_length"),
    ("vllm_xargs", {"kv_transfer_params": "x"}),
]
BODIES: dict[Any, dict[str, Any]] = {
    "chat": {"messages": MESSAGES},
    "completions": {"prompt": "hi"},
    "embeddings": {"input": "hi"},
    "responses": {"input": "hi"},
    "messages": {"messages": MESSAGES, "max_tokens": 16},
    "rerank": {"query": "hi", "documents": ["a", "b"]},
    "score": {"text_1": "hi", "text_2": ["a", "b"]},
}


def body(endpoint: Any, **members: Any) -> bytes:
    return json.dumps({"model": "m1", **BODIES[endpoint], **members}).encode()


@pytest.mark.parametrize(("field", "value"), REFUSED_ANYWHERE)
@pytest.mark.parametrize("endpoint", BODIES)
def test_what_cannot_be_metered_is_refused(endpoint: Any, field: str, value: Any) -> None:
    assert refusal(endpoint, body(endpoint, **{field: value})).param == field


@pytest.mark.parametrize("value", [False, None])
def test_what_is_switched_off_is_not_refused(value: Any) -> None:
    assert sent(chat(use_beam_search=value, prompt_embeds=None))["use_beam_search"] is value
    parse("responses", body("responses", background=value, conversation=None, padding=None, prompt=None))


@pytest.mark.parametrize("field", FLAGS)
@pytest.mark.parametrize("value", ["yes", 1, 0, "true", [], 1.0])
def test_what_vllm_would_coerce_to_a_flag_is_refused(field: str, value: Any) -> None:
    for endpoint in BODIES:
        assert refusal(endpoint, body(endpoint, **{field: value})).param == field


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", ["4", 4.0, True, [], -2, 2**53 + 1])
def test_what_vllm_would_coerce_to_a_number_is_refused(field: str, value: Any) -> None:
    for endpoint in BODIES:
        assert refusal(endpoint, body(endpoint, **{field: value})).param == field


def test_the_least_of_each_number_is_taken() -> None:
    for endpoint in BODIES:
        parse(endpoint, body(endpoint, **NUMBERS))


@pytest.mark.parametrize("salt", ["", 5, True, [], {}])
def test_a_cache_salt_must_be_a_string(salt: Any) -> None:
    assert refusal("chat", body("chat", cache_salt=salt)).param == "cache_salt"


# ---- responses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "asked"), [(None, None), (50, 50)])
def test_a_response_has_one_limit_and_one_answer(limit: int | None, asked: int | None) -> None:
    call = parse("responses", body("responses", max_output_tokens=limit, max_tokens=9, n=3, stream=True))
    assert (call.asked_output, call.choices, call.prompts, call.stream, call.generates) == (asked, 1, 1, True, True)


@pytest.mark.parametrize("value", ["0", "-1", "1.0", '"16"', "true", "[]", "9007199254740993"])
def test_a_responses_limit_must_be_a_whole_number(value: str) -> None:
    raw = b'{"model":"m1","input":"x","max_output_tokens":%s}' % value.encode()
    assert refusal("responses", raw).param == "max_output_tokens"


@pytest.mark.parametrize("value", [None, 5, True, {}, [], ["hi"], [1], [MESSAGES[0], None]])
def test_a_response_needs_an_input(value: Any) -> None:
    assert refusal("responses", body("responses", input=value)).param == "input"


def test_the_instructions_of_a_response_are_text() -> None:
    assert refusal("responses", body("responses", instructions=["x"])).param == "instructions"


def test_a_stored_prompt_is_refused() -> None:
    assert refusal("responses", body("responses", prompt={"id": "pmpt_1"})).param == "prompt"


@pytest.mark.parametrize(
    "kind", ["mcp", "web_search", "web_search_preview", "code_interpreter", "container", "file_search", "computer"]
)
def test_tools_that_the_engine_would_run_are_refused(kind: str) -> None:
    tools = [{"type": "function", "name": "f"}, {"type": kind}]
    assert refusal("responses", body("responses", tools=tools)).param == "tools"
    assert refusal("messages", body("messages", tools=tools)).param == "tools"


def test_tools_that_the_caller_runs_are_taken() -> None:
    tools = [{"type": kind, "name": "f"} for kind in ("function", "custom", "namespace")]
    assert parse("responses", body("responses", tools=tools)).prompt.tools == 3
    named = [{"name": "f", "input_schema": {}}, {"type": "custom", "name": "g"}, {"type": None, "name": "h"}]
    assert parse("messages", body("messages", tools=named)).prompt.tools == 3
    assert parse("chat", body("chat", tools=[{"type": "web_search"}])).prompt.tools == 1


@pytest.mark.parametrize(
    "item", [{"type": "item_reference", "id": "rs_1"}, {"type": "image_generation_call", "result": "AAAA"}]
)
def test_what_only_the_engine_has_is_refused(item: Any) -> None:
    assert refusal("responses", body("responses", input=[item])).param == "input"


# ---- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 0, -1, "4", 1.5, True])
def test_messages_need_a_limit(limit: Any) -> None:
    assert refusal("messages", body("messages", max_tokens=limit)).param == "max_tokens"


def test_messages_make_one_answer_of_at_most_their_limit() -> None:
    call = parse("messages", body("messages", max_tokens=40, max_completion_tokens=90, n=3))
    assert (call.asked_output, call.choices, call.generates) == (40, 1, True)


@pytest.mark.parametrize("thinking", [5, "enabled", [], {"budget_tokens": "2048"}, {"budget_tokens": True}])
def test_a_thinking_budget_is_a_whole_number(thinking: Any) -> None:
    refused = refusal("messages", body("messages", thinking=thinking))
    assert refused.param in ("thinking", "thinking.budget_tokens")


@pytest.mark.parametrize("role", ["assistant", "system", None])
def test_a_tool_result_is_the_users(role: Any) -> None:
    """vLLM writes one in another's message out as text, base64 and all."""
    content = [
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": {"data": "A" * 99}}]}
    ]
    message = {"role": role, "content": content}
    assert refusal("messages", body("messages", messages=[message])).param == "messages"
    parse("messages", body("messages", messages=[{**message, "role": "user"}]))


# ---- rerank and score ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "members", "pairs"),
    [
        ("rerank", {"query": "q", "documents": ["a", "b", "c"]}, 3),
        ("rerank", {"query": "q", "documents": "a"}, 1),
        ("rerank", {"query": {"content": [{"type": "text", "text": "q"}]}, "documents": [{"text": "a"}, "b"]}, 2),
        ("score", {"text_1": "q", "text_2": "a"}, 1),
        ("score", {"text_1": ["q"], "text_2": ["a", "b"]}, 2),
        ("score", {"queries": ["q", "r"], "documents": ["a", "b"]}, 2),
        ("score", {"queries": "q", "items": ["a", "b"]}, 2),
        ("score", {"data_1": "q", "data_2": ["a"]}, 1),
    ],
)
def test_each_pair_is_a_prompt_and_nothing_is_generated(endpoint: Any, members: Any, pairs: int) -> None:
    call = parse(endpoint, json.dumps({"model": "m1", "max_tokens": 9, "n": 3, **members}).encode())
    assert (call.prompts, call.choices, call.asked_output, call.generates) == (pairs, 1, None, False)


@pytest.mark.parametrize(
    ("endpoint", "members", "field"),
    [
        ("rerank", {"documents": ["a"]}, "query"),
        ("rerank", {"query": "q"}, "documents"),
        ("rerank", {"query": "q", "documents": []}, "documents"),
        ("rerank", {"query": "q", "documents": [5]}, "documents"),
        ("rerank", {"query": ["q", "r"], "documents": ["a", "b", "c"]}, "query"),
        ("rerank", {"query": 5, "documents": ["a"]}, "query"),
        ("rerank", {"query": "q", "documents": ["a"], "stream": True}, "stream"),
        ("score", {"text_1": "q"}, "text_1"),
        ("score", {"text_1": [], "text_2": ["a"]}, "text_1"),
        ("score", {"text_1": ["q", "r"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("score", {"text_1": "q", "text_2": "a", "queries": "long " * 99, "documents": "a"}, "text_1"),
        ("score", {"queries": "q", "documents": "a", "items": "b"}, "text_1"),
        ("score", {"text_1": "q", "documents": "a"}, "text_1"),
    ],
)
def test_other_pairs_are_refused(endpoint: Any, members: Any, field: str) -> None:
    assert refusal(endpoint, json.dumps({"model": "m1", **members}).encode()).param == field


@pytest.mark.parametrize(
    "part",
    [
        {"type": "file", "file": {"file_id": "f"}},
        {"type": "input_file", "file_data": "AAAA"},
        {"type": "document", "source": {"type": "base64", "data": "AAAA"}},
        {"type": "prompt_embeds", "data": "AAAA"},
        {"type": "text", "text": "a", "prompt_embeds": "AAAA"},
        {"image_embeds": "AAAA"},
        {"type": "image_url", "uuid": "another's"},
    ],
)
@pytest.mark.parametrize(
    ("endpoint", "name"), [("chat", "messages"), ("messages", "messages"), ("responses", "input"), ("embeddings", "messages")]
)  # fmt: skip
def test_parts_whose_size_nobody_knows_are_refused(endpoint: Any, name: str, part: Any) -> None:
    members = {"model": "m1", "max_tokens": 9, name: [{"role": "user", "content": [part]}]}
    assert refusal(endpoint, json.dumps(members).encode()).param == name


# ---- bodies of very many values --------------------------------------------------------------------------------------


def of_messages(messages: bytes) -> bytes:
    return b'{"model":"m1","messages":[%b]}' % messages


def listed(value: bytes, times: int) -> bytes:
    return b",".join([value] * times)


MANY_STRINGS = listed(b'"\\\\"', MOST_STRINGS)
MANY_MEMBERS = b",".join(b'"%d":1' % number for number in range(MOST_STRINGS))


@pytest.mark.parametrize(
    ("endpoint", "raw"),
    [
        ("chat", of_messages(b'{"content":[%b]}' % MANY_STRINGS)),
        ("chat", of_messages(b'{"content":[{%b}]}' % MANY_MEMBERS)),
        ("chat", of_messages(b"{%b}" % MANY_MEMBERS)),
        ("chat", of_messages(b"{}],%b" % MANY_MEMBERS[:-1] + b'1,"x":[')),
        ("chat", of_messages(b"{}" + b',\n{"a":""}' * MOST_STRINGS)),
        ("completions", b'{"model":"m1","prompt":[%b]}' % MANY_STRINGS),
        ("embeddings", b'{"model":"m1","input":[%b]}' % MANY_STRINGS),
    ],
    ids=["content", "part", "message", "body", "messages", "prompt", "input"],
)
def test_more_strings_than_any_real_body_has_are_refused(endpoint: Any, raw: bytes) -> None:
    json.loads(raw)
    assert f"more than {MOST_STRINGS} strings" in refusal(endpoint, raw).message


@pytest.mark.parametrize(
    "messages",
    [
        b"{}" + b",{}" * (MOST_OBJECTS + 1),
        b"{}" + b" ,\r\n\t{}" * (MOST_OBJECTS + 1),
        b'{"content":[{}%b]}' % (b",{}" * (MOST_OBJECTS + 1)),
        b'{"content":"\\\\"}%b' % (b",{}" * (MOST_OBJECTS + 1)),
    ],
    ids=["messages", "with blanks", "parts", "after a backslash"],
)
def test_more_messages_and_parts_than_any_real_body_has_are_refused(messages: bytes) -> None:
    refused = refusal("chat", of_messages(messages))
    assert (refused.param, f"more than {MOST_OBJECTS} objects" in refused.message) == ("messages", True)


@pytest.mark.parametrize(
    ("endpoint", "field", "members"),
    [
        ("messages", "system", b'"messages":[{}],"max_tokens":9,"system":'),
        ("responses", "input", b'"input":'),
        ("rerank", "documents", b'"query":"q","documents":'),
        ("score", "text_1", b'"text_2":"q","text_1":'),
    ],
)
def test_so_are_more_parts_items_and_documents(endpoint: Any, field: str, members: bytes) -> None:
    refused = refusal(endpoint, b'{"model":"m1",%b[{}%b]}' % (members, b",{}" * (MOST_OBJECTS + 1)))
    assert (refused.param, f"more than {MOST_OBJECTS} objects" in refused.message) == (field, True)


@pytest.mark.parametrize("field", ["tools", "response_format", "documents"])
def test_more_values_than_any_schema_has_are_refused(field: str) -> None:
    raw = b'{"model":"m1","messages":[{"content":"a"}],"%b":[%b]}' % (field.encode(), listed(b"1", MOST_VALUES + 2))
    assert f"more than {MOST_VALUES} values" in refusal("chat", raw).message


@pytest.mark.parametrize(
    "content",
    ['"' * 300_000, ",{" * 100_000, '\\",{' * 100_000, "\\", '\\"', ',"' * 250_000],
    ids=lambda text: text[:6],
)
def test_what_stands_in_a_text_is_no_structure(content: str) -> None:
    assert chat(messages=[{"role": "user", "content": content}]).prompt.text_bytes == len("user" + content)


def test_a_long_conversation_is_taken() -> None:
    parts = [{"type": "text", "text": "well, then"}] * 2
    messages = [{"role": "user", "content": parts}] * 5_000
    assert chat(messages=messages).prompt.text_bytes == 5_000 * len("user" + 2 * "well, then")


@pytest.mark.parametrize("content", [[1], [None], [[]], ["a", 1], [{}, True]])
def test_parts_are_objects_or_strings(content: Any) -> None:
    assert refusal("chat", json.dumps({**CHAT, "messages": [{"content": content}]}).encode()).param == "messages"


def test_an_input_does_not_hide_beside_messages() -> None:
    assert refusal("embeddings", json.dumps({**CHAT, "input": "x" * 1000}).encode()).param == "input"
