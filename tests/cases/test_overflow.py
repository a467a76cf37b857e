"""The cheaper backend: what goes there, under which name and key, how it is booked, and what if it cannot either."""

from __future__ import annotations

import pytest

from tests.cases.house import House, Key
from tests.cases.house import body as chat
from tests.cases.proxy import U1_KEY, U2_KEY
from tests.cases.stub import DONE, FIN, OK, USE, T, failure, stream
from tests.cases.wire import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def spent_key(house: House, model: str = "m1") -> Key:
    """A key whose rate of 100 tokens is used up."""
    key = await house.key(limit=100, window=3600, overage="fallback")
    house.u1.does(OK(9, 91))
    assert (await house.post(key, chat(model=model))).status == 200
    assert await house.used(key) == 100
    house.u1.seen.clear()
    return key


async def test_overage_goes_to_the_cheaper_backend_under_its_own_name_and_key(house: House) -> None:
    """T095"""
    key = await spent_key(house)
    house.u2.does(OK(11, 5))
    reply = await house.post(key, chat())
    assert reply.status == 200
    assert reply.get("x-weir-verdict") == "overflow"
    assert house.u1.seen == []
    (seen,) = house.u2.seen
    assert seen.json()["model"] == "m2"
    assert seen.path.startswith("/cheap/")
    assert seen.path.endswith("/chat/completions")
    assert seen.all("authorization") == [f"Bearer {U2_KEY}"]
    assert U1_KEY.encode() not in seen.raw
    _, row = await house.rows(key, 2)
    assert (row["backend"], row["route"], row["verdict"]) == ("u2", "overflow", "overflow")
    assert (row["model_requested"], row["model_served"]) == ("m1", "m2")
    assert (row["prompt_tokens"], row["completion_tokens"], row["usage_source"]) == (11, 5, "engine")
    assert row["cost_nanousd"] == 11 * 50 + 5 * 150
    assert await house.used(key) == 100


async def test_a_stream_overflows_too(house: House) -> None:
    """T095"""
    key = await spent_key(house)
    house.u2.does(stream(T("a"), FIN, USE(7, 1), DONE))
    reply = await house.post(key, chat(stream=True))
    assert reply.get("x-weir-verdict") == "overflow"
    assert reply.body == T("a") + FIN + DONE
    assert house.u1.seen == []
    _, row = await house.rows(key, 2)
    assert (row["backend"], row["prompt_tokens"], row["completion_tokens"]) == ("u2", 7, 1)


async def test_the_caller_may_be_stricter_than_its_policy(house: House) -> None:
    key = await spent_key(house)
    reply = await house.post(key, chat(), headers=[("x-weir-on-overage", "reject")])
    assert reply.error(429)["code"] == "rate_limit_exceeded"
    assert int(reply.get("retry-after") or 0) >= 1
    assert house.u1.seen == house.u2.seen == []
    await house.rows(key, 1)


async def test_an_overflow_that_cannot_be_reached_is_said(house: House) -> None:
    """T099 (a)"""
    key = await spent_key(house, "stranded")
    reply = await house.post(key, chat(model="stranded"))
    assert reply.status in (502, 503)
    reply.error()
    assert await house.used(key) == 100
    assert house.u1.seen == house.u2.seen == []


async def test_an_overflow_over_its_own_limit_is_429(house: House) -> None:
    """T099 (b)"""
    key = await spent_key(house, "narrow")
    house.u2.does(OK(90, 10))
    assert (await house.post(key, chat(model="narrow"))).get("x-weir-verdict") == "overflow"
    await house.used(key)
    reply = await house.post(key, chat(model="narrow"))
    assert reply.error(429)["code"] == "rate_limit_exceeded"
    assert int(reply.get("retry-after") or 0) >= 1
    assert await house.used(key) == 100
    assert len(house.u2.seen) == 1
    await house.rows(key, 2)


async def test_an_overflow_that_fails_costs_nothing(house: House) -> None:
    """T099 (c)"""
    key = await spent_key(house)
    house.u2.does(failure(500))
    reply = await house.post(key, chat())
    assert reply.status in (500, 502, 503)
    assert await house.used(key) == 100
    assert house.u1.seen == []
    _, row = await house.rows(key, 2)
    assert row["prompt_tokens"] + row["completion_tokens"] == 0


async def test_a_limited_key_says_its_windows_itself(house: House) -> None:
    key = await spent_key(house)

    async def used() -> int:
        (window,) = (await house.get(key, "/v1/quota")).json()["windows"]
        return int(window["used"])

    assert await eventually(used, lambda used: used == 100) == 100
