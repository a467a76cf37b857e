"""Usage records: every exchange once, whole, exact, and in step with what the quota says."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.cases.conftest import Build
from tests.cases.house import House, Key, streamed
from tests.cases.house import body as chat
from tests.cases.stub import DONE, FIN, OK, SILENCE, USE, Call, Script, T, failure, stream

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_graceful_stop_ships_what_is_queued(build: Build) -> None:
    """T058"""
    async with build(ledger={"batch_ms": 10_000}) as house:
        key = await house.key()
        house.u1.does(OK(3, 2))
        for _ in range(25):
            assert (await house.post(key, chat())).status == 200
        house.proxy.sigterm()
        assert await house.proxy.ended() == 0
        house.stopped = True
        rows = await house.rows(key, 25, seconds=1)
        assert sum(row["prompt_tokens"] + row["completion_tokens"] for row in rows) == 125


async def test_a_zero_byte_in_a_text_field_spoils_no_batch(house: House) -> None:
    """T059"""
    key = await house.key()
    house.u1.does(OK(3, 2))
    users = ["b"] * 4 + ["a\0b"] + ["c"] * 5
    replies = await asyncio.gather(
        *(house.post(key, chat(user=user), headers=[("x-weir-tags", "team=a")]) for user in users)
    )
    assert {reply.status for reply in replies} == {200}
    assert (await house.post(key, chat(model="m\0x"))).status in (400, 404)
    await house.rows(key, 10)
    assert await house.used(key) == 50


async def test_repeated_ids_of_the_engine_swallow_no_row(house: House) -> None:
    """T063"""
    key = await house.key()
    house.u1.does(OK(3, 2))
    headers = [("x-request-id", "always-the-same")]
    await asyncio.gather(*(house.post(key, chat(), headers=headers) for _ in range(5)))
    await house.rows(key, 5)
    await asyncio.gather(*(house.post(key, chat(), headers=headers) for _ in range(2)))
    await house.rows(key, 7)


async def test_figures_beyond_32_bits_stay_exact(house: House) -> None:
    """T064"""
    key = await house.key(limit=10**13)
    before = await house.metric("weir_tokens_total", model="m1")
    huge = 1_500_000_000
    for _ in range(2):
        await house.spent(key, huge, huge)
    rows = await house.rows(key, 2)
    assert [(row["prompt_tokens"], row["completion_tokens"]) for row in rows] == [(huge, huge)] * 2
    assert await house.used(key) == 4 * huge
    assert await house.metric("weir_tokens_total", model="m1") - before == 4 * huge
    report = await house.admin("GET", f"/usage?{span()}&group_by=key")
    assert report.status == 200, report.body
    (line,) = (line for line in report.json()["rows"] if key.id in line.values())
    assert (line["requests"], line["total_tokens"]) == (2, 4 * huge)


def span() -> str:
    """A report's bounds that hold whatever runs now."""
    return "from=2020-01-01T00:00:00Z&to=2100-01-01T00:00:00Z"


async def test_books_quota_and_metrics_agree_over_mixed_traffic(house: House) -> None:
    """T066: 90 admitted requests of five kinds, and 20 refused ones."""
    limit = 100_000
    key = await house.key(limit=limit)
    before = await house.metric("weir_tokens_total")
    house.u1.does(by_model_field)
    kinds = ["ok", "stream", "abort", "400", "500"] * 18
    await asyncio.gather(*(one(house, key, kind) for kind in kinds))
    refused = await asyncio.gather(*(house.post(key, chat(max_tokens=limit - 500)) for _ in range(20)))
    assert {reply.status for reply in refused} == {429}
    rows = await house.rows(key, 90)
    total = sum(row["prompt_tokens"] + row["completion_tokens"] for row in rows)
    assert await house.used(key) == total
    assert await house.metric("weir_tokens_total") - before == total
    endings = sorted(row["ending"] for row in rows)
    assert endings.count("completed") == 36
    assert endings.count("client_gone") == 18
    assert endings.count("engine_refused") + endings.count("engine_unavailable") == 36


async def by_model_field(call: Call) -> None:
    """A worker whose answer depends on the request's `user`."""
    scripts: dict[str, Script] = {
        "ok": OK(9, 12),
        "stream": stream(T("a"), FIN, USE(9, 7), DONE),
        "abort": stream(T("a"), T("b"), SILENCE),
        "400": failure(400),
        "500": failure(500),
    }
    await scripts[json.loads(call.seen.body)["user"]](call)


async def one(house: House, key: Key, kind: str) -> None:
    if kind == "abort":
        async with house.posted(key, streamed(user=kind)) as client:
            await client.start()
            await client.event()
    else:
        asked = streamed(user=kind) if kind == "stream" else chat(user=kind)
        reply = await house.post(key, asked)
        assert reply.status == {"ok": 200, "stream": 200, "400": 400, "500": 500}[kind], reply.body
