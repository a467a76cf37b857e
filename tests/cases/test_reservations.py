"""What a request may use is set aside before the engine sees it: prompt, output, tools; and nonsense sets nothing aside."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.cases.house import BODY, House
from tests.cases.house import body as chat
from tests.cases.stub import DONE, FIN, OK, USE, T, answer, plain, stream, usage
from tests.cases.wire import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_prompt_larger_than_the_quota_is_refused_whatever_its_output(house: House) -> None:
    """T034"""
    key = await house.key(limit=10_000)
    huge = chat(messages=[{"role": "user", "content": "lorem ipsum " * 10_000}], max_tokens=1)
    replies = [await house.post(key, huge), *await asyncio.gather(*(house.post(key, huge) for _ in range(20)))]
    for reply in replies:
        assert reply.error(413)["code"] == "request_exceeds_quota"
    assert house.u1.seen == []
    assert await house.reserved(key, 0) == 0
    await house.rows(key, 0)


@pytest.mark.parametrize("absent", [{}, {"max_tokens": None}], ids=["absent", "null"])
async def test_without_max_tokens_the_default_output_is_set_aside(house: House, absent: dict[str, Any]) -> None:
    """T035"""
    key = await house.key(limit=1000, default_output_tokens=200)
    release = asyncio.Event()
    house.u1.does(OK(5, 150, after=release))
    asked = {"model": "m1", "messages": BODY["messages"], **absent}
    calls = [asyncio.ensure_future(house.post(key, asked)) for _ in range(20)]

    async def decided() -> int:
        return len(house.u1.seen) + sum(call.done() for call in calls)

    await eventually(decided, lambda count: count == 20)
    refused = [call.result() for call in calls if call.done()]
    assert {reply.error(429)["code"] for reply in refused} <= {"insufficient_quota", "rate_limit_exceeded"}
    admitted = len(house.u1.seen)
    assert 1 <= admitted <= 4
    release.set()
    replies = await asyncio.gather(*calls)
    assert sum(reply.status == 200 for reply in replies) == admitted
    assert await house.used(key) == 155 * admitted
    assert all(seen.json()["max_tokens"] == 200 for seen in house.u1.seen)
    await house.rows(key, admitted)


NONSENSE = ["-1", '"16"', "1.5", "true", "[]", "1e400", "9223372036854775808"]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", NONSENSE)
async def test_a_nonsense_output_limit_is_refused_by_name(house: House, field: str, value: str) -> None:
    """T036"""
    key = await house.key()
    sent = json.dumps({name: part for name, part in BODY.items() if name != "max_tokens"})
    reply = await house.post(key, f'{sent[:-1]}, "{field}": {value}}}'.encode())
    assert reply.error(400)["param"] == field
    assert house.u1.seen == []
    await house.rows(key, 0)


async def test_an_output_limit_of_zero_is_refused_or_still_sets_the_prompt_aside(house: House) -> None:
    """T036"""
    key = await house.key()
    release = asyncio.Event()
    house.u1.does(OK(5, 0, after=release))
    call = asyncio.ensure_future(house.post(key, chat(max_tokens=0)))
    await _first([call, asyncio.ensure_future(house.u1.requests(1))], 1)
    if house.u1.seen:
        assert await house.reserved(key, 1) > 0
    release.set()
    assert (await call).status in (200, 400)


@pytest.mark.parametrize(
    ("prompt", "tokens", "answers"), [([1, 2, 3], 3, 1), ([[1, 2, 3], [4, 5]], 5, 2)], ids=["one", "two"]
)
async def test_a_prompt_of_token_ids_is_counted_exactly(
    house: House, prompt: list[Any], tokens: int, answers: int
) -> None:
    """T037"""
    key = await house.key()
    release = asyncio.Event()
    house.u1.does(OK(tokens, answers, after=release))
    call = asyncio.ensure_future(
        house.post(key, {"model": "m1", "prompt": prompt, "max_tokens": 7}, path="/v1/completions")
    )
    await house.u1.requests(1)
    assert await house.reserved(key, 1) == tokens + 7 * answers
    release.set()
    assert (await call).status == 200
    assert await house.used(key) == tokens + answers


@pytest.mark.parametrize("prompt", [[], [1, "a"], {"a": 1}, 5, [[]], [None]], ids=str)
async def test_an_odd_prompt_is_refused_not_a_fault(house: House, prompt: object) -> None:
    """T037"""
    key = await house.key()
    house.u1.does(plain(400, b'{"error":{"message":"no","type":"BadRequestError","param":null,"code":400}}'))
    reply = await house.post(key, {"model": "m1", "prompt": prompt, "max_tokens": 7}, path="/v1/completions")
    reply.error(400)
    assert await house.used(key) == 0


@pytest.mark.parametrize("place", ["tools", "response_format"])
async def test_schemas_are_part_of_the_prompt(house: House, place: str) -> None:
    """T041"""
    key = await house.key(limit=10_000)
    function = {"name": "f", "description": "what it is good for " * 50, "parameters": {"type": "object"}}
    schemas = [{"type": "function", "function": function}] * 200
    shapes = {"tools": schemas, "response_format": {"type": "json_schema", "json_schema": {"schema": schemas}}}
    reply = await house.post(key, chat(**{place: shapes[place]}))
    assert reply.error(413)["code"] == "request_exceeds_quota"
    assert house.u1.seen == []
    await house.rows(key, 0)


async def test_an_n_beyond_the_quota_is_set_aside_n_times(house: House) -> None:
    key = await house.key()
    release = asyncio.Event()
    house.u1.does(plain(200, answer(usage(5, 30)), after=release))
    call = asyncio.ensure_future(house.post(key, chat(n=3, max_tokens=100)))
    await house.u1.requests(1)
    assert await house.reserved(key, 1) >= 300
    release.set()
    assert (await call).status == 200
    assert await house.used(key) == 35


async def test_a_running_stream_holds_no_more_than_it_can_use(house: House) -> None:
    """T050: its output limit bounds it, however large a slice is."""
    plain_key, key = await house.key(), await house.key()
    release = asyncio.Event()
    house.u1.does(OK(5, 5, after=release), stream(T("a"), T("b"), release, FIN, USE(5, 2), DONE))
    call = asyncio.ensure_future(house.post(plain_key, chat()))
    await house.u1.requests(1)
    ceiling = await house.reserved(plain_key, 1)
    async with house.posted(key, chat(stream=True)) as client:
        await client.start()
        for _ in range(2):
            await client.event()
        standing = await house.standing(key)
        release.set()
        await client.reply()
    await call
    assert standing.leases == 1
    assert standing.used + standing.reserved <= ceiling


async def _first(calls: Sequence[asyncio.Future[Any]], count: int) -> list[asyncio.Future[Any]]:
    """The first `count` of the calls to be answered."""
    async with asyncio.timeout(30):
        while len(done := [call for call in calls if call.done()]) < count:
            await asyncio.wait([call for call in calls if not call.done()], return_when=asyncio.FIRST_COMPLETED)
    return done
