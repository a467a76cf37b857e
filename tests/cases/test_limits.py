"""0 blocks, null is unlimited, and both are told apart wherever a limit is written or shown."""

from __future__ import annotations

import pytest

from tests.cases.house import House
from tests.cases.house import body as chat

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_limit_of_zero_blocks(house: House) -> None:
    """T102"""
    key = await house.key(limit=0)
    for _ in range(3):
        reply = await house.post(key, chat())
        assert reply.error(429)["code"] == "insufficient_quota"
        assert reply.get("x-should-retry") == "false"
        assert reply.get("retry-after") is None
    assert house.u1.seen == []
    shown = (await house.admin("GET", f"/keys/{key.id}/quota")).json()
    assert shown["effective"]["cap"] == {"tokens": 0, "seconds": 3600}
    await house.rows(key, 0)


async def test_null_is_unlimited(house: House) -> None:
    """T102"""
    key = await house.key(limit=None)
    key.open = False  # without a limit there is no window to look at
    assert (await house.post(key, chat(max_tokens=10_000_000))).status == 200
    shown = (await house.admin("GET", f"/keys/{key.id}/quota")).json()
    assert shown["cap"] is shown["effective"]["cap"] is None
    assert (await house.get(key, "/v1/quota")).json()["windows"] == []
    await house.rows(key, 1)


async def test_a_limit_of_one_is_a_limit(house: House) -> None:
    """T102"""
    key = await house.key(limit=1)
    assert (await house.post(key, chat())).error(413)["code"] == "request_exceeds_quota"
    assert house.u1.seen == []
    await house.rows(key, 0)


async def test_an_absent_override_is_the_tiers(house: House) -> None:
    """T102"""
    made = (await house.admin("POST", "/keys", {"name": "case-absent", "tier": "cases"})).json()
    shown = (await house.admin("GET", f"/keys/{made['id']}/quota")).json()
    assert {name for name in shown if name != "effective"} == set()
    assert shown["effective"]["cap"] is None


BAD_LIMITS = [-1, 1.5, "100", True, [], 1e30, 9223372036854775808]


@pytest.mark.parametrize("tokens", BAD_LIMITS, ids=str)
async def test_a_bad_limit_is_refused_by_name(house: House, tokens: object) -> None:
    policy = {"cap": {"tokens": tokens, "seconds": 60}}
    reply = await house.admin("POST", "/keys", {"name": f"case-bad-{tokens}", "tier": "cases", "policy": policy})
    assert reply.status in (400, 422)
    assert "cap.tokens" in reply.body.decode()
