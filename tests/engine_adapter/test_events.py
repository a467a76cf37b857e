"""The scanner: bytes in, bytes to forward out, what it cost, how it ended. Streams are written by hand here; recorded
ones are in test_events_wire.py."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter import events as event_streams
from engine_adapter.errors import EngineBroke
from engine_adapter.events import LARGEST_EVENT, Scanner
from engine_adapter.usage import Usage

untimed = settings(deadline=None)
"""What a property takes depends on the machine: the run's own time limit is enough."""

DONE = b"data: [DONE]\n\n"
ROLE = b'data: {"id":"c-1","object":"chat.completion.chunk","created":7,"model":"served","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'


def data(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def piece(delta: Any, index: int = 0, finish: str | None = None, **more: Any) -> bytes:
    head = {"id": "c-1", "object": "chat.completion.chunk", "created": 7, "model": "served"}
    return data({**head, "choices": [{"index": index, "delta": delta, "finish_reason": finish}], **more})


def text(content: str, **more: Any) -> bytes:
    return piece({"content": content}, **more)


def fin(finish: str = "stop", **more: Any) -> bytes:
    return piece({}, finish=finish, **more)


def figures(prompt: Any, completion: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": 0}


def use(prompt: Any, completion: Any) -> bytes:
    return data({"id": "c-1", "choices": [], "usage": figures(prompt, completion)})


def scanner(endpoint: Any = "chat", **changed: Any) -> Scanner:
    unasked = {"wants_usage": False, "wants_live_usage": False, "wants_token_ids": False}
    settings = {**unasked, "choices": 1, "prompt_estimate": 11, "rename": None}
    return event_streams.scanner(endpoint, **{**settings, **changed})


def run(stream: bytes, **changed: Any) -> tuple[bytes, Scanner]:
    scan = scanner(**changed)
    return scan.feed(stream) + scan.end(), scan


def engine(prompt: int, completion: int) -> Usage:
    return Usage(prompt, 0, completion, 0, "engine")


# ---- usage -----------------------------------------------------------------------------------------------------------


def test_usage_that_nobody_asked_for_is_read_and_hidden() -> None:
    """T001."""
    shown = text("He") + text("llo") + fin()
    out, scan = run(shown + use(9, 4) + DONE)
    assert (out, scan.usage(), scan.done) == (shown + DONE, engine(9, 4), True)


def test_usage_that_was_asked_for_goes_through_untouched() -> None:
    """T003."""
    stream = text("ok") + fin() + use(13, 20) + DONE
    out, scan = run(stream, wants_usage=True)
    assert (out, scan.usage()) == (stream, engine(13, 20))


def test_what_comes_after_the_finish_still_counts() -> None:
    """T004."""
    scan = scanner()
    scan.feed(text("x") + fin())
    assert scan.usage().source == "counted"
    scan.feed(use(26, 7))
    assert scan.usage().total == 33


def test_null_usage_is_no_usage_and_stays() -> None:
    """T005."""
    stream = text("a", usage=None) * 3 + fin(usage=None)
    out, scan = run(stream + use(8, 3) + DONE)
    assert (out, scan.usage()) == (stream + DONE, engine(8, 3))


def running(*completions: int) -> bytes:
    return b"".join(text("w", usage=figures(5, completion)) for completion in completions)


def test_running_figures_replace_each_other() -> None:
    """T006."""
    stream = running(0, 1, 2, 3) + use(5, 3) + DONE
    out, scan = run(stream, wants_usage=True, wants_live_usage=True)
    assert (out, scan.usage()) == (stream, engine(5, 3))


def test_running_figures_are_hidden_from_who_asked_for_the_last_one_only() -> None:
    out, _ = run(running(1, 2) + fin(usage=figures(5, 2)) + use(5, 2) + DONE, wants_usage=True)
    assert out == text("w") * 2 + fin() + use(5, 2) + DONE


def test_figures_said_only_beside_choices_are_given_at_the_end_to_who_asked() -> None:
    """A backend without a closing usage event: what was taken out of its events is given back once."""
    stream = text("w") + fin(usage=figures(5, 2))
    for ending in (DONE, b""):
        out, scan = run(stream + ending, wants_usage=True)
        events = [json.loads(line[6:]) for line in out.removesuffix(DONE).splitlines() if line]
        assert [event.get("usage") for event in events] == [
            None,
            None,
            {"prompt_tokens": 5, "total_tokens": 7, "completion_tokens": 2},
        ]
        assert (events[2]["choices"], events[2]["id"]) == ([], "c-1")
        assert scan.usage() == engine(5, 2)


def test_events_without_choices_are_no_stumbling_block() -> None:
    """T007."""
    odd = data({"note": "keepalive"}) + data(7) + data(None) + data("x") + data([1])
    out, scan = run(text("a") + data({"usage": figures(4, 1)}) + odd + fin() + DONE)
    assert (out, scan.usage()) == (text("a") + odd + fin() + DONE, engine(4, 1))


def test_a_reported_zero_is_zero() -> None:
    """T008."""
    assert run(fin() + use(0, 0) + DONE)[1].usage() == engine(0, 0)


@pytest.mark.parametrize("bad", [(9, -1), (-9, 1), ("9", 1), (9, 1.5), (True, 1), (9, 2**60), (9, None)])
def test_figures_that_cannot_be_true_are_ignored(bad: tuple[Any, Any]) -> None:
    """T015."""
    assert run(text("abc") + fin() + use(*bad) + DONE)[1].usage() == Usage(11, 0, 1, 0, "counted")
    assert run(text("abc") + fin() + use(9, 1) + use(*bad) + DONE)[1].usage() == engine(9, 1)
    assert b"usage" not in run(text("a", usage=figures(*bad)) + use(*bad))[0]


@pytest.mark.parametrize("usage", [[], "x", 7, False, {"prompt_tokens_details": 5}])
def test_usage_of_any_shape_is_hidden(usage: Any) -> None:
    assert run(text("a", usage=usage) + data({"choices": [], "usage": usage}))[0] == text("a")


def test_tool_calls_are_weighed() -> None:
    """T009."""
    name = piece({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "get_weather", "arguments": ""}}]})
    arguments = piece({"tool_calls": [{"index": 0, "function": {"arguments": "x" * 20}}]}) * 10
    out, scan = run(name + arguments + fin("tool_calls") + DONE)
    assert out == name + arguments + fin("tool_calls") + DONE
    assert scan.usage() == Usage(11, 0, 53, 0, "estimated")


