"""The scanner of /v1/responses. Streams are written by hand, or recorded of vLLM 0.32."""

from __future__ import annotations

from typing import Any

import pytest

from engine_adapter.events import Scanner
from engine_adapter.usage import Usage
from tests.engine_adapter import streams
from tests.engine_adapter.streams import recorded, typed, values

RESPONSE = {
    "id": "resp_1",
    "created_at": 7,
    "model": "served",
    "object": "response",
    "output": [],
    "status": "in_progress",
}
CREATED = typed("response.created", response=RESPONSE, sequence_number=0)
WAITING = CREATED + typed("response.in_progress", response=RESPONSE, sequence_number=1)
USAGE = {
    "input_tokens": 24,
    "input_tokens_details": {"cached_tokens": 16},
    "output_tokens": 4,
    "output_tokens_details": {"reasoning_tokens": 2},
}
FIGURES = Usage(24, 16, 4, 2, "engine")


def scanner(**changed: Any) -> Scanner:
    return streams.scanner("responses", **changed)


def run(stream: bytes, **changed: Any) -> tuple[bytes, Scanner]:
    return streams.run(stream, "responses", **changed)


def added(item: dict[str, Any], index: int = 0) -> bytes:
    return typed("response.output_item.added", item={"id": f"i{index}", **item}, output_index=index)


def done(item: dict[str, Any], index: int = 0) -> bytes:
    return typed("response.output_item.done", item={"id": f"i{index}", **item}, output_index=index)


def delta(kind: str, said: Any, index: int = 0, **more: Any) -> bytes:
    return typed(f"response.{kind}.delta", delta=said, item_id=f"i{index}", output_index=index, **more)


def text(said: Any, index: int = 0) -> bytes:
    return delta("output_text", said, index, content_index=0, logprobs=[])


def end(kind: str = "completed", **response: Any) -> bytes:
    return typed(f"response.{kind}", response={**RESPONSE, "status": kind, **response}, sequence_number=9)


MESSAGE = {"type": "message", "role": "assistant", "content": [], "status": "in_progress"}
PART = {"type": "output_text", "text": "", "annotations": []}
BEGUN = (
    WAITING
    + added(MESSAGE)
    + typed("response.content_part.added", part=PART, item_id="i0", output_index=0, content_index=0, sequence_number=3)
)


# ---- usage -----------------------------------------------------------------------------------------------------------


def test_what_a_recorded_response_cost() -> None:
    """T013."""
    stream = recorded("responses")
    scan = scanner()
    assert scan.feed(stream) is stream
    assert (scan.usage(), scan.done, scan.finish_reason) == (Usage(24, 0, 4, 0, "engine"), True, "max_output_tokens")
    assert (scan.live_prompt, scan.live_completion) == (24, 4)


