"""The scanner of /v1/messages. Streams are written by hand, or recorded of vLLM 0.32."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine_adapter.events import Scanner
from engine_adapter.usage import Usage
from tests.engine_adapter import streams
from tests.engine_adapter.streams import recorded, typed, values

MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "content": [], "model": "served"}
PING = typed("ping")
STOP = typed("message_stop")


def scanner(**changed: Any) -> Scanner:
    return streams.scanner("messages", **changed)


def run(stream: bytes, **changed: Any) -> tuple[bytes, Scanner]:
    return streams.run(stream, "messages", **changed)


def start(**usage: Any) -> bytes:
    return typed("message_start", message={**MESSAGE, "stop_reason": None, "stop_sequence": None, "usage": usage})


def block(index: int = 0, **content: Any) -> bytes:
    return typed("content_block_start", content_block=content or {"type": "text", "text": ""}, index=index)


def piece(index: int = 0, **delta: Any) -> bytes:
    return typed("content_block_delta", delta=delta, index=index)


def text(said: str, index: int = 0) -> bytes:
    return piece(index, type="text_delta", text=said)


def closed(index: int = 0) -> bytes:
    return typed("content_block_stop", index=index)


def end(reason: Any = "end_turn", **usage: Any) -> bytes:
    return typed("message_delta", delta={"stop_reason": reason, "stop_sequence": None}, usage=usage)


OPENING = start(input_tokens=24, output_tokens=0)
ANSWERED = OPENING + block() + text("a") + text("b") + closed()


def engine(prompt: int, completion: int, cached: int = 0) -> Usage:
    return Usage(prompt, cached, completion, 0, "engine")


# ---- usage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "usage", "finish"),
    [
        ("messages", engine(24, 4), "max_tokens"),
        ("messages_stop_sequence", engine(24, 4), "stop_sequence"),
        ("messages_cached", engine(1069, 2, cached=1024), "max_tokens"),
        ("messages_thinking", engine(24, 4), "max_tokens"),
    ],
)
def test_what_a_recorded_message_cost(name: str, usage: Usage, finish: str) -> None:
    stream = recorded(name)
    scan = scanner()
    assert scan.feed(stream) is stream
    assert (scan.usage(), scan.finish_reason, scan.done, scan.aborted) == (usage, finish, True, False)
    assert (scan.live_prompt, scan.live_completion) == (usage.prompt, usage.completion)


@pytest.mark.parametrize(
    ("first", "last", "usage"),
    [
        ({"input_tokens": 9, "output_tokens": 1}, {"output_tokens": 4}, engine(9, 4)),
        ({"input_tokens": 9}, {"output_tokens": 4}, engine(9, 4)),
        ({}, {"input_tokens": 9, "output_tokens": 4}, engine(9, 4)),
        (
            {"input_tokens": 2, "cache_creation_input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 1},
            {"output_tokens": 5},
            engine(9, 5, cached=4),
        ),
        (
            {"input_tokens": 9, "output_tokens": 0},
            {"input_tokens": 2, "cache_creation_input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 5},
            engine(9, 5, cached=4),
        ),
        ({"input_tokens": 9, "output_tokens": 0}, {"output_tokens": 0}, engine(9, 0)),
    ],
)
def test_input_is_the_sum_of_its_parts_and_figures_not_said_again_stay(
    first: dict[str, int], last: dict[str, int], usage: Usage
) -> None:
    assert run(start(**first) + block() + text("a") + closed() + end(**last) + STOP)[1].usage() == usage


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"output_tokens": "4"},
        {"input_tokens": -1, "output_tokens": 4},
        {"input_tokens": 9, "cache_read_input_tokens": -1, "output_tokens": 4},
        {"input_tokens": 10**15, "output_tokens": 4},
    ],
)
def test_figures_that_cannot_be_true_are_ignored(bad: dict[str, Any]) -> None:
    stream = start(**bad) + block() + text("eight by") + closed() + end(**bad) + STOP
    assert run(stream)[1].usage() == Usage(11, 0, 2, 0, "estimated")


@pytest.mark.parametrize(
    ("said", "completion"),
    [
        (block() + text("a") + text("b"), 2),
        (block(type="thinking", thinking="") + piece(type="thinking_delta", thinking="twelve bytes"), 3),
        (block(type="thinking", thinking="") + piece(type="signature_delta", signature="x" * 40), 0),
        (block(type="tool_use", id="toolu_1", name="get_time", input={}) + piece(type="input_json_delta", partial_json='{"a"'), 3),
        (block(type="text", text="eight by"), 2),
        (block() + piece(type="text_delta", text=["eight by"]), 2),
        (block() + piece(type="text_delta", text="北京 😀 é"), 4),
    ],
)  # fmt: skip
def test_without_figures_everything_the_model_wrote_is_weighed(said: bytes, completion: int) -> None:
    assert run(OPENING + said)[1].usage().completion == completion
    assert run(OPENING + said)[1].live_most == 24 + completion


def test_a_client_that_leaves_pays_the_input_and_what_was_seen() -> None:
    scan = scanner()
    scan.feed(OPENING + block() + text("a") + text("b"))
    assert scan.usage() == Usage(24, 0, 2, 0, "counted")
    assert (scan.live_prompt, scan.live_completion, scan.live_most) == (24, 0, 26)


# ---- endings ---------------------------------------------------------------------------------------------------------


def test_a_start_and_pings_are_no_content_yet() -> None:
    scan = scanner()
    assert scan.feed(OPENING + PING) == OPENING + PING
    assert (scan.content_seen, scan.events) == (False, 2)
    scan.feed(block())
    assert scan.content_seen


def test_a_message_of_which_nothing_was_made_was_given_up() -> None:
    """Recorded of a vLLM that got SIGTERM."""
    stream = recorded("messages_abort")
    out, scan = run(stream)
    assert (out, scan.aborted, scan.finish_reason, scan.content_seen, scan.done) == (stream, True, "abort", False, True)


def test_a_message_without_a_stop_reason_was_given_up() -> None:
    """vLLM has no stop reason for what it broke off in the middle."""
    _, scan = run(ANSWERED + end(None, output_tokens=2) + STOP)
    assert (scan.aborted, scan.finish_reason, scan.usage()) == (True, "abort", engine(24, 2))


@pytest.mark.parametrize("usage", [{"output_tokens": 1}, {}])
def test_an_empty_reply_is_one(usage: dict[str, int]) -> None:
    _, scan = run(OPENING + end(**usage) + STOP)
    assert (scan.aborted, scan.finish_reason, scan.content_seen) == (False, "end_turn", True)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        ({"type": "overloaded_error", "message": "busy"}, 503, "busy"),
        ({"type": "rate_limit_error", "message": "slow down"}, 429, "slow down"),
        ({"type": "api_error", "message": "m"}, None, "m"),
        ({"type": ["odd"], "message": 5}, None, ""),
        ("Unauthorized", None, "Unauthorized"),
        (None, None, ""),
    ],
)
def test_an_error_event_ends_the_stream(error: Any, code: int | None, message: str) -> None:
    event = typed("error", error=error)
    out, scan = run(ANSWERED + event + text("late") + STOP)
    assert scan.error is not None
    assert (scan.error.code, scan.error.message, scan.error.raw) == (
        code,
        message,
        event.partition(b"data: ")[2].rstrip(),
    )
    assert (out, scan.usage(), scan.done) == (ANSWERED, Usage(24, 0, 2, 0, "counted"), False)


def test_the_status_of_an_error_that_vllm_garbled_is_found() -> None:
    """Recorded of a vLLM whose queue was full."""
    out, scan = run(recorded("messages_busy"))
    assert scan.error is not None
    assert (out, scan.error.code, scan.error.message) == (b"", 503, "")


def test_the_callers_name_stands_where_the_engines_was() -> None:
    out, _ = run(recorded("messages"), rename=("tiny", "mine"))
    assert out == recorded("messages").replace(b'"model":"tiny"', b'"model":"mine"')
    twice = start(x={"model": "tiny"})
    assert values(run(twice, rename=("served", "mine"))[0])[0]["message"]["model"] == "mine"


# ---- cuts ------------------------------------------------------------------------------------------------------------


def test_a_cut_closes_what_is_open_and_says_why_and_what_it_cost() -> None:
    scan = scanner()
    scan.feed(start(input_tokens=20, cache_read_input_tokens=4, output_tokens=0) + block() + text("a") + closed())
    scan.feed(block(1) + text("b", 1) + b"event: content_bl")
    assert scan.cut() == closed(1) + end("max_tokens", input_tokens=20, output_tokens=2) + STOP
    assert (scan.done, scan.finish_reason, scan.usage()) == (True, "max_tokens", Usage(24, 4, 2, 0, "counted"))
    assert (scan.feed(text("late")), scan.end(), scan.cut()) == (b"", b"", b"")


def test_a_cut_after_the_stop_reason_only_stops() -> None:
    scan = scanner()
    scan.feed(ANSWERED + end(output_tokens=2))
    assert (scan.cut(), scan.finish_reason, scan.usage()) == (STOP, "end_turn", engine(24, 2))


def test_a_cut_before_the_first_event_is_still_a_message() -> None:
    ending = values(scanner(rename=("served", "mine")).cut())
    assert [event["type"] for event in ending] == ["message_start", "message_delta", "message_stop"]
    assert (ending[0]["message"]["model"], ending[0]["message"]["usage"]) == (
        "mine",
        {"input_tokens": 11, "output_tokens": 0},
    )


def test_what_ended_is_not_cut() -> None:
    scan = scanner()
    scan.feed(ANSWERED + end(output_tokens=2) + STOP)
    assert scan.cut() == b""


@pytest.mark.parametrize("name", ["messages", "messages_thinking"])
def test_a_recorded_message_cut_after_any_event_is_one_that_ends(name: str) -> None:
    events = [event + b"\n\n" for event in recorded(name).split(b"\n\n")[:-3]]
    for count in range(1, len(events) + 1):
        scan = scanner()
        shown = values(scan.feed(b"".join(events[:count])) + scan.cut())
        kinds = [event["type"] for event in shown]
        assert kinds.count("content_block_start") == kinds.count("content_block_stop")
        assert kinds[-2:] == ["message_delta", "message_stop"]
        assert shown[-2]["usage"] == {"input_tokens": 24, "output_tokens": scan.usage().completion}
        assert json.dumps(shown).count("max_tokens") == 1