@pytest.mark.parametrize(
    ("delta", "completion"),
    [
        ({"role": "assistant", "content": ""}, 0),
        ({}, 0),
        ({"content": "a"}, 1),
        ({"content": None, "reasoning": "abcdefgh"}, 2),
        ({"reasoning_content": "abcdefgh", "reasoning": "abcdefgh"}, 2),
        ({"reasoning_content": "abcdefgh"}, 2),
        ({"refusal": "abcdefgh"}, 2),
        ({"content": "北京 😀 é"}, 4),
        ({"content": [{"type": "text", "text": "abcdefgh"}]}, 2),
        ({"content": "what does <|endoftext|> mean?"}, 8),
        ({"tool_calls": [{"id": "c", "custom": {"input": "abcdefgh"}}]}, 2),
        ({"tool_calls": [{"id": "c", "function": {"arguments": {"a": "abcdefgh"}}}]}, 4),
    ],
)
def test_without_figures_pieces_are_counted_and_text_is_weighed(delta: Any, completion: int) -> None:
    """T020, T039."""
    assert run(piece(delta) + DONE)[1].usage().completion == completion


@pytest.mark.parametrize("tail", [b"", fin()])
def test_one_word_events_are_a_token_each(tail: bytes) -> None:
    """T027, T029."""
    assert run(ROLE + text("hey") * 5 + tail)[1].usage() == Usage(11, 0, 5, 0, "counted")


