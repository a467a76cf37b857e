"""Credentials: every spelling that clients use, and nothing else, opens the door."""

from __future__ import annotations

import pytest

from tests.cases.house import CHAT, House
from tests.cases.house import body as chat
from tests.cases.proxy import ADMIN_TOKEN
from tests.cases.wire import as_json, ask

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize(
    "spelling",
    [
        "authorization: bearer {}",
        "AUTHORIZATION: BEARER {}",
        "Authorization: Bearer {}",
        "x-api-key: {}",
        "API-KEY: {}",
    ],
)
async def test_the_scheme_and_header_are_read_in_any_case(house: House, spelling: str) -> None:
    """T090"""
    key = await house.key()
    name, _, value = spelling.format(key.secret).partition(": ")
    assert (await ask(house.proxy.port, "POST", CHAT, [(name, value)], as_json(chat()))).status == 200
    await house.rows(key, 1)


async def test_two_blanks_are_read_or_refused(house: House) -> None:
    """T090"""
    key = await house.key()
    sent = [("Authorization", f"Bearer  {key.secret}")]
    assert (await ask(house.proxy.port, "POST", CHAT, sent, as_json(chat()))).status in (200, 401)


async def test_a_keys_own_case_matters(house: House) -> None:
    """T090"""
    key = await house.key()
    sent = [("Authorization", f"Bearer {key.secret.swapcase()}")]
    (await ask(house.proxy.port, "POST", CHAT, sent, as_json(chat()))).error(401)
    assert house.u1.seen == []


@pytest.mark.parametrize(
    "value", [None, "", "Bearer", "Bearer ", "Basic eDp5", "Bearer null", "Bearer wk-", "wk-a-b", "ü"]
)
async def test_no_credential_is_401(house: House, value: str | None) -> None:
    """T091"""
    sent = [] if value is None else [("Authorization", value)]
    reply = await ask(house.proxy.port, "POST", CHAT, sent, as_json(chat()))
    assert reply.error(401)["code"] == "invalid_api_key"
    assert (reply.get("www-authenticate") or "").startswith("Bearer")
    assert house.u1.seen == []


async def test_a_key_without_its_scheme_is_401_or_known(house: House) -> None:
    """T091"""
    key = await house.key()
    reply = await ask(house.proxy.port, "POST", CHAT, [("Authorization", key.secret)], as_json(chat()))
    assert reply.error(401)["code"] == "invalid_api_key"
    await house.rows(key, 0)


async def test_a_disabled_key_stops_working_and_starts_again(house: House) -> None:
    """T092 on one process."""
    key = await house.key()
    for state, status in (("disabled", 401), ("active", 200)):
        shown = await house.admin("GET", f"/keys/{key.id}")
        changed = await house.admin(
            "PATCH", f"/keys/{key.id}", {"state": state}, [("If-Match", shown.get("etag") or "")]
        )
        assert changed.status == 200, changed.body
        await house.known(key, status)
    await house.spent(key, 1, 1)


async def test_the_admin_token_is_no_callers_key_nor_the_other_way(house: House) -> None:
    """T093"""
    key = await house.key()
    sent = [("Authorization", f"Bearer {ADMIN_TOKEN}")]
    (await ask(house.proxy.port, "POST", CHAT, sent, as_json(chat()))).error(401)
    for method in ("GET", "POST"):
        data = as_json({"name": "n", "tier": "cases"}) if method == "POST" else None
        for credential in (f"Bearer {key.secret}", "Bearer ", "Bearer wrong"):
            reply = await ask(house.proxy.admin_port, method, "/admin/v1/keys", [("Authorization", credential)], data)
            assert reply.status in (401, 403)


async def test_two_credentials_are_refused_or_one_source_wins(house: House) -> None:
    """T094"""
    first, second = await house.key(), await house.key()
    bad = "wk-nobody-nothing"
    pairs = [(first.secret, bad), (bad, first.secret), (first.secret, second.secret)]
    for one, other in pairs:
        for name in ("Authorization", "x-api-key"):
            value = f"Bearer {other}" if name == "Authorization" else other
            sent = [("Authorization", f"Bearer {one}"), (name, value)]
            reply = await ask(house.proxy.port, "POST", CHAT, sent, as_json(chat()))
            assert reply.status in (400, 401)
            reply.error()
    assert house.u1.seen == []
