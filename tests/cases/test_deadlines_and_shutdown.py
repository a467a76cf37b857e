"""Deadlines are of different kinds, and a stop lets running streams end."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.cases.conftest import Build
from tests.cases.house import House, streamed
from tests.cases.house import body as chat
from tests.cases.stub import DONE, FIN, OK, SILENCE, USE, Pause, Step, T, hang, stream
from tests.cases.wire import Connection, ask, bearer, eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

IMPATIENT = "impatient"
"""A model whose backend must connect in 1 s, begin in 3 s, and go on within 1 s."""


async def test_silence_below_the_first_deadline_is_fine(house: House) -> None:
    """T123 (a)"""
    key = await house.key()
    house.u1.does(OK(3, 2, after=Pause(1.2)))
    assert (await house.post(key, chat(model=IMPATIENT))).status == 200


@pytest.mark.parametrize("flows", [False, True], ids=["plain", "streamed"])
async def test_silence_for_ever_is_a_gateway_timeout(house: House, flows: bool) -> None:
    """T123 (b)"""
    key = await house.key()
    house.u1.does(hang)
    reply = await house.post(key, chat(model=IMPATIENT, stream=flows))
    assert reply.error(504)["code"] == "engine_timeout"
    assert await house.used(key) == 0
    assert house.u1.calls[0].gone


async def test_silence_after_a_start_ends_with_an_error_and_a_partial_charge(house: House) -> None:
    """T123 (c)"""
    key = await house.key()
    house.u1.does(stream(T("a"), SILENCE))
    reply = await house.post(key, streamed(model=IMPATIENT))
    assert reply.status == 200
    assert "[DONE]" not in reply.events
    assert not reply.complete or "error" in json.loads(reply.events[-1])
    row = await house.row(key)
    assert (row["ending"], row["completion_tokens"]) == ("engine_broke", 1)
    assert row["prompt_tokens"] > 0


async def test_an_address_that_never_answers_is_given_up(house: House) -> None:
    """T123 (d)"""
    key = await house.key()
    reply = await house.post(key, chat(model="hole"))
    assert reply.status in (502, 504)
    reply.error()
    await house.rows(key, 1)
    assert await house.used(key) == 0


async def test_comments_are_a_sign_of_life(house: House) -> None:
    """T123 (e): a comment every 0.4 s, for longer than both deadlines."""
    key = await house.key()
    beats: list[Step] = [b": alive\n\n", Pause(0.4)] * 10
    house.u1.does(stream(*beats, T("a"), FIN, USE(3, 1), DONE))
    reply = await house.post(key, streamed(model=IMPATIENT))
    assert reply.events[-1] == "[DONE]"
    assert await house.used(key) == 4


async def test_a_stop_lets_a_running_stream_end(build: Build) -> None:
    """T125"""
    async with build() as house:
        key = await house.key()
        release = asyncio.Event()
        house.u1.does(stream(T("a"), release, T("b"), FIN, USE(3, 2), DONE))
        async with house.posted(key, streamed()) as client:
            await client.start()
            await client.event()
            house.proxy.sigterm()

            async def ready() -> int:
                return (await house.proxy.health("/readyz")).status

            await eventually(ready, lambda status: status == 503)
            assert (await house.proxy.health("/healthz")).status == 200
            assert await refused(house, key.secret)
            release.set()
            reply = await client.reply()
        assert reply.complete
        assert reply.events[-1] == "[DONE]"
        assert await house.proxy.ended() == 0
        house.stopped = True
        row = await house.row(key)
        assert (row["ending"], row["prompt_tokens"], row["completion_tokens"]) == ("completed", 3, 2)


async def refused(house: House, secret: str) -> bool:
    try:
        reply = await ask(house.proxy.port, "GET", "/v1/models", [bearer(secret)])
    except (ConnectionError, asyncio.IncompleteReadError):
        return True
    return reply.status == 503


async def test_a_stream_that_outlives_the_grace_is_ended_and_booked(build: Build) -> None:
    """T125"""
    async with build(listen={"grace_seconds": 0.5}) as house:
        key = await house.key()
        house.u1.does(stream(T("a"), SILENCE))
        async with house.posted(key, streamed()) as client:
            await client.start()
            await client.event()
            house.proxy.sigterm()
            reply = await client.reply()
        assert "[DONE]" not in reply.events
        assert await house.proxy.ended() == 0
        house.stopped = True
        row = await house.row(key)
        assert (row["ending"], row["completion_tokens"]) == ("shut_down", 1)


async def test_an_idle_connection_does_not_hold_up_a_stop(build: Build) -> None:
    """T125"""
    async with build(listen={"grace_seconds": 300}) as house, Connection.to(house.proxy.port):
        house.proxy.sigterm()
        assert await house.proxy.ended() == 0
        house.stopped = True