def test_nothing_produced_costs_nothing() -> None:
    """T028, T033."""
    for stream in (b"", b": ping\n\n", DONE, data({"note": 1})):
        assert run(stream)[1].usage() == Usage()


def test_text_after_the_newest_figures_is_added() -> None:
    scan = scanner()
    scan.feed(running(1, 2) + text("x") + text("y"))
    assert scan.usage() == Usage(5, 0, 4, 0, "counted")
    scan.feed(use(5, 9))
    assert scan.usage() == engine(5, 9)
    scan.feed(text("z"))
    assert scan.usage() == Usage(5, 0, 10, 0, "counted")


def test_live_figures_of_an_answer_that_finished_are_the_engines() -> None:
    assert run(running(1, 2) + fin(usage=figures(5, 3)))[1].usage() == engine(5, 3)
    assert run(running(1, 2))[1].usage() == Usage(5, 0, 2, 0, "counted")


def test_parts_of_figures_come_with_them() -> None:
    usage = {
        **figures(338, 73),
        "prompt_tokens_details": {"cached_tokens": 256},
        "completion_tokens_details": {"reasoning_tokens": 5},
    }
    for stream in (data({"choices": [], "usage": usage}), fin(usage=usage)):
        assert run(stream)[1].usage() == Usage(338, 256, 73, 5, "engine")


def test_figures_of_each_choice_are_added_up() -> None:
    scan = scanner(choices=2)
    for index, completion in ((0, 1), (0, 2), (1, 1), (0, 3), (1, 2)):
        scan.feed(text("w", index=index, usage=figures(16, completion)))
    assert scan.usage() == Usage(16, 0, 5, 0, "counted")
    assert (scan.live_prompt, scan.live_completion, scan.live_most) == (16, 5, 21)


def test_figures_of_each_prompt_are_added_up_once() -> None:
    """Two prompts with two answers each: choices 0 and 1 are of the first."""
    scan = scanner("completions", choices=4, prompts=2)
    for index, prompt in ((0, 2), (1, 2), (2, 3), (3, 3)):
        scan.feed(data({"choices": [{"index": index, "text": "w"}], "usage": figures(prompt, 1)}))
    assert scan.usage() == Usage(5, 0, 4, 0, "counted")


def test_live_figures_are_the_engines_own_and_never_fall() -> None:
    scan, seen = scanner(), []
    for event in (
        ROLE,
        text("a rather long piece"),
        text("b", usage=figures(5, 9)),
        text("c", usage=figures(4, 2)),
        use(5, 3),
    ):
        scan.feed(event)
        seen.append((scan.live_prompt, scan.live_completion, scan.live_most))
    assert seen == [(0, 0, 11), (0, 0, 16), (5, 9, 16), (5, 9, 16), (5, 9, 16)]
    assert scan.usage() == engine(5, 3)


# ---- the forms of event streams --------------------------------------------------------------------------------------

PLAIN = text("a") + fin() + use(6, 2) + DONE


@pytest.mark.parametrize("line_end", [b"\r\n", b"\r", b"\n"])
@pytest.mark.parametrize("field", [b"data: ", b"data:", b"data:  \t"])
def test_any_line_end_and_any_space_after_the_colon(line_end: bytes, field: bytes) -> None:
    """T017, T018."""
    form = lambda stream: stream.replace(b"data: ", field).replace(b"\n", line_end)  # noqa: E731
    out, scan = run(form(PLAIN))
    assert (out, scan.usage(), scan.done) == (form(text("a") + fin() + DONE), engine(6, 2), True)
    assert scan.events == 4


def test_each_event_goes_on_as_soon_as_it_is_complete() -> None:
    """T018."""
    for line_end in (b"\r\n", b"\n", b"\r"):
        scan = scanner()
        for event in (text("a"), text("b"), fin()):
            cut = event.replace(b"\n", line_end)
            assert scan.feed(cut) == cut


