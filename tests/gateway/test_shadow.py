"""Limits that are only tried out: what they would have refused is counted, and nobody feels them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy import select

from engine_adapter.simulator import parse_fault
from meter.app import now
from meter.callers.registry import Registry
from meter.gateway.shadow import account_of
from meter.ledger.schema import refusal_minute
from quotas.store import View
from tests.gateway.house import CHAT, HELLO, Answer, House, until
from tests.services.redis import RedisServer

Limits = dict[str, Any]
UNLIMITED: Limits = {"rate": None, "burst": None, "cap": None}
ASKED = {**HELLO, "max_tokens": 60}


def tokens(count: int, seconds: int = 3600) -> dict[str, int]:
    return {"tokens": count, "seconds": seconds}


def refusals_in_metrics(house: House) -> Counter[tuple[str, bool]]:
    return Counter(
        {
            (sample.labels["rule"], sample.labels["shadow"] == "true"): int(sample.value)
            for family in house.sidecar._metrics.registry.collect()
            for sample in family.samples
            if sample.name == "weir_refusals_total"
        }
    )


async def refusals(house: House) -> Counter[tuple[str, bool]]:
    """By rule and shadow, once the sidecar has stopped: then all is in the table, and the metric says the same."""
    found = Counter[tuple[str, bool]]()
    async with house.engine.connect() as connection:
        for row in await connection.execute(select(refusal_minute)):
            assert row.key_id == house.key_id
            found[row.rule, row.shadow] += row.refusals
    await house.engine.dispose()
    assert found == refusals_in_metrics(house)
    return found


async def shadow_books(house: House) -> View:
    caller = house.sidecar._directory.by_key(house.key_id)
    assert caller is not None
    account = account_of(caller)
    assert account is not None
    return await house.sidecar._store.peek(account)


async def used(house: House) -> dict[str, int]:
    """Of the shadow's windows; nothing must be held in them."""
    view = await shadow_books(house)
    assert view.leases == ()
    assert {window.held for window in view.windows} <= {0}
    return {window.name: window.used for window in view.windows}


@pytest.mark.parametrize(
    ("shadow", "expected"),
    [
        ({"rate": tokens(100, 60)}, {("rate", True): 2}),
        ({"cap": tokens(100)}, {("cap", True): 2}),
        ({"rate": tokens(100, 60), "cap": tokens(100)}, {("cap", True): 2}),
        ({"rate": tokens(100, 60), "burst": tokens(200, 60)}, {("rate", True): 1}),
        ({"rate": tokens(0, 60)}, {("rate", True): 3}),
        ({"cap": tokens(0)}, {("cap", True): 3}),
        ({"rate": tokens(100_000, 60), "cap": tokens(100_000)}, {}),
        ({}, {}),
    ],
    ids=["rate", "cap", "cap first", "burst", "no rate", "no cap", "wide", "none"],
)
@pytest.mark.parametrize("on_overage", ["overflow", "reject"])
async def test_what_a_shadow_would_not_let_through_is_counted_and_served(
    tmp_path: Path, shadow: Limits, expected: Limits, on_overage: str
) -> None:
    async with House(tmp_path, tier={**UNLIMITED, "on_overage": on_overage, "shadow": shadow}) as house:
        for _ in range(3):
            answer = await house.post(ASKED)
            assert (answer.status, answer.headers["x-weir-verdict"]) == (200, "base")
            assert answer.json["usage"]["completion_tokens"] == 60
    assert await refusals(house) == expected


def shown(answer: Answer) -> dict[str, str]:
    """All headers but those that differ from one request to the next."""
    other = {"date", "x-weir-request-id", "ratelimit", "x-ratelimit-reset-tokens", "x-ratelimit-remaining-tokens"}
    return {name: value for name, value in answer.headers.items() if name.lower() not in other}


async def test_nobody_can_tell_that_a_shadow_is_there(tmp_path: Path) -> None:
    answers: list[list[Answer]] = []
    for name, shadow in (("with", {"rate": tokens(0, 60), "cap": tokens(0)}), ("without", None)):
        (tmp_path / name).mkdir()
        async with House(tmp_path / name, tier={"shadow": shadow}) as house:
            answers.append([await house.post(body) for body in (ASKED, {**ASKED, "stream": True})])
            assert {window["limit"] for window in (await house.windows()).values()} == {2_000, 4_000, 50_000}
    for one, other in zip(*answers, strict=True):
        assert (one.status, shown(one)) == (other.status, shown(other))


async def test_real_refusals_are_in_the_table_too(tmp_path: Path) -> None:
    tier = {**UNLIMITED, "rate": tokens(100, 60), "on_overage": "reject"}
    async with House(tmp_path, tier=tier) as house:
        assert [(await house.post(ASKED)).status for _ in range(4)] == [200, 429, 429, 429]
    assert await refusals(house) == {("rate", False): 3}


