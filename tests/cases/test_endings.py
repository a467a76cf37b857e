"""How answers end: hung up, broken off, refused, empty. Whoever ends it, it is settled and booked once."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.cases.house import House, streamed
from tests.cases.house import body as chat
from tests.cases.stub import DONE, RESET, Call, T, failure, hang, head, stream
from tests.cases.wire import Reply, eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

UPSTREAM_ENDINGS = ("engine_broke", "engine_unavailable", "engine_refused")


def ends_with_error(reply: Reply) -> bool:
    """The client can tell that the stream broke."""
    events = reply.events
    return not reply.complete or bool(events and events[-1] != "[DONE]" and "error" in json.loads(events[-1]))


async def test_a_client_that_hangs_up_pays_for_what_was_made(house: House) -> None:
    """T027"""
    key = await house.key(limit=10_000)
    sent = 0

    async def script(call: Call) -> None:
        nonlocal sent
        await call.open_stream()
        while not call.gone:
            await call.chunk(T(f"word{sent} "))
            sent += 1
            await asyncio.sleep(0.05)

    house.u1.does(script)
    async with house.posted(key, streamed(max_tokens=4000)) as client:
        await client.start()
        for _ in range(3):
            await client.event()
    await gone(house)
    made = sent
    row = await house.row(key)
    assert row["ending"] == "client_gone"
    assert row["usage_source"] in ("counted", "estimated")
    assert row["prompt_tokens"] > 0
    assert 3 <= row["completion_tokens"] <= made * 2
    assert await house.used(key) == row["prompt_tokens"] + row["completion_tokens"]
    await house.spent(key, 1, 1)
    await house.rows(key, 2)


async def test_hanging_up_before_the_first_byte_is_not_a_full_answer(house: House) -> None:
    """T028"""
    key = await house.key()
    house.u1.does(hang)
    async with house.posted(key, streamed(max_tokens=300)):
        await house.u1.requests(1)
    await gone(house)
    row = await house.row(key)
    assert (row["ending"], row["completion_tokens"]) == ("client_gone", 0)


async def test_a_stream_that_breaks_off_does_not_look_complete(house: House) -> None:
    """T029"""
    key = await house.key()
    house.u1.does(stream(*(T(f"word{number} ") for number in range(5)), RESET))
    reply = await house.post(key, streamed())
    assert reply.status == 200
    assert "[DONE]" not in reply.events
    assert ends_with_error(reply)
    row = await house.row(key)
    assert row["ending"] == "engine_broke"
    assert row["usage_source"] in ("counted", "estimated")
    assert 5 <= row["completion_tokens"] <= 10


async def test_a_short_body_under_a_larger_length_is_a_bad_gateway(house: House) -> None:
    """T030"""
    key = await house.key()

    async def script(call: Call) -> None:
        framing = [("Content-Type", "application/json"), ("Content-Length", "500")]
        await call.send(head(200, framing) + b'{"choices": [' + b" " * 187)
        call.close()

    house.u1.does(script)
    reply = await house.post(key, chat())
    reply.error(502)
    row = await house.row(key)
    assert row["ending"] in UPSTREAM_ENDINGS
    assert await house.used(key) == 0


async def test_an_error_told_inside_a_stream_is_no_success(house: House) -> None:
    """T031"""
    key = await house.key()
    told = b'data: {"error":{"message":"overloaded","type":"overloaded","code":503}}\n\n'
    house.u1.does(stream(told, DONE))
    reply = await house.post(key, streamed())
    if reply.status == 200:
        (only,) = (data for data in reply.events if data != "[DONE]")
        assert "error" in json.loads(only)
    else:
        assert "overloaded" in reply.error(503)["message"]
    row = await house.row(key)
    assert row["ending"] in UPSTREAM_ENDINGS
    assert await house.used(key) == 0


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
async def test_the_workers_own_refusal_of_a_stream_comes_through(house: House, status: int) -> None:
    """T032"""
    key = await house.key()
    house.u1.does(failure(status, "m", [("Retry-After", "7")] if status == 429 else []))
    reply = await house.post(key, streamed())
    assert reply.status == status
    assert (reply.get("content-type") or "").startswith("application/json")
    assert reply.json()["error"]["message"] == "m"
    assert status != 429 or reply.get("retry-after") == "7"
    row = await house.row(key)
    assert row["ending"] in UPSTREAM_ENDINGS
    assert row["http_status"] == status
    assert await house.used(key) == 0


async def test_an_empty_stream_is_no_success(house: House) -> None:
    """T033"""
    key = await house.key()
    house.u1.does(stream())
    reply = await house.post(key, streamed())
    if reply.status == 200:
        assert ends_with_error(reply)
    else:
        reply.error(502)
    row = await house.row(key)
    assert row["ending"] in UPSTREAM_ENDINGS
    assert await house.used(key) == 0


async def test_a_plain_request_that_is_aborted_is_stopped_and_estimated(house: House) -> None:
    key = await house.key()
    house.u1.does(hang)
    async with house.posted(key, chat(max_tokens=300)):
        await house.u1.requests(1)
    await gone(house)
    row = await house.row(key)
    assert row["ending"] == "client_gone"
    assert row["usage_source"] in ("estimated", "none")
    assert row["completion_tokens"] <= 300


async def gone(house: House) -> None:
    """The proxy has left the worker's last call."""

    async def left() -> bool:
        return house.u1.calls[-1].gone

    await eventually(left, lambda left: left is True)
