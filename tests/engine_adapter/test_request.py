"""What is read from a body, what is refused, and what is sent on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.body import MOST_STRINGS
from engine_adapter.prompts import MOST_OBJECTS
from engine_adapter.request import BadRequest, Call, parse

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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_beam_search", True),
        ("use_beam_search", 1),
        ("prompt_embeds", "AAAA"),
        ("previous_response_id", "r"),
        ("chat_template", "x"),
    ],
)
def test_what_cannot_be_metered_is_refused(field: str, value: Any) -> None:
    assert refusal("chat", json.dumps({**CHAT, field: value}).encode()).param == field


@pytest.mark.parametrize("value", [False, None])
def test_what_is_switched_off_is_not_refused(value: Any) -> None:
    assert sent(chat(use_beam_search=value, prompt_embeds=None))["use_beam_search"] is value


# ---- what is sent on -------------------------------------------------------------------------------------------------


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


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
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


@untimed
@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_do_worse_than_a_refusal(raw: bytes) -> None:
    for endpoint in ("chat", "completions", "embeddings"):
        with pytest.raises(BadRequest):
            parse(endpoint, raw)


@untimed
@given(
    st.dictionaries(
        st.sampled_from(["model", "messages", "prompt", "input", "stream", "stream_options", "n", "max_tokens"]),
        json_values,
    )
)
def test_no_values_do_worse_than_a_refusal(body: dict[str, Any]) -> None:
    for endpoint in ("chat", "completions", "embeddings"):
        try:
            call = parse(endpoint, json.dumps(body).encode())
        except BadRequest as refused:
            assert refused.message.endswith(".")
        else:
            assert call.model == body["model"]


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
