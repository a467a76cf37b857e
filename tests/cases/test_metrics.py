"""Metrics: no series for what strangers make up, and gauges that come back to zero whatever went wrong."""

from __future__ import annotations

import asyncio
import secrets

import pytest

from tests.cases.house import CHAT, House, Key, streamed
from tests.cases.house import body as chat
from tests.cases.stub import CUT, SILENCE, Call, T, failure, stream
from tests.cases.wire import Connection, as_json, ask, bearer, request

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_made_up_model_names_make_no_series(house: House) -> None:
    """T109"""
    key = await house.key()
    await house.post(key, chat(model="nothing"))
    before = len((await house.metrics()).splitlines())
    for number in range(300):
        sent = [bearer(key.secret if number % 2 else "wk-none-none")]
        reply = await ask(house.proxy.port, "POST", CHAT, sent, as_json(chat(model=secrets.token_hex(8))))
        reply.error(404 if number % 2 else 401)
    assert len((await house.metrics()).splitlines()) - before < 50
    assert house.u1.seen == []
    await house.rows(key, 0)


async def test_gauges_come_back_to_zero_after_errors(house: House) -> None:
    """T111: 90 requests, a third each well, aborted at some moment, and failing at the engine."""
    key = await house.key()
    before = await house.metric("weir_requests_total")
    house.u1.does(by_user)
    moments = ["upload", "head", "stream"] * 10
    failures = ["500", "reset", "cut"] * 10
    await asyncio.gather(
        *(house.post(key, chat(user="ok")) for _ in range(30)),
        *(aborted(house, key, moment) for moment in moments),
        *(house.post(key, streamed(user=failure)) for failure in failures),
    )
    assert await house.used(key) >= 60
    counted = await house.metric("weir_requests_total") - before
    assert 80 <= counted <= 90, "an upload that never ended may not count as a request"
    rows = await house.rows(key, 80)
    assert sum(row["ending"] == "client_gone" for row in rows) == 20


async def by_user(call: Call) -> None:
    user = call.seen.json()["user"]
    if user == "head":
        await call.until_gone()
    elif user == "stream":
        await stream(T("a"), SILENCE)(call)
    elif user == "500":
        await failure(500)(call)
    elif user == "reset":
        call.reset()
    elif user == "cut":
        await stream(T("a"), CUT)(call)
    else:
        await call.plain(200, b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}')


async def aborted(house: House, key: Key, moment: str) -> None:
    """A stream whose client leaves while it uploads, before the head, or after the first event."""
    async with Connection.to(house.proxy.port) as client:
        sent = request("POST", CHAT, [bearer(key.secret)], as_json(streamed(user=moment)))
        await client.send(sent[:-10] if moment == "upload" else sent)
        if moment == "stream":
            await client.start()
            await client.event()
        elif moment == "head":
            await _arrived(house, moment)
        client.reset()


async def _arrived(house: House, user: str) -> None:
    """Waits until as many such requests as there will be are at the engine."""
    async with asyncio.timeout(20):
        while sum(seen.json()["user"] == user for seen in house.u1.seen) < 10:
            await asyncio.sleep(0.02)