@pytest.mark.parametrize(
    ("kind", "response", "finish"),
    [
        ("completed", {}, "completed"),
        ("completed", {"status": None}, "completed"),
        (
            "completed",
            {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
            "max_output_tokens",
        ),
        ("incomplete", {"incomplete_details": {"reason": "content_filter"}}, "content_filter"),
        ("incomplete", {"incomplete_details": None}, "incomplete"),
        ("completed", {"incomplete_details": [], "output": 7}, "completed"),
    ],
)
def test_figures_come_with_the_end(kind: str, response: dict[str, Any], finish: str) -> None:
    out, scan = run(BEGUN + text("a") + end(kind, usage=USAGE, **response))
    assert (scan.usage(), scan.finish_reason, scan.done, scan.aborted) == (FIGURES, finish, True, False)
    assert out == BEGUN + text("a") + end(kind, usage=USAGE, **response)


@pytest.mark.parametrize(
    "usage",
    [
        None,
        [],
        {},
        {"input_tokens": 24},
        {"input_tokens": "24", "output_tokens": 4},
        {"input_tokens": 1, "output_tokens": -4},
    ],
)
def test_without_figures_that_can_be_true_what_was_seen_counts(usage: Any) -> None:
    stream = BEGUN + text("eight by") + done({**MESSAGE, "content": [{**PART, "text": "eight by"}]}) + end(usage=usage)
    assert run(stream)[1].usage() == Usage(11, 0, 2, 0, "estimated")


@pytest.mark.parametrize(
    ("said", "completion"),
    [
        (text("a") + text("b"), 2),
        (delta("reasoning_text", "eight by", content_index=0), 2),
        (delta("reasoning_summary_text", "eight by", summary_index=0), 2),
        (delta("refusal", "eight by", content_index=0), 2),
        (delta("function_call_arguments", "eight by"), 2),
        (delta("custom_tool_call_input", "eight by"), 2),
        (delta("some_new_kind", "eight by"), 2),
        (text(["eight by"]), 2),
        (text({"text": "eight by"}), 2),
        (text("北京 😀 é"), 4),
        (added({"type": "function_call", "name": "", "arguments": ""}), 0),
        (done({"type": "function_call", "call_id": "c" * 99, "name": "twelve_bytes", "arguments": "x" * 8}), 5),
        (
            added({"type": "function_call", "name": "", "arguments": ""})
            + delta("function_call_arguments", "x" * 8)
            + done({"type": "function_call", "name": "twelve_bytes", "arguments": "x" * 8}),
            5,
        ),
        (typed("response.output_text.delta", obfuscation="x" * 40, output_index=0), 0),
        (typed("response.output_text.done", text="said already", output_index=0, content_index=0), 0),
    ],
)
def test_everything_the_model_wrote_is_weighed_once(said: bytes, completion: int) -> None:
    assert run(WAITING + said)[1].usage().completion == completion


def test_a_client_that_leaves_pays_what_was_seen() -> None:
    scan = scanner()
    scan.feed(BEGUN + text("a") + text("b"))
    assert scan.usage() == Usage(11, 0, 2, 0, "counted")
    assert (scan.live_prompt, scan.live_completion, scan.live_most) == (0, 0, 13)


# ---- endings ---------------------------------------------------------------------------------------------------------


def test_events_that_come_before_the_engine_began_are_no_content() -> None:
    scan = scanner()
    queued = typed("response.queued", response=RESPONSE) + typed("response.queued")
    assert scan.feed(WAITING + queued + b": ping\n\n") == WAITING + queued + b": ping\n\n"
    assert (scan.content_seen, scan.usage(), scan.events) == (False, Usage(), 5)
    scan.feed(added(MESSAGE))
    assert scan.content_seen


@pytest.mark.parametrize(
    "ending",
    [
        end(usage={**USAGE, "output_tokens": 0}),
        end(status="cancelled", usage={**USAGE, "output_tokens": 0}),
    ],
)
def test_a_response_of_which_nothing_was_made_was_given_up(ending: bytes) -> None:
    _, scan = run(WAITING + ending)
    assert (scan.aborted, scan.finish_reason, scan.done, scan.content_seen) == (True, "abort", True, False)


def test_an_empty_reply_is_one() -> None:
    _, scan = run(WAITING + end(usage={**USAGE, "output_tokens": 1}))
    assert (scan.aborted, scan.content_seen, scan.usage().completion) == (False, True, 1)


def test_a_cancelled_response_was_given_up_but_costs() -> None:
    _, scan = run(BEGUN + text("a") + end(status="cancelled", usage=USAGE))
    assert (scan.aborted, scan.usage()) == (True, FIGURES)


@pytest.mark.parametrize(
    ("event", "code", "message"),
    [
        (typed("error", code="server_error", message="m", param=None, sequence_number=5), None, "m"),
        (typed("error", error={"message": "busy", "code": 503}), 503, "busy"),
        (streams.data({"error": {"message": "busy", "code": 503}}), 503, "busy"),
        (end("failed", error={"code": "server_error", "message": "m"}), None, "m"),
        (end("failed", error=None), None, ""),
        (typed("response.failed"), None, ""),
    ],
)
def test_an_error_event_ends_the_stream(event: bytes, code: int | None, message: str) -> None:
    out, scan = run(BEGUN + text("a") + text("b") + event + text("late"))
    assert scan.error is not None
    assert (scan.error.code, scan.error.message) == (code, message)
    assert (out, scan.usage()) == (BEGUN + text("a") + text("b"), Usage(11, 0, 2, 0, "counted"))


def test_a_failed_responses_figures_count() -> None:
    assert run(BEGUN + end("failed", usage=USAGE, error={"message": "m"}))[1].usage() == FIGURES


def test_a_done_mark_of_another_dialect_passes_and_ends_nothing() -> None:
    out, scan = run(BEGUN + streams.DONE)
    assert (out, scan.done, scan.finish_reason) == (BEGUN + streams.DONE, False, None)


def test_the_callers_name_stands_wherever_the_engines_was() -> None:
    out, _ = run(recorded("responses"), rename=("tiny", "mine"))
    assert out == recorded("responses").replace(b'"model":"tiny"', b'"model":"mine"')
    schema = {"tools": [{"parameters": {"properties": {"model": {"type": "string"}}}}]}
    for kind in ("created", "in_progress", "completed", "incomplete"):
        shown = values(run(end(kind, **schema), rename=("served", "mine"))[0])[0]["response"]
        assert shown == {**RESPONSE, "status": kind, **schema, "model": "mine"}


# ---- cuts ------------------------------------------------------------------------------------------------------------


def cut(stream: bytes, **changed: Any) -> list[Any]:
    scan = scanner(**changed)
    scan.feed(stream)
    ending = values(scan.cut())
    assert (scan.done, scan.finish_reason, scan.feed(text("late")), scan.end(), scan.cut()) == (
        True, "max_output_tokens", b"", b"", b"",
    )  # fmt: skip
    return ending


def test_a_cut_closes_the_open_text_and_ends_with_the_response_so_far() -> None:
    ending = cut(BEGUN + text("a ") + text("weir") + b"event: resp", rename=("served", "mine"))
    at = {"item_id": "i0", "output_index": 0}
    part = {**PART, "text": "a weir"}
    item = {"id": "i0", **MESSAGE, "content": [part], "status": "incomplete"}
    assert ending == [
        {"type": "response.output_text.done", **at, "content_index": 0, "logprobs": [], "text": "a weir", "sequence_number": 4},
        {"type": "response.content_part.done", **at, "content_index": 0, "part": part, "sequence_number": 5},
        {"type": "response.output_item.done", "item": item, "output_index": 0, "sequence_number": 6},
        {
            "type": "response.incomplete",
            "response": {
                **RESPONSE,
                "model": "mine",
                "status": "incomplete",
                "incomplete_details": {"reason": "max_output_tokens"},
                "output": [item],
                "usage": {
                    "input_tokens": 11,
                    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                    "output_tokens": 2,
                    "output_tokens_details": {"reasoning_tokens": 0},
                    "total_tokens": 13,
                },
            },
            "sequence_number": 7,
        },
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("item", "kind", "member"),
    [
        ("function_call", "function_call_arguments", "arguments"),
        ("custom_tool_call", "custom_tool_call_input", "input"),
        ("mcp_call", "mcp_call_arguments", "arguments"),
        ("code_interpreter_call", "code_interpreter_call_code", "code"),
    ],
)
def test_a_cut_closes_an_open_call(item: str, kind: str, member: str) -> None:
    call = {"type": item, "name": "get_time", member: "", "status": "in_progress"}
    ending = cut(WAITING + added(call) + delta(kind, '{"zo') + delta(kind, 'ne"'))
    assert [event["type"] for event in ending] == [
        f"response.{kind}.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert (ending[0][member], ending[0]["item_id"]) == ('{"zone"', "i0")
    assert ending[1]["item"] == {"id": "i0", **call, member: '{"zone"', "status": "incomplete"}
    assert ending[2]["response"]["output"] == [ending[1]["item"]]


@pytest.mark.parametrize(
    ("part", "index", "kind", "adds", "member"),
    [
        ("reasoning_text", "content_index", "reasoning_text", "content_part", "content"),
        ("summary_text", "summary_index", "reasoning_summary_text", "reasoning_summary_part", "summary"),
    ],
)
def test_a_cut_closes_open_thoughts(part: str, index: str, kind: str, adds: str, member: str) -> None:
    thoughts = {"type": "reasoning", "summary": [], "status": None}
    opened = typed(
        f"response.{adds}.added", part={"type": part, "text": ""}, item_id="i0", output_index=0, **{index: 0}
    )
    ending = cut(WAITING + added(thoughts) + opened + delta(kind, "hm", **{index: 0}))
    assert [event["type"] for event in ending] == [
        f"response.{kind}.done", f"response.{adds}.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert (ending[0]["text"], ending[0][index], ending[1][index]) == ("hm", 0, 0)
    assert ending[1]["part"] == {"type": part, "text": "hm"}
    assert ending[2]["item"] == {"id": "i0", **thoughts, member: [{"type": part, "text": "hm"}], "status": "incomplete"}


def test_what_is_closed_already_is_part_of_the_response_and_not_closed_again() -> None:
    thoughts = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    first = typed("response.content_part.done", part={**PART, "text": "one"}, output_index=1, content_index=0)
    second = typed("response.content_part.added", part=PART, output_index=1, content_index=1)
    opened = typed("response.content_part.added", part=PART, output_index=1, content_index=0)
    stream = WAITING + added(thoughts) + done(thoughts) + added(MESSAGE, 1) + opened + text("one", 1) + first + second
    ending = cut(stream)
    assert [event["type"] for event in ending[:2]] == ["response.output_text.done", "response.content_part.done"]
    assert [event["content_index"] for event in ending[:2]] == [1, 1]
    output = ending[-1]["response"]["output"]
    assert output[0] == {"id": "i0", **thoughts}
    assert [part["text"] for part in output[1]["content"]] == ["one", ""]


def test_a_cut_before_the_first_item_is_an_empty_response() -> None:
    (ending,) = cut(WAITING)
    assert (ending["sequence_number"], ending["response"]["output"], ending["response"]["id"]) == (2, [], "resp_1")


def test_a_cut_before_the_first_event_is_still_a_proper_end() -> None:
    (ending,) = cut(b"", rename=("served", "mine"))
    assert (ending["type"], ending["response"]["model"]) == ("response.incomplete", "mine")


def test_a_recorded_response_cut_after_any_event_says_what_was_shown() -> None:
    events = [event + b"\n\n" for event in recorded("responses").split(b"\n\n")[:-2]]
    for count in range(1, len(events) + 1):
        scan = scanner()
        shown = values(scan.feed(b"".join(events[:count])) + scan.cut())
        said = "".join(event["delta"] for event in shown if event["type"] == "response.output_text.delta")
        kinds = [event["type"] for event in shown]
        assert [event["sequence_number"] for event in shown] == list(range(len(shown)))
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")
        assert kinds.count("response.content_part.added") == kinds.count("response.content_part.done")
        output = shown[-1]["response"]["output"]
        assert "".join(part["text"] for item in output for part in item["content"]) == said


def test_what_ended_is_not_cut() -> None:
    scan = scanner()
    scan.feed(recorded("responses"))
    assert scan.cut() == b""