def test_comments_pass_and_are_signs_of_life() -> None:
    """T019."""
    stream = b": ping\n\n" * 3 + text("a") + b":\n\n" + fin()
    out, scan = run(stream + use(3, 1) + DONE)
    assert (out, scan.usage(), scan.events) == (stream + DONE, engine(3, 1), 8)
    quiet = scanner()
    assert quiet.feed(b": ping\n\n") == b": ping\n\n"
    assert (quiet.events, quiet.content_seen) == (1, False)


def test_a_very_long_line_goes_through() -> None:
    """T021."""
    stream = text("x" * 1_000_000) + fin()
    out, scan = run(stream + use(5, 50_000) + DONE)
    assert (out, scan.usage()) == (stream + DONE, engine(5, 50_000))


def test_a_long_line_in_small_chunks_is_searched_once() -> None:
    """8 MB in 40,000 chunks: if each began again it would be 160 GB, and the test's time would be over."""
    stream = text("x" * 8_000_000)
    scan = scanner()
    chunks = [stream[at : at + 200] for at in range(0, len(stream), 200)]
    assert [bool(scan.feed(chunk)) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_an_event_that_never_ends_is_not_kept_for_ever() -> None:
    scan = scanner()
    with pytest.raises(EngineBroke) as broke:
        for _ in range(2 + LARGEST_EVENT // 1_000_000):
            assert scan.feed(b"x" * 1_000_000) == b""
    assert broke.value.phase == "protocol"


def test_an_event_of_several_data_lines_is_one() -> None:
    """T022."""
    stream = b'data: {"choices":[],"usage":\ndata: {"prompt_tokens":6,\ndata: "completion_tokens":4}}\n\n'
    assert run(stream)[0] == b""
    out, scan = run(stream, wants_usage=True)
    assert (out, scan.usage()) == (stream, engine(6, 4))


def test_other_fields_and_a_byte_order_mark_are_legal() -> None:
    """T023."""
    a, end = text("a"), fin()
    stream = (
        b"\xef\xbb\xbfevent: message\nid: 7\n" + a + b"retry: 10\n\ndata\n\n" + end[:-1] + b"id: 8\nevent: message\n\n"
    )
    out, scan = run(stream + b"id: 9\n" + use(3, 1) + DONE)
    assert (out, scan.usage()) == (stream + DONE, engine(3, 1))
    assert run(b"\xef\xbb\xbf" + a)[1].content_seen


def test_other_fields_stay_when_the_data_changes() -> None:
    stream = b"\xef\xbb\xbfevent: message\r\ndata: " + b'{"choices":[{}]%b}' + b"\r\nid: 7\r\n\r\n"
    assert run(stream % b',"usage":{"prompt_tokens":1}')[0] == stream % b""


def test_several_data_lines_that_must_change_become_one() -> None:
    stream = b'data:{"choices":[{}],\n: c\ndata: "usage":{}}\nid: 7\n\n'
    assert run(stream)[0] == b': c\ndata: {"choices":[{}]}\nid: 7\n\n'


@pytest.mark.parametrize("broken", [b'data: {"choices":[{"delta":{"content":"b"\n\n', b"data: {\xff}\n\n", b"garbage\n\n", b"data: " + b"[" * 9999 + b"\n\n", b'data: {"choices":"x"}\n\n', b'data: {"choices":[5,null]}\n\n', b'data: {"error":null}\n\n'])  # fmt: skip
def test_a_broken_event_is_passed_on_and_metering_goes_on(broken: bytes) -> None:
    """T024."""
    stream = text("a") + broken + text("c") + fin()
    out, scan = run(stream + use(4, 3) + DONE)
    assert (out, scan.usage(), scan.error) == (stream + DONE, engine(4, 3), None)


@pytest.mark.parametrize("last", [use(9, 1)[:-1], use(9, 1)[:-2], use(9, 1)[:-2] + b"\r"])
def test_the_last_event_may_lack_its_blank_line(last: bytes) -> None:
    """T025."""
    out, scan = run(text("a") + fin() + last)
    assert (out, scan.usage()) == (text("a") + fin(), engine(9, 1))
    out, scan = run(text("a") + fin() + last, wants_usage=True)
    assert (out, scan.usage()) == (text("a") + fin() + last, engine(9, 1))


def test_an_answer_without_done_is_finished_by_its_finish_reason() -> None:
    """T026."""
    _, scan = run(text("a") + fin() + use(9, 1))
    assert (scan.done, scan.finish_reason, scan.usage()) == (False, "stop", engine(9, 1))


def test_bytes_that_need_no_change_are_the_very_object() -> None:
    scan = scanner()
    for chunk in (text("a"), text("b") + text("c"), b": ping\n\n", DONE):
        assert scan.feed(chunk) is chunk


# ---- endings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        ({"message": "overloaded", "type": "overloaded", "code": 503}, 503, "overloaded"),
        ({"message": "m", "code": "rate_limit"}, None, "m"),
        ({"message": 5, "code": True}, None, ""),
        ("Unauthorized", None, "Unauthorized"),
        ({}, None, ""),
    ],
)
def test_an_error_inside_a_200_is_told_apart(error: Any, code: int | None, message: str) -> None:
    """T031."""
    event = data({"error": error})
    out, scan = run(event + DONE)
    assert scan.error is not None
    assert (scan.error.code, scan.error.message, scan.error.raw) == (code, message, event[6:-2])
    assert (out, scan.usage(), scan.done) == (b"", Usage(), False)