async def test_a_shadows_books_have_what_was_really_used(tmp_path: Path) -> None:
    async with House(tmp_path, tier={"shadow": {"rate": tokens(5_000, 60), "cap": tokens(5_000)}}) as house:
        await asyncio.gather(*(house.post({**HELLO, "stream": stream}) for stream in (True, False)))
        rows = await house.rows(2)
    total = sum(row.prompt_tokens + row.completion_tokens for row in rows)
    assert total > 0
    assert await used(house) == {"minute": total, "hour": total}


async def test_a_running_stream_is_charged_in_the_shadow_as_it_goes_and_never_ended_by_it(tmp_path: Path) -> None:
    shadow = {"cap": tokens(700)}
    async with House(tmp_path, tier={**UNLIMITED, "max_output_tokens": None, "shadow": shadow}) as house:
        house.large.tokens_per_second = 800
        stream = asyncio.create_task(house.post({**HELLO, "max_tokens": 1_200, "stream": True}))
        view = await until(lambda: shadow_books(house), lambda view: view.windows[0].used > 300)
        assert view.windows[0].used > 300
        assert [lease.route for lease in view.leases] == ["primary"]
        answer = await stream
        assert answer.events[-1] == "[DONE]"
        (row,) = await house.rows()
        assert (row.completion_tokens, row.ending) == (1_200, "completed")
        assert (await house.post({**HELLO, "max_tokens": 1})).status == 200
    assert await used(house) == {"hour": row.prompt_tokens + 1_200}
    assert await refusals(house) == {("cap", True): 1}


async def test_a_long_streams_lease_in_the_shadow_is_renewed(tmp_path: Path) -> None:
    tier = {**UNLIMITED, "shadow": {"cap": tokens(5_000)}}
    async with House(tmp_path, tier=tier, quota_store={"lease_seconds": 1}) as house:
        house.large.tokens_per_second = 50
        stream = asyncio.create_task(house.post({**HELLO, "max_tokens": 120, "stream": True}))
        await until(lambda: shadow_books(house), lambda view: bool(view.leases))
        view = await until(
            lambda: shadow_books(house), lambda view: not view.leases or view.leases[0].age_seconds > 1.5
        )
        assert view.leases
        assert (await stream).status == 200


async def test_what_did_not_run_is_judged_and_leaves_nothing_in_the_shadows_books(tmp_path: Path) -> None:
    shadow = {"cap": tokens(100)}
    async with House(tmp_path, tier={**UNLIMITED, "cap": tokens(0), "shadow": shadow}) as house:
        for _ in range(3):
            assert (await house.post(ASKED)).status == 429
        assert (await house.post({**HELLO, "messages": [{"role": "user", "content": "x" * 200}]})).status == 429
    assert await used(house) == {"hour": 0}
    assert await refusals(house) == {("cap", False): 4, ("cap", True): 1}


async def test_what_runs_on_the_cheaper_backend_counts_in_the_shadows_cap_alone(tmp_path: Path) -> None:
    shadow = {"rate": tokens(5_000, 60), "cap": tokens(5_000)}
    async with House(tmp_path, tier={**UNLIMITED, "rate": tokens(100, 60), "shadow": shadow}) as house:
        answers = [await house.post({**ASKED, "stream": stream}) for stream in (False, False, True)]
        assert [a.headers["x-weir-verdict"] for a in answers] == ["base", "overflow", "overflow"]
        sizes = [row.prompt_tokens + row.completion_tokens for row in await house.rows(3)]
    assert await used(house) == {"minute": sizes[0], "hour": sum(sizes)}
    assert await refusals(house) == {}


async def test_what_would_have_run_on_the_cheaper_backend_counts_in_the_shadows_cap_alone(tmp_path: Path) -> None:
    shadow = {"rate": tokens(100, 60), "cap": tokens(5_000)}
    async with House(tmp_path, tier={**UNLIMITED, "shadow": shadow}) as house:
        for _ in range(3):
            assert (await house.post(ASKED)).headers["x-weir-verdict"] == "base"
        sizes = [row.prompt_tokens + row.completion_tokens for row in await house.rows(3)]
    assert await used(house) == {"minute": sizes[0], "hour": sum(sizes)}
    assert await refusals(house) == {("rate", True): 2}


async def test_a_request_that_falls_to_the_cheaper_backend_is_judged_once(tmp_path: Path) -> None:
    shadow = {"rate": tokens(5_000, 60), "cap": tokens(0)}
    async with House(tmp_path, tier={**UNLIMITED, "shadow": shadow}) as house:
        house.large.faults = parse_fault("refuse")
        assert (await house.post(ASKED)).headers["x-weir-backend"] == "u2"
        await house.rows(2)
    assert await refusals(house) == {("cap", True): 1}
    assert await used(house) == {"minute": 0, "hour": 0}


