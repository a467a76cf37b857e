"""Nobody sees a key that is not theirs, and no request chooses where it goes."""

from __future__ import annotations

import asyncio

import pytest

from tests.cases.conftest import Build
from tests.cases.house import CHAT, House
from tests.cases.house import body as chat
from tests.cases.proxy import U1_KEY
from tests.cases.stub import Trap, failure
from tests.cases.wire import as_json, ask, bearer

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_the_callers_key_never_reaches_the_engine(house: House) -> None:
    """T085"""
    key = await house.key()
    places = [("x-api-key", key.secret), ("api-key", key.secret), ("Cookie", f"s={key.secret}")]
    assert (await house.post(key, chat(), headers=places)).status == 200
    assert key.secret.encode() not in house.u1.last.raw
    assert house.u1.last.all("authorization") == [f"Bearer {U1_KEY}"]


@pytest.mark.parametrize("field", ["api_base", "base_url", "api_key", "organization"])
async def test_no_field_of_the_body_chooses_the_target(house: House, field: str) -> None:
    """T086"""
    key = await house.key()
    async with Trap().set() as trap:
        reply = await house.post(key, chat(**{field: f"http://127.0.0.1:{trap.port}/v1"}))
        assert reply.status in (200, 400)
        if reply.status == 200:
            assert house.u1.last.all("authorization") == [f"Bearer {U1_KEY}"]
        assert trap.connections == 0


TRICKS = [
    "/v1/../admin/keys",
    "/v1/../admin/v1/keys",
    "/v1/%2e%2e/admin/keys",
    "/v1/%2e%2e/admin/v1/keys",
    "//admin/keys",
    "/v1/..;/admin/keys",
    "/v1/chat%2Fcompletions",
    "/v1/%252e%252e/metrics",
    "/v1\\..\\admin",
    "/v1/./models",
    "/admin/v1/keys",
    "/metrics",
    "http://127.0.0.1/admin/v1/keys",
]


@pytest.mark.parametrize("target", TRICKS)
@pytest.mark.parametrize("known", [True, False], ids=["with a key", "without"])
async def test_path_tricks_lead_nowhere(house: House, target: str, known: bool) -> None:
    """T087"""
    key = await house.key()
    sent = [bearer(key.secret)] if known else []
    for method, data in (("GET", None), ("POST", as_json(chat()))):
        reply = await ask(house.proxy.port, method, target, sent, data)
        assert reply.status in (400, 401, 404, 405), reply.body
        assert b"secret" not in reply.body
        assert b"weir_" not in reply.body
    everything = house.u1.seen + house.u1.probes
    assert not any(".." in seen.target or "%2e" in seen.target.lower() for seen in everything)
    assert house.u1.seen == []


async def test_a_keys_secret_is_nowhere_but_in_its_creation(build: Build) -> None:
    """T088"""
    async with build() as house:
        key = await house.key(limit=400)
        part = key.secret.rpartition("-")[2]
        said: list[bytes] = []
        house.u1.does(failure(400))
        said.append((await house.post(key, chat())).body)
        said.append((await house.post(key, chat(messages=[{"role": "user", "content": "x" * 5_000}]))).body)
        await house.spent(key, 9, 382)
        said.append((await house.post(key, chat())).body)
        misspelt = await ask(house.proxy.port, "POST", CHAT, [bearer(key.secret[3:])], as_json(chat()))
        assert misspelt.status == 401
        said.append(misspelt.body)
        for path in ("", "/windows", "/quota"):
            said.append((await house.admin("GET", f"/keys/{key.id}{path}")).body)
        said.append((await house.admin("GET", "/keys?page_size=1000")).body)
        said.append((await house.metrics()).encode())
        await house.rows(key, 2)
        shown = await house.admin("GET", f"/keys/{key.id}")
        await house.used(key)
        gone = await house.admin("DELETE", f"/keys/{key.id}", headers=[("If-Match", shown.get("etag") or "")])
        assert gone.status in (200, 204)
        key.open = False
        await house.known(key, 401)
        said.append((await house.post(key, chat())).body)
        for table in ("usage_record", "api_key", "audit_log"):
            rows = await house.query(f"SELECT row_to_json(t)::text AS row FROM {table} AS t")
            said.append("\n".join(row["row"] for row in rows).encode())
        assert not any(part.encode() in words for words in said)


async def test_an_expired_key_is_refused_without_its_secret(house: House) -> None:
    """T088"""
    asked = {"name": "case-expired", "tier": "cases", "expires_at": "2020-01-01T00:00:00Z"}
    made = await house.admin("POST", "/keys", asked)
    if made.status == 201:
        secret = made.json()["secret"]
        reply = await ask(house.proxy.port, "POST", CHAT, [bearer(secret)], as_json(chat()))
        assert reply.error(401)["code"] == "invalid_api_key"
        assert secret.rpartition("-")[2] not in reply.body.decode() + house.proxy.log()
    else:
        assert made.status in (400, 422)


@pytest.mark.parametrize("status", [401, 403])
async def test_the_engines_own_401_is_a_bad_gateway_without_its_words(house: House, status: int) -> None:
    """T089"""
    key = await house.key()
    house.u1.does(failure(status, "Incorrect API key provided: sk-up-123. See http://u1.internal:8000"))
    reply = await house.post(key, chat())
    assert reply.status in (502, 503)
    reply.error()
    assert b"sk-up-123" not in reply.body
    assert b"u1.internal" not in reply.body
    row = await house.row(key)
    assert row["ending"] in ("engine_refused", "engine_unavailable")
    assert await house.used(key) == 0


async def test_a_connection_failure_does_not_name_the_engines_address(house: House) -> None:
    """T089"""
    key = await house.key()
    for model in ("refusing", "hole"):
        reply = await house.post(key, chat(model=model))
        assert reply.status in (502, 503, 504)
        reply.error()
        assert b"127.0.0.1" not in reply.body
    await house.rows(key, 2)
    assert await house.used(key) == 0


async def test_odd_targets_do_not_end_the_proxy(house: House) -> None:
    """T087"""
    await asyncio.gather(
        *(ask(house.proxy.port, "GET", target) for target in ("*", "/%", "/%zz", "/v1/models/%ff", "/v1/models/\xff"))
    )
