from __future__ import annotations

import pytest

from meter.admin.deps import AdminDeps
from meter.admin.site import PREFIX, admin_app
from tests.admin.person import Client, Person

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def paths(deps: AdminDeps) -> list[str]:
    """Every path of the admin site that needs a token, filled in."""
    found = {resource.canonical for resource in admin_app(deps).router.resources()}
    return sorted(path.replace("{id}", "x").replace("{name}", "standard") for path in found if path.startswith(PREFIX))


async def test_a_callers_key_opens_no_admin_path(admin: Person, deps: AdminDeps) -> None:
    """T093"""
    made = await admin.make_key()
    assert len(paths(deps)) >= 15
    for shown in (made["secret"], made["secret"].rpartition("-")[2]):
        caller = Person(admin.client, shown)
        for path in paths(deps):
            for method in METHODS:
                answer = await caller.ask(method, path.removeprefix(PREFIX))
                assert answer.status == 401, (method, path)
                assert shown not in answer.text
    assert (await admin.get(f"/keys/{made['id']}")).status == 200


WRONG_HEADERS = (
    None,
    "",
    "Bearer",
    "Bearer ",
    "Bearer wrong",
    "Bearer None",
    "Bearer null",
    "Basic adm-6f1d",
    "adm-6f1d",
    "Bearer adm-6f1d adm-6f1d",
    "Bearer adm-6f1",
    "Bearer ÿ",
)


async def test_no_wrong_empty_or_unset_token_opens(client: Client) -> None:
    """T093: the configuration has tokens that are unset, empty, or in a file that is not there."""
    stranger = Person(client, None)
    for header in WRONG_HEADERS:
        answer = await stranger.ask("GET", "/keys", **({} if header is None else {"Authorization": header}))
        assert (answer.status, answer.error["code"]) == (401, "invalid_admin_token"), header
        assert answer.headers["WWW-Authenticate"] == "Bearer"


async def test_the_scheme_may_be_in_any_case(client: Client) -> None:
    assert (await Person(client, None).get("/keys", Authorization="bEARER adm-6f1d")).status == 200


async def test_a_token_is_changed_without_a_restart(admin: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_ADMIN", "another")
    assert (await admin.get("/keys")).status == 401
    admin.token = "another"
    assert (await admin.get("/keys")).status == 200


async def test_an_operator_reads_everything_and_only_disables_keys(admin: Person, operator: Person) -> None:
    made = await admin.make_key()
    path = f"/keys/{made['id']}"
    for readable in (
        "/keys",
        path,
        f"{path}/quota",
        f"{path}/windows",
        "/tiers",
        "/teams",
        "/prices",
        "/usage",
        "/audit",
        "/state",
    ):
        assert (await operator.get(readable)).status == 200, readable
    for method, where, body in (
        ("POST", "/keys", {"name": "mine"}),
        ("DELETE", path, None),
        ("POST", f"{path}/rotate", None),
        ("PUT", f"{path}/quota", {}),
        ("DELETE", f"{path}/quota", None),
        ("PUT", "/tiers/standard", {}),
        ("DELETE", "/tiers/standard", None),
        ("POST", "/prices", {}),
        ("PATCH", path, {"name": "mine"}),
        ("PATCH", path, {"state": "active"}),
        ("PATCH", path, {"state": "disabled", "name": "mine"}),
        ("PATCH", path, {}),
    ):
        answer = await operator.ask(method, where, body, If_Match="*")
        assert (answer.status, answer.error["code"]) == (403, "forbidden"), (method, where, body)
    assert (await admin.get(path)).json["state"] == "active"
    etag = (await operator.get(path)).etag
    answer = await operator.ask("PATCH", path, {"state": "disabled"}, If_Match=etag)
    assert (answer.status, answer.json["state"]) == (200, "disabled")
    (entry,) = (await admin.get(f"/audit?entity_id={made['id']}&actor=operator")).json["items"]
    assert entry["after"]["state"] == "disabled"


async def test_finance_reads_usage_and_prices_and_nothing_else(admin: Person, finance: Person) -> None:
    made = await admin.make_key()
    for readable in ("/usage", "/usage?format=csv", "/usage/records", "/prices"):
        assert (await finance.get(readable)).status == 200, readable
    for path in ("/keys", f"/keys/{made['id']}", "/tiers", "/teams", "/audit", "/state", "/nothing"):
        assert (await finance.get(path)).status == 403, path
    assert (await finance.ask("POST", "/prices", {"model": "m"})).status == 403


async def test_health_and_metrics_are_open_and_tell_no_key(admin: Person, client: Client) -> None:
    """T093"""
    made = await admin.make_key(name="secret project")
    for path in ("/healthz", "/readyz", "/metrics"):
        async with client.get(path) as response:
            text = await response.text()
        assert response.status == 200
        assert not any(word in text for word in (made["id"], made["secret"], "secret project", "adm-6f1d"))
    async with client.get("/nothing") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "not_found"
    async with client.post("/healthz") as response:
        assert response.status == 405