def test_what_came_before_an_error_is_shown_and_counted_and_nothing_after() -> None:
    out, scan = run(ROLE + text("a") + text("b") + data({"error": {"code": 500}}) + text("c") + DONE)
    assert (out, scan.usage()) == (ROLE + text("a") + text("b"), Usage(11, 0, 2, 0, "counted"))
    assert (scan.feed(text("d")), scan.end(), scan.cut()) == (b"", b"", b"")


def test_an_abort_is_a_break_whatever_comes_after() -> None:
    out, scan = run(text("a") + text("b", finish="abort") + use(24, 93) + DONE)
    assert (scan.aborted, scan.finish_reason, scan.done, scan.usage()) == (True, "abort", True, engine(24, 93))
    assert out.endswith(DONE)


def test_the_first_choices_finish_reason_is_kept() -> None:
    scan = scanner(choices=2)
    scan.feed(fin("length", index=1))
    assert scan.finish_reason == "length"
    scan.feed(fin("stop", index=0))
    assert (scan.finish_reason, scan.aborted) == ("stop", False)


def cut_events(scan: Scanner) -> list[Any]:
    out = scan.cut()
    assert out.endswith(DONE)
    return [json.loads(line.removeprefix(b"data: ")) for line in out.removesuffix(DONE).split(b"\n\n") if line]


def test_a_cut_finishes_every_open_choice_and_says_what_it_cost() -> None:
    scan = scanner(choices=3, wants_usage=True, rename=("served", "mine"))
    for index in range(3):
        scan.feed(text("w", index=index, usage=figures(16, 4)))
    scan.feed(fin(index=1, usage=figures(16, 5)) + b'data: {"choi')
    head = {"id": "c-1", "object": "chat.completion.chunk", "created": 7, "model": "mine"}
    last = {"delta": {}, "logprobs": None, "finish_reason": "length"}
    assert cut_events(scan) == [
        {**head, "choices": [{"index": 0, **last}]},
        {**head, "choices": [{"index": 2, **last}]},
        {**head, "choices": [], "usage": {"prompt_tokens": 16, "total_tokens": 29, "completion_tokens": 13}},
    ]
    assert (scan.done, scan.finish_reason, scan.usage()) == (True, "length", Usage(16, 0, 13, 0, "counted"))
    assert (scan.feed(text("late")), scan.end(), scan.cut()) == (b"", b"", b"")


