"""From a client's request to the record in the ledger, over real sockets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.simulator import parse_fault
from tests.gateway.house import CHAT, HELLO, House, until

STREAM = {**HELLO, "stream": True}
FALLBACK = {"rate": {"tokens": 100, "seconds": 60}, "burst": None, "cap": None}


async def test_a_plain_answer_is_passed_on_and_booked_with_its_price(tmp_path: Path) -> None:
    async with House(tmp_path) as house:
        answer = await house.post(headers={"x-request-id": "mine-1", "x-weir-tags": "feature=a"})
        row = (await house.rows())[0]
        usage = answer.json["usage"]
        assert answer.status == 200
        assert (row.prompt_tokens, row.completion_tokens) == (usage["prompt_tokens"], 16)
        assert (row.usage_source, row.ending, row.route, row.verdict) == ("engine", "completed", "primary", "base")
        assert (row.model_requested, row.model_served, row.backend) == ("m1", "m1", "u1")
        assert row.tags == {"feature": "a"}
        assert row.cost_nanousd == usage["prompt_tokens"] * 1_000 + 16 * 2_000
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.headers["x-weir-request-id"] == str(row.request_id)
        assert (answer.headers["x-weir-verdict"], answer.headers["x-weir-backend"]) == ("base", "u1")
        assert (await house.windows())["minute"]["used"] == row.prompt_tokens + 16


async def test_a_stream_asks_the_engine_for_usage_and_hides_what_nobody_asked_for(tmp_path: Path) -> None:
    async with House(tmp_path) as house:
        answer = await house.post(STREAM)
        row = (await house.rows())[0]
        sent = json.loads(house.large.requests[-1].body)
        assert (sent["return_token_ids"], sent["stream_options"]) == (True, {"include_usage": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.events[-1] == "[DONE]"
        assert all('"usage"' not in event and '_ids":[' not in event for event in answer.events)
        assert (row.completion_tokens, row.usage_source, row.streamed) == (16, "engine", True)
        assert row.first_token_ms is not None


async def test_a_client_that_asked_for_usage_gets_it_once(tmp_path: Path) -> None:
    async with House(tmp_path) as house:
        answer = await house.post({**STREAM, "stream_options": {"include_usage": True}})
        with_usage = [json.loads(event) for event in answer.events[:-1] if '"usage"' in event]
        assert [event["choices"] for event in with_usage] == [[]]
        assert with_usage[0]["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "m1", "prompt": "one two three", "max_tokens": 5}),
        ("/v1/completions", {"model": "m1", "prompt": ["one two", "three"], "max_tokens": 5, "stream": True}),
        ("/v1/completions", {"model": "m1", "prompt": ["one two", "three"], "max_tokens": 5, "n": 2}),
        ("/v1/completions", {"model": "m1", "prompt": "one two", "max_tokens": 5, "best_of": 2, "stream": True}),
        ("/v1/chat/completions", {**HELLO, "n": 3}),
        ("/v1/chat/completions", {**STREAM, "n": 3}),
        ("/v1/embeddings", {"model": "m1", "input": "one two three"}),
        ("/v1/responses", {"model": "m1", "input": "one two three", "max_output_tokens": 5}),
        ("/v1/responses", {"model": "m1", "input": "one two three", "max_output_tokens": 5, "stream": True}),
        ("/v1/messages", HELLO),
        ("/v1/messages", STREAM),
        ("/v1/rerank", {"model": "m1", "query": "which is it", "documents": ["one two", "three"]}),
        ("/v1/score", {"model": "m1", "text_1": "which is it", "text_2": ["one two", "three"]}),
    ],
)
async def test_what_the_engine_itself_counts_is_on_record(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async with House(tmp_path) as house:
        answer = await house.post(body, path=path)
        row = (await house.rows())[0]
        assert answer.status == 200
        assert (row.endpoint, row.usage_source) == (path, "engine")
        assert row.engine_prompt_tokens == house.large.prompt_tokens_total
        assert row.engine_completion_tokens == row.completion_tokens == house.large.generation_tokens_total


async def test_overage_is_served_by_the_cheaper_backend_under_its_own_name(tmp_path: Path) -> None:
    async with House(tmp_path, tier=FALLBACK) as house:
        first = await house.post({**HELLO, "max_tokens": 60})
        second = await house.post({**HELLO, "max_tokens": 60})
        rows = await house.rows(2)
        assert [a.headers["x-weir-verdict"] for a in (first, second)] == ["base", "overflow"]
        assert json.loads(house.cheap.requests[-1].body)["model"] == "m2"
        assert (rows[1].backend, rows[1].model_requested, rows[1].model_served) == ("u2", "m1", "m2")
        assert (rows[1].route, rows[1].verdict) == ("overflow", "overflow")
        assert second.json["model"] == "m1"
        assert second.headers["x-weir-model"] == "m2"
        assert (await house.windows())["minute"]["used"] == rows[0].prompt_tokens + 60


async def test_a_request_may_refuse_the_cheaper_backend_and_learns_when_to_come_back(tmp_path: Path) -> None:
    async with House(tmp_path, tier=FALLBACK) as house:
        await house.post({**HELLO, "max_tokens": 60})
        answer = await house.post({**HELLO, "max_tokens": 60}, headers={"x-weir-on-overage": "reject"})
        assert answer.status == 429
        assert answer.json["error"]["code"] == "rate_limit_exceeded"
        assert 0 < int(answer.headers["retry-after"]) <= 61
        assert not house.cheap.requests
        await house.rows(1)


async def test_the_cap_lowers_the_output_and_then_refuses(tmp_path: Path) -> None:
    cap = {"rate": None, "burst": None, "cap": {"tokens": 200, "seconds": 3600}}
    async with House(tmp_path, tier=cap) as house:
        asked = {**HELLO, "max_tokens": 500}
        first = await house.post(asked)
        second = await house.post(asked)
        assert first.status == 200
        assert int(first.headers["x-weir-max-tokens"]) == json.loads(house.large.requests[0].body)["max_tokens"] < 200
        assert (second.status, second.json["error"]["code"]) == (429, "insufficient_quota")
        assert (await house.windows())["hour"]["used"] <= 200


async def test_a_running_stream_is_ended_cleanly_at_the_cap(tmp_path: Path) -> None:
    """Two streams share what is left; neither was told how much the other would take."""
    cap = {"rate": None, "burst": None, "cap": {"tokens": 1000, "seconds": 3600}, "max_output_tokens": None}
    async with House(tmp_path, tier=cap) as house:
        asked = {**STREAM, "max_tokens": 900, "stream_options": {"include_usage": True}}
        house.large.tokens_per_second = 3000
        answers = await asyncio.gather(house.post(asked), house.post(asked))
        rows = await house.rows(2)
        assert {row.ending for row in rows} & {"cut_at_cap"}
        for answer in answers:
            assert answer.events[-1] == "[DONE]"
            finish = [
                json.loads(e)["choices"][0]["finish_reason"] for e in answer.events[:-2] if json.loads(e)["choices"]
            ]
            assert finish[-1] == "length"
        used = (await house.windows())["hour"]["used"]
        assert used == sum(row.prompt_tokens + row.completion_tokens for row in rows)
        assert used <= 1000 + 2


async def test_a_client_that_hangs_up_pays_for_what_was_made_and_the_engine_stops(tmp_path: Path) -> None:
    async with House(tmp_path) as house:
        house.large.tokens_per_second = 50
        async with house.session.post(
            house.base + CHAT, json={**STREAM, "max_tokens": 1000}, headers=house.auth
        ) as answer:
            for _ in range(4):
                await answer.content.readuntil(b"\n\n")
        row = (await house.rows())[0]
        assert row.ending == "client_gone"
        assert 3 <= row.completion_tokens <= house.large.generation_tokens_total <= row.completion_tokens + 2
        assert (await house.windows())["hour"]["used"] == row.prompt_tokens + row.completion_tokens
        assert house.large.running == 0


async def test_a_plain_request_that_nobody_waits_for_is_charged_by_an_estimate(tmp_path: Path) -> None:
    async with House(tmp_path) as house:
        house.large.tokens_per_second = 20
        asked = asyncio.create_task(house.post({**HELLO, "max_tokens": 1000}))
        await until(lambda: asyncio.sleep(0, house.large.running), bool)
        asked.cancel()
        row = (await house.rows())[0]
        assert (row.ending, row.usage_source) == ("client_gone", "estimated")
        assert row.prompt_tokens > 0


@pytest.mark.parametrize(
    ("fault", "status", "ending"),
    [
        ("refuse", 503, "engine_unavailable"),
        ("status:500", 500, "engine_unavailable"),
        ("status:400", 400, "engine_refused"),
        ("status:401", 502, "engine_unavailable"),
        ("garbage", 502, "engine_unavailable"),
        ("break:0", 502, "engine_unavailable"),
        ("error:0", 500, "engine_unavailable"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_that_fails_before_any_output_costs_nothing(
    tmp_path: Path, fault: str, status: int, ending: str, stream: bool
) -> None:
    async with House(tmp_path, tier={"on_outage": "reject"}) as house:
        house.large.faults = parse_fault(fault)
        answer = await house.post({**HELLO, "stream": stream})
        row = (await house.rows())[0]
        assert answer.status == status
        assert set(answer.json["error"]) == {"message", "type", "param", "code"}
        assert (row.ending, row.prompt_tokens, row.completion_tokens) == (ending, 0, 0)
        assert (await house.windows())["hour"]["used"] == 0


async def test_an_outage_of_the_primary_goes_to_the_cheaper_backend(tmp_path: Path) -> None:
    async with House(tmp_path) as house:
        house.large.faults = parse_fault("refuse")
        answer = await house.post()
        rows = await house.rows(2)
        assert (answer.status, answer.headers["x-weir-backend"]) == (200, "u2")
        assert sorted((row.route, row.ending) for row in rows) == [
            ("overflow", "completed"),
            ("primary", "engine_unavailable"),
        ]
        assert len({row.exchange_id for row in rows}) == 2
        assert len({row.request_id for row in rows}) == 1


async def test_a_second_worker_of_the_route_is_tried_within_the_same_exchange(tmp_path: Path) -> None:
    both = [{"backend": "u1", "model": "m1"}, {"backend": "u2", "model": "m2"}]
    async with House(tmp_path, models={"m1": {"primary": both}}) as house:
        house.large.faults = parse_fault("break:0")
        answers = [await house.post(STREAM) for _ in range(2)]
        rows = await house.rows(2)
        assert {answer.status for answer in answers} == {200}
        assert {row.backend for row in rows} == {"u2"}
        assert {row.attempt for row in rows} <= {1, 2} and max(row.attempt for row in rows) == 2


async def test_a_stream_that_breaks_after_its_head_ends_with_an_error_event(tmp_path: Path) -> None:
    async with House(tmp_path) as house:
        house.large.faults = parse_fault("break:5")
        answer = await house.post(STREAM)
        row = (await house.rows())[0]
        assert answer.status == 200
        assert "error" in json.loads(answer.events[-1])
        assert "[DONE]" not in answer.events
        assert (row.ending, row.completion_tokens, row.usage_source) == ("engine_broke", 5, "counted")
        assert not house.cheap.requests


async def test_a_stream_that_falls_silent_is_ended_by_the_idle_time(tmp_path: Path) -> None:
    async with House(tmp_path) as house:
        house.large.faults = parse_fault("hang-after:3")
        answer = await house.post(STREAM)
        row = (await house.rows())[0]
        assert "error" in json.loads(answer.events[-1])
        assert (row.ending, row.reason, row.completion_tokens) == ("engine_broke", "idle", 3)


async def test_a_worker_that_says_nothing_is_given_up_after_its_time(tmp_path: Path) -> None:
    async with House(tmp_path, tier={"on_outage": "reject"}) as house:
        house.large.faults = parse_fault("hang")
        answers = await asyncio.gather(house.post(), house.post(STREAM))
        assert [answer.status for answer in answers] == [504, 504]
        assert [answer.json["error"]["code"] for answer in answers] == ["engine_timeout"] * 2
        assert (await house.windows())["hour"]["used"] == 0


async def test_running_streams_finish_when_the_process_stops_and_new_requests_are_refused(tmp_path: Path) -> None:
    house = House(tmp_path)
    await house.__aenter__()
    house.large.tokens_per_second = 40
    stream = asyncio.create_task(house.post({**STREAM, "max_tokens": 40}))
    await until(lambda: asyncio.sleep(0, house.large.running), bool)
    house.sidecar.drain()
    refused = await house.post()
    stopping = asyncio.create_task(house.sidecar.__aexit__(None, None, None))
    answer = await stream
    await stopping
    assert (refused.status, refused.json["error"]["code"]) == (503, "shutting_down")
    assert answer.events[-1] == "[DONE]"
    row = (await house.rows())[0]
    assert (row.ending, row.completion_tokens) == ("completed", 40)
    await house.session.close()
    await house.engine.dispose()
    await house.large.stop()
    await house.cheap.stop()


async def test_streams_that_outlast_the_grace_are_ended_with_an_error_event_and_booked(tmp_path: Path) -> None:
    house = House(tmp_path, listen={"grace_seconds": 0.2})
    await house.__aenter__()
    house.large.tokens_per_second = 20
    stream = asyncio.create_task(house.post({**STREAM, "max_tokens": 1000}))
    await until(lambda: asyncio.sleep(0, house.large.generation_tokens_total), lambda made: made > 3)
    await house.sidecar.__aexit__(None, None, None)
    answer = await stream
    row = (await house.rows())[0]
    assert "error" in json.loads(answer.events[-1])
    assert row.ending == "shut_down"
    assert row.completion_tokens > 0
    await house.session.close()
    await house.engine.dispose()
    await house.large.stop()
    await house.cheap.stop()
