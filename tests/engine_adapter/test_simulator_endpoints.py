"""Responses, messages, rerank and score at the simulated worker: what they count, and how they end."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine_adapter.simulator import Simulator
from engine_adapter.simulator.faults import parse_fault
from tests.engine_adapter.raw_worker import RawAnswer, raw_request

MESSAGES = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
RESPONSES = {"input": "Hello", "max_output_tokens": 3}
STREAMS = {"/v1/messages": MESSAGES, "/v1/responses": RESPONSES}


@pytest.fixture
async def simulator() -> AsyncIterator[Simulator]:
    simulator = Simulator()
    yield simulator
    await simulator.stop()


async def asked(simulator: Simulator, path: str, body: dict[str, Any]) -> RawAnswer:
    port = await simulator.start()
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return await raw_request(port, head.encode() + data)


def events(answer: RawAnswer) -> list[dict[str, Any]]:
    lines = b"".join(answer.chunks).decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("path", STREAMS)
async def test_usage_is_what_the_engine_counts(simulator: Simulator, path: str) -> None:
    plain = json.loads((await asked(simulator, path, STREAMS[path])).body)["usage"]
    assert (plain["input_tokens"], plain["output_tokens"]) == (simulator.prompt_tokens_total, 3)
    assert simulator.generation_tokens_total == 3


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_says_what_the_plain_answer_says(simulator: Simulator, path: str) -> None:
    answer = await asked(simulator, path, {**STREAMS[path], "stream": True})
    said = events(answer)
    assert [each["type"] for each in said[-1:]] == ["message_stop" if "messages" in path else "response.completed"]
    last = said[-2] if "messages" in path else said[-1]["response"]
    assert (last["usage"]["input_tokens"], last["usage"]["output_tokens"]) == (simulator.prompt_tokens_total, 3)
    assert [each["sequence_number"] for each in said] == list(range(len(said))) if "responses" in path else True
    assert b"[DONE]" not in b"".join(answer.chunks)


@pytest.mark.parametrize("path", STREAMS)
async def test_an_engine_that_dies_says_so_in_the_stream(simulator: Simulator, path: str) -> None:
    simulator.faults = parse_fault("error:2")
    answer = await asked(simulator, path, {**STREAMS[path], "stream": True})
    said = events(answer)
    assert said[-1]["type"] == "error"
    assert not any(each["type"] in ("message_stop", "response.completed") for each in said)
    assert simulator.engine.finished == {"error": 1}


async def test_a_message_given_up_before_its_first_token_says_that_it_ended(simulator: Simulator) -> None:
    """As vLLM on SIGTERM."""
    simulator.faults = parse_fault("abort:0")
    said = events(await asked(simulator, "/v1/messages", {**MESSAGES, "stream": True}))
    assert [each["type"] for each in said] == ["message_start", "message_delta", "message_stop"]
    assert said[1]["delta"]["stop_reason"] == "end_turn"
    assert said[1]["usage"]["output_tokens"] == 0


async def test_instructions_and_items_enter_the_prompt(simulator: Simulator) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "a b c"},
    ]
    short = json.loads((await asked(simulator, "/v1/responses", RESPONSES)).body)["usage"]["input_tokens"]
    await simulator.stop()
    long = json.loads((await asked(simulator, "/v1/responses", {"input": items, "instructions": "Be short."})).body)
    assert long["usage"]["input_tokens"] > short + 8
    assert long["instructions"] == "Be short."


async def test_blocks_and_system_enter_the_prompt_and_are_counted_for_free(simulator: Simulator) -> None:
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "a b c"}]},
    ]
    body = {"messages": blocks, "system": "Be short.", "max_tokens": 1}
    counted = json.loads((await asked(simulator, "/v1/messages/count_tokens", body)).body)["input_tokens"]
    assert simulator.prompt_tokens_total == 0
    await simulator.stop()
    used = json.loads((await asked(simulator, "/v1/messages", body)).body)["usage"]["input_tokens"]
    assert counted == used == simulator.prompt_tokens_total


@pytest.mark.parametrize(
    ("path", "body", "numbers"),
    [
        ("/v1/score", {"text_1": "a b", "text_2": "c"}, 1),
        ("/v1/score", {"queries": "a b", "documents": ["c", "d e"]}, 2),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d"]}, 2),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c d", "e"]}, 3),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c d", "e"], "top_n": 2}, 2),
    ],
)
async def test_pairs_are_read_and_counted(simulator: Simulator, path: str, body: dict[str, Any], numbers: int) -> None:
    answer = json.loads((await asked(simulator, path, body)).body)
    found = answer["data"] if "score" in path else answer["results"]
    assert len(found) == numbers
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == simulator.prompt_tokens_total
    if "rerank" in path:
        scores = [each["relevance_score"] for each in found]
        assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": "a"}, "body.text_2"),
        ("/v1/rerank", {"documents": ["a"]}, "body.query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "body.documents"),
        ("/v1/responses", {"max_output_tokens": 1}, "body.input"),
        ("/v1/messages", {"max_tokens": 1}, "body.messages"),
    ],
)
async def test_what_is_missing_is_named(simulator: Simulator, path: str, body: dict[str, Any], param: str) -> None:
    answer = await asked(simulator, path, body)
    assert (answer.status, json.loads(answer.body)["error"]["param"]) == (400, param)
