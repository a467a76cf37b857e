from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncEngine

from meter.callers.directory import Directory
from meter.ledger.schema import api_key, team, tier
from tests.admin.person import Person
from tests.callers.databases import eventually, now


async def test_a_tier_is_made_read_changed_and_deleted(admin: Person, directory: Directory) -> None:
    made = await admin.ask("PUT", "/tiers/gold", {"max_n": 2, "burst": None}, If_None_Match="*")
    assert made.status == 201
    assert (made.json["name"], made.json["managed_by"], made.json["max_n"]) == ("gold", "rest", 2)
    assert (made.json["effective"]["burst"], made.json["effective"]["max_output_tokens"]) == (None, 1_024)
    assert (await admin.ask("PUT", "/tiers/gold", {}, If_None_Match="*")).status == 412
    assert (await admin.ask("PUT", "/tiers/gold", {})).status == 428
    assert (await admin.ask("PUT", "/tiers/gold", {}, If_Match='"0"')).status == 412
    assert (await admin.ask("PUT", "/tiers/gold", {}, If_Match=made.etag, If_None_Match="*")).status == 400
    assert (await admin.ask("PUT", "/tiers/gold", {}, If_None_Match='"1"')).status == 400
    assert (await admin.ask("PUT", "/tiers/lead", {}, If_Match=made.etag)).status == 404
    changed = await admin.ask("PUT", "/tiers/gold", {"max_n": None}, If_Match=made.etag)
    assert (changed.json["max_n"], changed.json["effective"]["burst"]) == (None, {"tokens": 4_000, "seconds": 5})
    assert (await admin.get("/tiers/gold")).text == changed.text
    assert [tier["name"] for tier in (await admin.get("/tiers")).json["items"]] == ["gold", "standard"]
    await eventually(lambda: directory.known.tiers.get("gold"))
    assert (await admin.ask("DELETE", "/tiers/gold", If_Match=made.etag)).status == 412
    assert (await admin.ask("DELETE", "/tiers/gold", If_Match=changed.etag)).status == 204
    assert (await admin.get("/tiers/gold")).status == 404


async def test_a_team_has_only_limits_and_absent_ones_are_unlimited(admin: Person) -> None:
    made = await admin.ask("PUT", "/teams/search", {"max_parallel": 0}, If_None_Match="*")
    assert made.json["max_parallel"] == 0
    assert made.json["effective"] == {"rate": None, "burst": None, "cap": None, "max_parallel": 0}
    wrong = await admin.ask("PUT", "/teams/other", {"max_n": 1, "cap": {"tokens": -1, "seconds": 1}}, If_None_Match="*")
    assert (wrong.status, sorted(wrong.fields)) == (422, ["cap.tokens", "max_n"])


async def test_names_in_paths_are_any_that_a_file_could_have(admin: Person) -> None:
    for name in ("%D0%BF%D0%BE%D0%B8%D1%81%D0%BA", "a%2Fb", "a%3Fb", "%F0%9F%A6%AB", "%2e%2e%2fkeys"):
        made = await admin.ask("PUT", f"/teams/{name}", {}, If_None_Match="*")
        assert made.status == 201, made.text
        assert (await admin.get(f"/teams/{name}")).json["name"] == made.json["name"]
    for name in ("a%20b", "a@b", "a%0Ab", "%00", "a%00b", "x" * 201):
        assert (await admin.ask("PUT", f"/teams/{name}", {}, If_None_Match="*")).status in (404, 422), name


async def test_a_tier_edit_that_breaks_an_override_is_refused_and_names_the_key(admin: Person) -> None:
    made = await admin.make_key(policy={"cap": {"tokens": 2_000, "seconds": 3_600}})
    tier = await admin.get("/tiers/standard")
    rate = {"rate": {"tokens": 4_000, "seconds": 60}}
    answer = await admin.ask("PUT", "/tiers/standard", rate, If_Match=tier.etag)
    assert (answer.status, answer.fields) == (422, ["cap.tokens"])
    assert made["id"] in answer.error["details"][0]["message"]
    assert (await admin.get("/tiers/standard")).text == tier.text


async def test_what_is_in_use_is_not_deleted(admin: Person) -> None:
    await admin.ask("PUT", "/tiers/gold", {}, If_None_Match="*")
    await admin.ask("PUT", "/teams/search", {}, If_None_Match="*")
    made = await admin.make_key(tier="gold", team="search")
    for path in ("/tiers/gold", "/teams/search", "/tiers/standard"):
        answer = await admin.ask("DELETE", path, If_Match="*")
        assert (answer.status, answer.error["code"]) == (409, "conflict")
        assert path == "/tiers/standard" or made["id"] in answer.error["message"]


