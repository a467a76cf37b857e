"""Recorded streams of vLLM 0.32: what the scanner makes of them. `wire/*.sse` are bodies as they came."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine_adapter import events
from engine_adapter.events import Scanner
from engine_adapter.usage import Usage

WIRE = Path(__file__).with_name("wire")

ANSWERS: dict[str, tuple[dict[str, Any], Usage, str]] = {
    "chat_usage": ({}, Usage(16, 0, 4, 0, "engine"), "length"),
    "chat_running_usage": ({}, Usage(16, 0, 4, 0, "engine"), "length"),
    "chat_two_choices_running_usage": ({"choices": 2}, Usage(16, 0, 6, 0, "engine"), "length"),
    "chat_end_at_once": ({}, Usage(16, 0, 1, 0, "engine"), "stop"),
    "chat_logprobs": ({}, Usage(16, 0, 2, 0, "engine"), "length"),
    "chat_tools_usage": ({}, Usage(338, 256, 73, 0, "engine"), "stop"),
    "chat_tools_running_usage": ({}, Usage(338, 256, 73, 0, "engine"), "tool_calls"),
    "chat_reasoning_running_usage": ({}, Usage(25, 0, 12, 5, "engine"), "length"),
    "completions_running_usage": ({}, Usage(3, 0, 3, 0, "engine"), "length"),
    "completions_two_prompts_running_usage": ({"choices": 2, "prompts": 2}, Usage(5, 0, 4, 0, "engine"), "length"),
    "chat": ({}, Usage(11, 0, 6, 0, "estimated"), "length"),
}
RUNNING = [name for name in ANSWERS if name.endswith("running_usage")]


def stream_of(name: str) -> bytes:
    return (WIRE / f"{name}.sse").read_bytes()


def scanner(name: str, **changed: Any) -> Scanner:
    endpoint: Any = name.partition("_")[0]
    unasked = {"wants_usage": False, "wants_live_usage": False, "wants_token_ids": False}
    settings = {**unasked, "choices": 1, "prompt_estimate": 11, "rename": None}
    return events.scanner(endpoint, **{**settings, **ANSWERS[name][0], **changed})


def values(stream: bytes) -> list[Any]:
    lines = stream.removesuffix(b"data: [DONE]\n\n").removesuffix(b"\n\n").split(b"\n\n")
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


@pytest.mark.parametrize("name", ANSWERS)
def test_what_a_recorded_stream_cost(name: str) -> None:
    _, usage, finish = ANSWERS[name]
    scan = scanner(name)
    scan.feed(stream_of(name))
    assert (scan.usage(), scan.finish_reason, scan.done) == (usage, finish, True)
    if usage.source == "engine":
        assert scan.live_prompt + scan.live_completion == usage.total


@pytest.mark.parametrize("name", ANSWERS)
def test_who_did_not_ask_gets_the_same_stream_without_usage(name: str) -> None:
    shown = scanner(name).feed(stream_of(name))
    kept = [
        {key: value for key, value in event.items() if key != "usage"}
        for event in values(stream_of(name))
        if event["choices"]
    ]
    assert values(shown) == kept
    assert shown.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("name", RUNNING)
def test_who_asked_for_the_sum_gets_what_vllm_sends_for_that(name: str) -> None:
    shown = values(scanner(name, wants_usage=True).feed(stream_of(name)))
    assert ["usage" in event for event in shown] == [False] * (len(shown) - 1) + [True]
    assert shown[-1] == values(stream_of(name))[-1]


@pytest.mark.parametrize("name", ANSWERS)
def test_who_asked_for_all_gets_the_very_bytes(name: str) -> None:
    stream = stream_of(name)
    assert scanner(name, wants_usage=True, wants_live_usage=True).feed(stream) is stream


@pytest.mark.parametrize("name", ANSWERS)
def test_every_event_is_renamed(name: str) -> None:
    shown = scanner(name, rename=("tiny", "mine")).feed(stream_of(name))
    assert {event["model"] for event in values(shown)} == {"mine"}
    assert shown.replace(b'"model":"mine"', b'"model":"tiny"') == scanner(name).feed(stream_of(name))


@pytest.mark.parametrize("name", ANSWERS)
def test_cut_at_every_place_the_answer_is_the_same(name: str) -> None:
    stream = stream_of(name)
    whole = scanner(name, rename=("tiny", "mine"))
    shown = whole.feed(stream)
    for at in range(0, len(stream), 7 if len(stream) > 3000 else 1):
        scan = scanner(name, rename=("tiny", "mine"))
        assert scan.feed(stream[:at]) + scan.feed(stream[at:]) + scan.end() == shown
        assert scan.usage() == whole.usage()


@pytest.mark.parametrize("name", RUNNING)
def test_a_client_that_leaves_after_any_event_pays_what_was_made(name: str) -> None:
    """Running figures are exact: the newest of each choice, the prompt of each that has begun."""
    scan = scanner(name)
    made: dict[int, int] = {}
    for event in values(stream_of(name)):
        scan.feed(b"data: " + json.dumps(event).encode() + b"\n\n")
        for choice in event["choices"]:
            made[choice["index"]] = event["usage"]["completion_tokens"]
        assert scan.usage().completion == scan.live_completion == sum(made.values())


def test_vllm_that_dies_says_so_before_its_done() -> None:
    """Recorded: the engine's process killed in the middle of an answer."""
    error = (
        b'data: {"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause.", '
    )
    error += b'"type": "InternalServerError", "param": null, "code": 500}}\n\n'
    opening = stream_of("chat").split(b"\n\n")
    scan = scanner("chat")
    shown = scan.feed(b"\n\n".join(opening[:3]) + b"\n\n" + error + b"data: [DONE]\n\n")
    assert shown == b"\n\n".join(opening[:3]) + b"\n\n"
    assert scan.error is not None
    assert (scan.error.code, scan.error.message[:10], scan.done) == (500, "EngineCore", False)
    assert scan.usage() == Usage(11, 0, 2, 0, "counted")


def test_vllm_that_is_stopped_says_abort() -> None:
    """Recorded: SIGTERM with the default shutdown timeout."""
    stream = b"""\
data: {"id":"chatcmpl-9d19d4c5ce46ffe2","object":"chat.completion.chunk","created":1796143161,"model":"tiny","choices":[{"index":0,"delta":{"content":" subclass"},"logprobs":null,"finish_reason":"abort","stop_reason":null,"token_ids":null}]}

data: {"id":"chatcmpl-9d19d4c5ce46ffe2","object":"chat.completion.chunk","created":1796143161,"model":"tiny","choices":[],"usage":{"prompt_tokens":24,"total_tokens":117,"completion_tokens":93},"system_fingerprint":"vllm-0.32.0-7cc16e7b"}

data: [DONE]

"""
    scan = scanner("chat")
    scan.feed(stream)
    assert (scan.aborted, scan.done, scan.usage()) == (True, True, Usage(24, 0, 93, 0, "engine"))