async def test_a_client_that_leaves_leaves_nothing_held(tmp_path: Path) -> None:
    shadow = {"rate": tokens(50_000, 60), "cap": tokens(50_000)}
    async with House(tmp_path, tier={**UNLIMITED, "max_output_tokens": None, "shadow": shadow}) as house:
        house.large.tokens_per_second = 50
        body = {**HELLO, "stream": True, "max_tokens": 1_000}
        async with house.session.post(house.base + CHAT, json=body, headers=house.auth) as answer:
            await answer.content.readuntil(b"\n\n")
        (row,) = await house.rows()
        assert row.ending == "client_gone"
    total = row.prompt_tokens + row.completion_tokens
    assert await used(house) == {"minute": total, "hour": total}


async def test_a_refusal_hangs_on_the_prompts_exact_size_where_it_is_known(tmp_path: Path) -> None:
    """In bytes the prompt is far above the shadow's cap, in tokens it fits."""
    prompt = "river " * 300
    models = {"m1": {"primary": [{"backend": "u1", "model": "m1"}], "tokenizer": "engine"}}
    async with House(tmp_path, tier={**UNLIMITED, "shadow": {"cap": tokens(1_200)}}, models=models) as house:
        body = {**HELLO, "messages": [{"role": "user", "content": prompt}]}
        assert (await house.post(body)).status == 200
        (row,) = await house.rows()
        assert len(prompt) > 1_200 > row.prompt_tokens + 16
    assert await used(house) == {"hour": row.prompt_tokens + 16}
    assert await refusals(house) == {}


async def test_an_edit_of_the_shadow_is_in_force_for_running_streams_too(tmp_path: Path) -> None:
    """The tier's shadow gets a window of other seconds while a stream runs: its end is booked by the new terms."""
    async with House(tmp_path, tier={**UNLIMITED, "shadow": {"cap": tokens(5_000)}}) as house:
        house.large.tokens_per_second = 100
        stream = asyncio.create_task(house.post({**HELLO, "max_tokens": 100, "stream": True}))
        await until(lambda: shadow_books(house), lambda view: bool(view.leases))
        terms = {**UNLIMITED, "shadow": {"rate": tokens(5_000, 60), "cap": tokens(7_000, 7_200)}}
        await Registry(house.engine, now).replace_terms("tests", "tier", "test", None, terms)
        await house.sidecar.look_again()
        assert (await stream).status == 200
        (row,) = await house.rows()
    total = row.prompt_tokens + row.completion_tokens
    assert await used(house) == {"minute": total, "hour": total}


async def test_shadows_that_cannot_be_asked_disturb_nobody(tmp_path: Path, redis_server: RedisServer) -> None:
    """The shadow's keys in Redis are made unreadable; the real ones go on."""
    store: Limits = {"url": redis_server.url, "timeout_ms": 2_000, "on_down": "deny"}
    shadow = {"rate": tokens(100, 60), "cap": tokens(5_000)}
    async with (
        House(tmp_path, tier={"shadow": shadow}, quota_store=store) as house,
        Redis.from_url(store["url"]) as redis,
    ):
        assert [(await house.post(ASKED)).status for _ in range(2)] == [200, 200]
        await until(lambda: shadow_books(house), lambda view: not view.leases)
        names = [name async for name in redis.scan_iter(f"*shadow*{house.key_id}*")]
        assert names
        for name in names:
            if await redis.type(name) == b"hash":
                await redis.set(name, "no hash")
        for stream in (False, True, False, True):
            assert (await house.post({**ASKED, "stream": stream})).status == 200
        rows = await house.rows(6)
        spent = sum(row.prompt_tokens + row.completion_tokens for row in rows)
        assert (await house.windows())["hour"]["used"] == spent
        assert json.loads((await house.get("/v1/quota")).body)["leases"] == []
    assert await refusals(house) == {("rate", True): 1}


async def test_with_redis_the_shadows_books_are_the_same(tmp_path: Path, redis_server: RedisServer) -> None:
    store = {"url": redis_server.url, "timeout_ms": 2_000}
    shadow = {"rate": tokens(200, 60), "cap": tokens(5_000)}
    async with House(
        tmp_path, tier={**UNLIMITED, "rate": tokens(100, 60), "shadow": shadow}, quota_store=store
    ) as house:
        for stream in (False, True, False, True):
            assert (await house.post({**ASKED, "stream": stream})).status == 200
        sizes = [row.prompt_tokens + row.completion_tokens for row in await house.rows(4)]
        view = await until(lambda: shadow_books(house), lambda view: not view.leases)
        figures = {window.name: window.used for window in view.windows}
        assert figures == {"minute": sizes[0], "hour": sum(sizes)}
    assert await refusals(house) == {}