def test_a_cut_of_completions_has_their_shape_and_no_usage_unasked() -> None:
    scan = scanner("completions")
    scan.feed(
        data(
            {
                "id": "cmpl-1",
                "object": "text_completion",
                "created": 7,
                "model": "m",
                "choices": [{"index": 0, "text": "a"}],
            }
        )
    )
    assert cut_events(scan) == [
        {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": "m",
         "choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}]},
    ]  # fmt: skip


def test_a_cut_after_the_sum_says_it_no_second_time() -> None:
    scan = scanner(wants_usage=True)
    scan.feed(text("a") + fin() + use(9, 1))
    assert scan.cut() == DONE
    assert scan.usage() == engine(9, 1)


def test_what_ended_is_not_cut() -> None:
    scan = scanner()
    scan.feed(text("a") + fin() + DONE)
    assert scan.cut() == b""


def test_a_cut_before_the_first_event_is_still_a_proper_end() -> None:
    assert [event["choices"][0]["finish_reason"] for event in cut_events(scanner(choices=2))] == ["length", "length"]


# ---- the model's name ------------------------------------------------------------------------------------------------


def test_every_event_has_the_callers_name_for_the_model() -> None:
    stream = (
        ROLE
        + text("served", usage=figures(1, 1))
        + text('"model":"served"')
        + b'data: { "model" : "served", "choices": [] }\n\n'
    )
    out, _ = run(stream + DONE, rename=("served", "mine"))
    expected = ROLE.replace(b'"served"', b'"mine"')
    expected += text("served").replace(b'"model":"served"', b'"model":"mine"')
    expected += text('"model":"served"').replace(b'"model":"served"', b'"model":"mine"')
    assert out == expected + b'data: { "model" : "mine", "choices": [] }\n\n' + DONE


def test_a_name_of_any_letters_is_written_as_json() -> None:
    out, _ = run(ROLE, rename=("served", 'a"\\é'))
    assert json.loads(out[6:])["model"] == 'a"\\é'


# ---- any cutting -----------------------------------------------------------------------------------------------------

line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
usages = st.none() | st.builds(figures, st.integers(-1, 9), st.integers(-1, 9))


@st.composite
def events(draw: st.DrawFn) -> bytes:
    more = {} if (usage := draw(usages)) is None and draw(st.booleans()) else {"usage": usage}
    kind = draw(
        st.sampled_from(
            ["text", "text", "text", "fin", "use", "comment", "error", "note", "lines", "broken", "done", "blank"]
        )
    )
    index = draw(st.integers(0, 2))
    event = {
        "text": lambda: text(draw(st.sampled_from(["", "w", "北京 😀", '","usage":{', "\\", "\u2028\r\n"])), index=index, **more),
        "fin": lambda: fin(draw(st.sampled_from(["stop", "abort"])), index=index, **more),
        "use": lambda: data({"choices": [], **more}),
        "comment": lambda: b": ping\n\n",
        "error": lambda: data({"error": {"code": 500}}),
        "note": lambda: b"event: note\nid: 3\n" + data({"note": [1]}),
        "lines": lambda: b'data: {"choices":\ndata:[{"delta":{"content":"w"}}]\n: c\ndata: ,"usage":%s}\n\n' % json.dumps(usage).encode(),
        "broken": lambda: draw(st.sampled_from([b"data: {\n\n", b"data\n\n", b"\xef\xbb\xbfdata: 7\n\n", b"data: 7\n\n", b"x\xff\n\n"])),
        "done": lambda: DONE,
        "blank": lambda: b"\n",
    }[kind]()  # fmt: skip
    lines = [draw(line_ends) for _ in range(event.count(b"\n"))]
    parts = event.split(b"\n")
    return b"".join(part + end for part, end in zip(parts, [*lines, b""], strict=True))


streams = st.tuples(st.sampled_from([b"", b"\xef\xbb\xbf"]), st.lists(events(), max_size=7), st.integers(0, 3)).map(
    lambda drawn: (drawn[0] + b"".join(drawn[1]))[: -drawn[2] or None]
)
clients = st.fixed_dictionaries(
    {
        "wants_usage": st.booleans(),
        "wants_live_usage": st.booleans(),
        "choices": st.integers(1, 3),
        "rename": st.sampled_from([None, ("served", "mine")]),
    }
)


def outcome(chunks: list[bytes], changed: dict[str, Any]) -> tuple[Any, ...]:
    scan = scanner(**changed)
    out = b"".join([*map(scan.feed, chunks), scan.end()])
    known = (scan.usage(), scan.events, scan.content_seen, scan.done, scan.finish_reason, scan.aborted, scan.error)
    return out, *known, scan.live_prompt, scan.live_completion, scan.live_most


@untimed
@given(streams, clients, st.data())
def test_any_cutting_gives_the_same_bytes_and_the_same_usage(
    stream: bytes, changed: dict[str, Any], drawn: st.DataObject
) -> None:
    whole = outcome([stream], changed)
    assert outcome([stream[at : at + 1] for at in range(len(stream))], changed) == whole
    cuts = sorted(drawn.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert outcome(pieces, changed) == whole


@settings(deadline=None, max_examples=40)
@given(streams, clients)
def test_every_place_of_one_cut(stream: bytes, changed: dict[str, Any]) -> None:
    whole = outcome([stream], changed)
    for at in range(len(stream) + 1):
        assert outcome([stream[:at], stream[at:]], changed) == whole


@untimed
@given(streams)
def test_who_asked_for_everything_gets_every_byte(stream: bytes) -> None:
    scan = scanner(wants_usage=True, wants_live_usage=True)
    out = scan.feed(stream) + scan.end()
    assert out == stream or (scan.error is not None and stream.startswith(out))


@untimed
@given(streams, clients)
def test_no_usage_reaches_who_did_not_ask(stream: bytes, changed: dict[str, Any]) -> None:
    scan = scanner(**{**changed, "wants_usage": False, "wants_live_usage": False})
    out = scan.feed(stream) + scan.end()
    for event in re.split(b"\n\n", re.sub(b"\r\n?", b"\n", out.removeprefix(b"\xef\xbb\xbf"))):
        said = b"\n".join(line[5:] for line in event.split(b"\n") if line.startswith(b"data:"))
        try:
            value = json.loads(said)
        except ValueError:
            continue
        assert not isinstance(value, dict) or value.get("usage") is None


@untimed
@given(streams, clients)
def test_what_counts_as_surely_used_never_falls(stream: bytes, changed: dict[str, Any]) -> None:
    scan, before = scanner(**changed), (0, 0, 0)
    for at in range(len(stream)):
        scan.feed(stream[at : at + 1])
        now = (scan.live_prompt, scan.live_completion, scan.live_most)
        assert all(new >= old for new, old in zip(now, before, strict=True))
        before = now


@untimed
@given(streams, clients)
def test_a_cut_at_any_place_ends_the_answer_properly(stream: bytes, changed: dict[str, Any]) -> None:
    scan = scanner(**changed)
    scan.feed(stream)
    if scan.error is not None or scan.done:
        assert scan.cut() == b""
    else:
        assert scan.cut().endswith(DONE)
        assert scan.done
        assert scan.finish_reason is not None


def test_figures_of_choices_whose_sum_cannot_be_true_are_not_taken_up() -> None:
    scan = scanner(choices=3)
    for index in range(3):
        scan.feed(text("w", index=index, usage=figures(16, 6 * 10**14)))
    assert scan.usage().total == 6 * 10**14 + 16