async def test_prices_are_added_and_never_change_the_past(admin: Person, directory: Directory) -> None:
    price: dict[str, Any] = {"model": "assistant", "backend": "gpu", "prompt": 0.1, "completion": 1.5}
    made = await admin.ask("POST", "/prices", {**price, "cached_prompt": 0.05})
    assert made.status == 201
    assert (made.json["prompt"], made.json["cached_prompt"], made.json["completion"]) == (0.1, 0.05, 1.5)
    found = await eventually(lambda: directory.prices.at("assistant", "gpu", now()))
    assert (found.id, found.prompt, found.cached_prompt) == (made.json["id"], 100_000_000, 50_000_000)
    start = now() + timedelta(days=2)
    later = await admin.ask("POST", "/prices", {**price, "prompt": 0, "effective_from": start.isoformat()})
    assert (later.json["prompt"], later.json["cached_prompt"]) == (0, None)
    assert datetime.fromisoformat(later.json["effective_from"]) == start
    assert (await admin.ask("POST", "/prices", {**price, "effective_from": start.isoformat()})).status == 409
    past = await admin.ask("POST", "/prices", {**price, "effective_from": "2020-01-01T00:00:00Z"})
    assert (past.status, past.fields) == (422, ["effective_from"])
    page = (await admin.get("/prices?page_size=1")).json
    assert page["items"] == [made.json]
    assert (await admin.get(f"/prices?cursor={page['next']}")).json == {"items": [later.json], "next": None}


async def test_prices_that_are_none_are_refused(admin: Person) -> None:
    good = {"model": "m", "backend": "b", "prompt": 1, "completion": 1}
    wrong: dict[str, tuple[Any, ...]] = {
        "prompt": (-1, "1", True, None, 1e7, 1e-12, [], float("nan"), float("inf")),
        "cached_prompt": (-0.1, "x"),
        "model": ("", "a\x00", 5, "m" * 201),
        "backend": ("", None),
        "effective_from": ("soon", 5, "2031-13-01T00:00:00Z"),
    }
    for field, values in wrong.items():
        for value in values:
            answer = await admin.ask("POST", "/prices", {**good, field: value})
            assert (answer.status, answer.fields) == (422, [field]), (field, value)
    assert (await admin.get("/prices")).json["items"] == []


async def test_the_audit_is_read_newest_first_and_by_subject(admin: Person) -> None:
    made = await admin.make_key()
    await admin.ask("PATCH", f"/keys/{made['id']}", {"name": "b"}, If_Match="*")
    page = (await admin.get("/audit?page_size=2")).json
    assert [(item["actor"], item["action"], item["entity"]) for item in page["items"]] == [
        ("admin", "update", "key"),
        ("admin", "create", "key"),
    ]
    assert (page["items"][0]["before"]["name"], page["items"][0]["after"]["name"]) == ("bot", "b")
    rest = (await admin.get(f"/audit?page_size=2&cursor={page['next']}")).json
    assert [(item["actor"], item["entity_id"]) for item in rest["items"]] == [("file", "standard")]
    assert (await admin.get("/audit?entity=tier")).json["items"] == rest["items"]
    assert (await admin.get("/audit?entity=secret")).status == 422
    assert (await admin.get("/audit?entity_id=%00")).status == 422


async def test_terms_of_a_newer_release_are_shown_as_far_as_they_are_known(admin: Person, engine: AsyncEngine) -> None:
    await admin.ask("PUT", "/teams/search", {}, If_None_Match="*")
    made = await admin.make_key(team="search")
    async with engine.begin() as connection:
        await connection.execute(update(tier).values(policy={"max_n": 3, "field_of_tomorrow": 1}))
        await connection.execute(update(team).values(policy={"cap": "much"}))
        await connection.execute(update(api_key).values(policy={"max_parallel": "many"}))
    for path in (f"/keys/{made['id']}/quota", "/tiers/standard", "/teams/search", "/tiers", "/teams"):
        assert (await admin.get(path)).status == 200, path
    assert (await admin.get("/teams/search/windows")).json == {"windows": [], "leases": []}
    assert (await admin.get("/tiers/standard")).json["effective"]["max_n"] == 3


async def test_whoever_would_make_something_without_saying_so_is_told_how(admin: Person) -> None:
    for kind in ("tier", "team"):
        answer = await admin.ask("PUT", f"/{kind}s/new", {})
        assert (answer.status, answer.error["param"]) == (428, "If-None-Match")
        assert answer.error["message"] == f"There is no {kind} 'new' yet: to create it, send If-None-Match: *."
        assert (await admin.ask("PUT", f"/{kind}s/new", {}, If_None_Match="*")).status == 201
        answer = await admin.ask("PUT", f"/{kind}s/new", {})
        assert (answer.status, answer.error["param"]) == (428, "If-Match")
