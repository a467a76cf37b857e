"""Clients and workers that do not keep to the usual road."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.simulator import parse_fault
from tests.gateway.house import CHAT, HELLO, House, until
from tests.gateway.stub import answered, worker

STREAM = {**HELLO, "stream": True}
ABORTED = json.dumps(
    {
        "choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "abort"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1},
    }
).encode()


async def asked_raw(house: House, head: bytes, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", house.sidecar.ports.traffic)
    fields = f"Authorization: Bearer {house.secret}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    writer.write(head + fields + body)
    return reader, writer


@pytest.mark.parametrize(
    ("fault", "body"),
    [("delay:0.3", HELLO), ("first:0.3", STREAM), ("", {**STREAM, "max_tokens": 40})],
    ids=["before the head", "before the first event", "after some events"],
)
async def test_with_drain_a_client_that_leaves_does_not_stop_the_engine(
    tmp_path: Path, fault: str, body: dict[str, Any]
) -> None:
    async with House(tmp_path, tier={"on_hangup": "drain"}) as house:
        house.large.faults = parse_fault(fault)
        house.large.tokens_per_second = 200
        reader, writer = await asked_raw(
            house, b"POST %b HTTP/1.1\r\nHost: x\r\n" % CHAT.encode(), json.dumps(body).encode()
        )
        if not fault:
            await reader.readuntil(b"\n\n")
        else:
            await until(lambda: asyncio.sleep(0, len(house.large.requests)), bool)
        writer.transport.abort()
        row = (await house.rows())[0]
        assert (row.ending, row.reason, row.usage_source) == ("client_gone", "drained", "engine")
        assert row.completion_tokens == body["max_tokens"] == house.large.generation_tokens_total
        assert (await house.windows())["hour"]["used"] == row.prompt_tokens + row.completion_tokens


async def test_a_client_that_reads_nothing_is_cut_and_the_engine_stops(tmp_path: Path) -> None:
    tier = {"rate": None, "burst": None, "cap": None, "max_output_tokens": None}
    async with House(tmp_path, tier=tier, backends={"u1": {"idle_seconds": 0.5}}) as house:
        body = json.dumps({**STREAM, "max_tokens": 30_000}).encode()
        _, writer = await asked_raw(house, b"POST %b HTTP/1.1\r\nHost: x\r\n" % CHAT.encode(), body)
        row = (await house.rows())[0]
        assert row.ending == "client_gone"
        assert row.completion_tokens < 30_000
        assert house.large.running == 0
        writer.close()


async def test_an_http_1_0_client_sees_the_end_of_a_stream_as_the_end_of_its_connection(tmp_path: Path) -> None:
    async with House(tmp_path) as house:
        head = b"POST %b HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\n" % CHAT.encode()
        reader, writer = await asked_raw(house, head, json.dumps(STREAM).encode())
        assert (await reader.read()).endswith(b"data: [DONE]\n\n")
        writer.close()


async def test_a_target_in_absolute_form_is_its_path_here_whatever_host_it_names(tmp_path: Path) -> None:
    async with House(tmp_path) as house:
        head = b"POST http://elsewhere.test%b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" % CHAT.encode()
        reader, writer = await asked_raw(house, head, json.dumps(HELLO).encode())
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.parametrize(
    ("answer", "status", "ending"),
    [
        (b'{"error":{"message":"m","code":503}}', 502, "engine_unavailable"),
        (ABORTED, 503, "engine_unavailable"),
        (b'[1]', 502, "engine_unavailable"),
    ],
    ids=["an error in a 200", "an aborted answer", "no object"],
)  # fmt: skip
async def test_a_200_that_is_no_answer_is_a_failure_and_costs_nothing(
    tmp_path: Path, answer: bytes, status: int, ending: str
) -> None:
    async with (
        worker(answered(answer, b"Content-Type: application/json")) as stub,
        House(tmp_path, tier={"on_outage": "reject"}, backends={"u1": {"url": stub.url}}) as house,
    ):
        assert (await house.post()).status == status
        row = (await house.rows())[0]
        assert (row.ending, row.completion_tokens, row.prompt_tokens) == (ending, 0, 0)


@pytest.mark.parametrize("field", [(), (b"Content-Type: application/octet-stream",)], ids=["no type", "another type"])
async def test_a_stream_need_not_say_what_it_is(tmp_path: Path, field: tuple[bytes, ...]) -> None:
    event = {"id": "c", "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}
    usage = {"id": "c", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}}
    stream = b"".join(b"data: %b\n\n" % json.dumps(item).encode() for item in (event, usage)) + b"data: [DONE]\n\n"
    async with (
        worker(answered(stream, *field)) as stub,
        House(tmp_path, backends={"u1": {"url": stub.url}}) as house,
    ):
        answer = await house.post(STREAM)
        row = (await house.rows())[0]
        assert (answer.status, answer.events[-1]) == (200, "[DONE]")
        assert (row.prompt_tokens, row.completion_tokens, row.ending) == (3, 1, "completed")


@pytest.mark.parametrize(
    "change",
    [{"n": 2**53, "max_tokens": 2**53}, {"prompt": ["a"] * 3000, "max_tokens": 2**53}],
    ids=["many choices", "many prompts"],
)
async def test_more_than_any_limit_allows_is_refused_and_not_a_failure(tmp_path: Path, change: dict[str, Any]) -> None:
    tier = {"max_n": None, "max_output_tokens": None, "cap": {"tokens": 10**15, "seconds": 3600}, "on_cap": "refuse"}
    async with House(tmp_path, tier=tier) as house:
        answer = await house.post({"model": "m1", "prompt": "a", **change}, path="/v1/completions")
        assert (answer.status, answer.json["error"]["code"]) == (413, "request_exceeds_quota")


async def test_tags_that_are_no_text_are_refused(tmp_path: Path) -> None:
    async with House(tmp_path) as house:
        head = b"POST %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\nx-weir-tags: a=\xff\xfe\r\n" % CHAT.encode()
        reader, writer = await asked_raw(house, head, json.dumps(HELLO).encode())
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()
