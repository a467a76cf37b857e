from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from meter.admin.deps import AdminDeps
from meter.admin.site import admin_app
from meter.callers.directory import Directory
from meter.callers.keys import parse
from meter.callers.registry import Registry
from quotas.policy import Limit
from quotas.store import Ask
from tests.admin.person import SECRETS, Person
from tests.callers.databases import config, eventually, now


async def test_the_secret_is_shown_once_and_never_again(admin: Person, registry: Registry) -> None:
    """T108"""
    made = await admin.make_key(name="bot", tags={"feature": "chat"})
    assert made.keys() >= {"id", "name", "tier", "team", "state", "created_at", "expires_at", "secret"}
    assert (made["tier"], made["team"], made["state"], made["expires_at"]) == ("standard", None, "active", None)
    credential = parse(made["secret"])
    assert credential.public_id == made["id"]
    one = await admin.get(f"/keys/{made['id']}")
    patched = await admin.ask("PATCH", f"/keys/{made['id']}", {"name": "robot"}, If_Match=one.etag)
    rotated = await admin.ask("POST", f"/keys/{made['id']}/rotate", {"grace_seconds": 60})
    assert parse(rotated.json["secret"]).secret != credential.secret
    later = [one, patched, await admin.get("/keys"), await admin.get("/audit"), await admin.get("/usage?group_by=key")]
    later += [await admin.get(f"/keys/{made['id']}/{part}") for part in ("quota", "windows")]
    hashes = {(await registry.key(made["id"])).secret_sha256, credential.secret_sha256}
    for answer in later:
        assert answer.status == 200, answer.text
        assert credential.secret not in answer.text
        assert not any(digest in answer.text for digest in hashes)
        assert "sha256" not in answer.text


async def test_a_created_key_opens_here_at_once_and_a_deleted_one_no_more(admin: Person, directory: Directory) -> None:
    made = await admin.make_key()
    caller = await eventually(lambda: directory.by_key(made["id"]))
    assert directory.identify(made["secret"], now()) is caller
    etag = (await admin.get(f"/keys/{made['id']}")).etag
    assert (await admin.ask("DELETE", f"/keys/{made['id']}", If_Match=etag)).status == 204
    await eventually(lambda: directory.by_key(made["id"]) is None)
    assert (await admin.get(f"/keys/{made['id']}")).status == 404


async def test_a_limit_of_0_stays_0_and_1_stays_1(admin: Person, directory: Directory) -> None:
    """T102"""
    for tokens, others in ((0, {}), (1, {"rate": None, "burst": None})):
        cap = {"tokens": tokens, "seconds": 3_600}
        made = await admin.make_key(name=f"limit {tokens}", policy={"cap": cap, **others})
        quota = (await admin.get(f"/keys/{made['id']}/quota")).json
        assert quota["cap"] == quota["effective"]["cap"] == cap
        caller = await eventually(partial(directory.by_key, made["id"]))
        assert caller.account.scopes[0].policy.cap == Limit(tokens, 3_600)


async def test_null_stays_null_and_absent_is_the_tiers(admin: Person, directory: Directory) -> None:
    """T102"""
    unlimited = await admin.make_key(name="null", policy={"rate": None, "burst": None, "cap": None})
    plain = await admin.make_key(name="absent")
    shown = (await admin.get(f"/keys/{unlimited['id']}/quota")).json
    assert (shown["cap"], shown["effective"]["cap"], shown["effective"]["max_parallel"]) == (None, None, 8)
    shown = (await admin.get(f"/keys/{plain['id']}/quota")).json
    assert "cap" not in shown
    assert shown["effective"]["cap"] == {"tokens": 50_000, "seconds": 3_600}
    caller = await eventually(lambda: directory.by_key(unlimited["id"]))
    assert caller.account.scopes[0].policy.cap is None
    windows = (await admin.get(f"/keys/{unlimited['id']}/windows")).json["windows"]
    assert windows == []


WRONG_LIMITS: list[tuple[str, str]] = [
    ('{"rate": {"tokens": -1, "seconds": 60}}', "rate.tokens"),
    ('{"rate": {"tokens": 1.5, "seconds": 60}}', "rate.tokens"),
    ('{"rate": {"tokens": "100", "seconds": 60}}', "rate.tokens"),
    ('{"rate": {"tokens": true, "seconds": 60}}', "rate.tokens"),
    ('{"rate": {"tokens": [], "seconds": 60}}', "rate.tokens"),
    ('{"rate": {"tokens": NaN, "seconds": 60}}', "rate.tokens"),
    ('{"rate": {"tokens": 1e30, "seconds": 60}}', "rate.tokens"),
    ('{"rate": {"tokens": 1e400, "seconds": 60}}', "rate.tokens"),
    ('{"rate": {"tokens": 9223372036854775808, "seconds": 60}}', "rate.tokens"),
    ('{"rate": {"tokens": 2000, "seconds": 0}}', "rate.seconds"),
    ('{"rate": {"tokens": 2000, "seconds": -5}}', "rate.seconds"),
    ('{"rate": {"tokens": 2000, "seconds": 0.001}}', "rate.seconds"),
    ('{"rate": {"tokens": 2000, "seconds": 1000000000000}}', "rate.seconds"),
    ('{"rate": {"tokens": 2000, "seconds": "60"}}', "rate.seconds"),
    ('{"rate": {"tokens": 2000}}', "rate.seconds"),
    ('{"rate": 2000}', "rate"),
    ('{"max_parallel": -1}', "max_parallel"),
    ('{"max_parallel": 1.5}', "max_parallel"),
    ('{"on_cap": "shrug"}', "on_cap"),
    ('{"limt": 5}', "limt"),
    ('{"burst": {"tokens": 0, "seconds": 5}}', "burst.tokens"),
    ('{"burst": {"tokens": 100, "seconds": 5}}', "burst.tokens"),
    ('{"cap": {"tokens": 100, "seconds": 3600}}', "cap.tokens"),
]


async def test_limits_that_make_no_sense_are_refused_by_name_and_nothing_is_stored(
    admin: Person, registry: Registry
) -> None:
    """T103"""
    made = await admin.make_key()
    before = await admin.get(f"/keys/{made['id']}/quota")
    for raw, field in WRONG_LIMITS:
        answers = [
            await admin.ask("PUT", f"/keys/{made['id']}/quota", raw=raw, If_Match=before.etag),
            await admin.ask("PUT", "/tiers/fresh", raw=raw, If_None_Match="*"),
        ]
        assert [answer.status for answer in answers] == [422, 422], raw
        assert [answer.fields for answer in answers] == [[field], [field]], raw
    assert (await admin.get(f"/keys/{made['id']}/quota")).text == before.text
    assert (await admin.get("/tiers/fresh")).status == 404
    assert len(await registry.audit(None, 100, {})) == 2  # the tier standard, the key


async def test_whole_numbers_may_be_written_with_a_point(admin: Person) -> None:
    """T103"""
    made = await admin.make_key(policy={"max_parallel": 100.0})
    quota = (await admin.get(f"/keys/{made['id']}/quota")).json
    assert (quota["max_parallel"], type(quota["max_parallel"])) == (100, int)


WRONG_KEYS: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "name"),
    ({"name": "n" * 301}, "name"),
    ({"name": "n" * 1_000_000}, "name"),
    ({"name": "a\x00b"}, "name"),
    ({"name": "a\nb"}, "name"),
    ({"name": 5}, "name"),
    ({"name": None}, "name"),
    ({}, "name"),
    ({"name": "a", "tier": "nope"}, "tier"),
    ({"name": "a", "tier": "no\x00pe"}, "tier"),
    ({"name": "a", "team": "nope"}, "team"),
    ({"name": "a", "tags": {"k": 1}}, "tags.k"),
    ({"name": "a", "tags": {"k": "\x00"}}, "tags.k"),
    ({"name": "a", "tags": {str(i): "" for i in range(33)}}, "tags"),
    ({"name": "a", "tags": []}, "tags"),
    ({"name": "a", "models": "m"}, "models"),
    ({"name": "a", "models": [""]}, "models.0"),
    ({"name": "a", "expires_at": "tomorrow"}, "expires_at"),
    ({"name": "a", "expires_at": "2031-01-01T00:00:00"}, "expires_at"),
    ({"name": "a", "expires_at": 1_900_000_000}, "expires_at"),
    ({"name": "a", "expires_at": "1900000000"}, "expires_at"),
    ({"name": "a", "expires_at": "9999-12-31T23:59:59-12:00"}, "expires_at"),
    ({"name": "a", "expires_at": "0001-01-01T00:00:00+12:00"}, "expires_at"),
    ({"name": "a", "expires_at": "2001-01-01T00:00:00Z"}, "expires_at"),
    ({"name": "a", "policy": {"rate": {"tokens": -1, "seconds": 60}}}, "policy.rate.tokens"),
    ({"name": "a", "policy": {"cap": {"tokens": 1, "seconds": 60}}}, "policy.cap.tokens"),
    ({"name": "a", "secret": "mine"}, "secret"),
]


async def test_what_cannot_be_a_key_is_422_and_names_the_field(admin: Person, registry: Registry) -> None:
    """T103"""
    for fields, field in WRONG_KEYS:
        answer = await admin.ask("POST", "/keys", fields)
        assert (answer.status, answer.fields) == (422, [field]), str(fields)[:100]
        assert len(answer.text) < 2_000
    assert await registry.keys(None, 10) == []


async def test_all_mistakes_of_a_body_are_listed(admin: Person) -> None:
    wrong = {"name": "", "tags": {"k": 1}, "policy": {"max_n": 0, "priority": "high"}, "zz": 1}
    answer = await admin.ask("POST", "/keys", wrong)
    assert sorted(answer.fields) == ["name", "policy.max_n", "policy.priority", "tags.k", "zz"]


async def test_names_of_any_script_come_back_as_they_are(admin: Person) -> None:
    for name in ("поиск", "検索", "بحث", "🦫 weir", "a/b?c#d%2F", "x" * 300, "'; drop table api_key; --"):
        made = await admin.make_key(name=name)
        assert (await admin.get(f"/keys/{made['id']}")).json["name"] == name


async def test_a_change_needs_the_etag_that_was_read(admin: Person) -> None:
    made = await admin.make_key()
    path = f"/keys/{made['id']}"
    etag = (await admin.get(path)).etag
    for method, where, body in (
        ("PATCH", path, {"name": "b"}),
        ("PUT", f"{path}/quota", {"max_n": 1}),
        ("DELETE", f"{path}/quota", None),
        ("DELETE", path, None),
    ):
        assert (await admin.ask(method, where, body)).status == 428
        assert (await admin.ask(method, where, body, If_Match='"999"')).status == 412
        assert (await admin.ask(method, where, body, If_Match=f"W/{etag}")).status == 412
        assert (await admin.ask(method, where, body, If_Match="7")).status == 400
    first = await admin.ask("PATCH", path, {"name": "b"}, If_Match=f'"5000", {etag}')
    assert (first.status, first.json["name"]) == (200, "b")
    assert (await admin.ask("PATCH", path, {"name": "c"}, If_Match=etag)).status == 412
    assert (await admin.ask("PATCH", path, {"name": "c"}, If_Match="*")).status == 200
    assert (await admin.ask("PATCH", "/keys/nobody", {"name": "c"}, If_Match=etag)).status == 404


async def test_of_two_racing_edits_through_two_processes_one_wins(admin: Person, deps: AdminDeps) -> None:
    """T104"""
    made = await admin.make_key(name="n")
    path = f"/keys/{made['id']}"
    async with TestClient(TestServer(admin_app(deps))) as client:
        other = Person(client, SECRETS["admin"])
        for i in range(20):
            etag = (await admin.get(path)).etag
            tags, name = {"i": str(i)}, f"n_{i}"
            one, two = await asyncio.gather(
                admin.ask("PATCH", path, {"tags": tags}, If_Match=etag),
                other.ask("PATCH", path, {"name": name}, If_Match=etag),
            )
            stands = (await admin.get(path)).json
            assert sorted([one.status, two.status]) == [200, 412]
            assert stands["tags"] == tags if one.status == 200 else stands["name"] == name


async def test_a_patch_changes_what_it_says_and_nothing_else(admin: Person) -> None:
    await admin.ask("PUT", "/teams/search", {}, If_None_Match="*")
    made = await admin.make_key(team="search", models=["a"], tags={"x": "y"}, expires_at="2040-01-01T00:00:00+01:00")
    path = f"/keys/{made['id']}"
    assert made["expires_at"] == "2039-12-31T23:00:00Z"
    one = await admin.ask("PATCH", path, {"team": None, "models": None, "expires_at": None}, If_Match="*")
    assert (one.json["team"], one.json["models"], one.json["expires_at"]) == (None, None, None)
    assert (one.json["name"], one.json["tags"]) == ("bot", {"x": "y"})
    two = await admin.ask("PATCH", path, {"state": "disabled"}, If_Match=one.etag)
    assert two.json["state"] == "disabled"
    wrong = await admin.ask("PATCH", path, {"state": "expired", "name": None, "tier": None}, If_Match="*")
    assert (wrong.status, sorted(wrong.fields)) == (422, ["name", "state", "tier"])


async def test_a_name_that_is_taken_is_a_conflict(admin: Person) -> None:
    """T107"""
    answers = await asyncio.gather(*(admin.ask("POST", "/keys", {"name": "twin"}) for _ in range(20)))
    assert sorted(answer.status for answer in answers) == [201] + [409] * 19
    assert [key["name"] for key in (await admin.get("/keys")).json["items"]] == ["twin"]
    other = await admin.make_key(name="other")
    assert (await admin.ask("PATCH", f"/keys/{other['id']}", {"name": "twin"}, If_Match="*")).status == 409


async def test_of_many_deletions_one_happens_and_the_name_is_free_again(admin: Person) -> None:
    """T107"""
    made = await admin.make_key(name="again")
    answers = await asyncio.gather(*(admin.ask("DELETE", f"/keys/{made['id']}", If_Match="*") for _ in range(20)))
    assert sorted(answer.status for answer in answers) == [204] + [404] * 19
    remade = await admin.make_key(name="again")
    assert remade["id"] != made["id"]
    assert all(window["used"] == 0 for window in (await admin.get(f"/keys/{remade['id']}/windows")).json["windows"])


async def test_pages_show_every_key_once_while_keys_come_and_go(admin: Person, registry: Registry) -> None:
    """T106, smaller"""
    old = [(await admin.make_key(name=f"old {i}"))["id"] for i in range(65)]
    doomed = [(await admin.make_key(name=f"doomed {i}"))["id"] for i in range(5)]
    seen: list[str] = []
    path = "/keys?page_size=10"
    while path:
        page = (await admin.get(path)).json
        seen += [key["id"] for key in page["items"]]
        if doomed:
            await registry.delete_key("ops", doomed.pop(), None)
            await admin.make_key(name=f"new {len(seen)}")
        path = f"/keys?page_size=10&cursor={page['next']}" if page["next"] else ""
    assert len(seen) == len(set(seen))
    assert [key for key in seen if key in set(old)] == old


LISTS = ("/keys", "/tiers", "/teams", "/prices", "/audit", "/usage", "/usage/records")


async def test_pages_that_do_not_exist_are_refused(admin: Person) -> None:
    """T106"""
    for path in LISTS:
        for size in ("0", "-1", "x", "1000000000", "1e2", "", "9" * 5_000):
            answer = await admin.get(f"{path}?page_size={size}")
            assert (answer.status, answer.fields) == (422, ["page_size"]), (path, size)
        for cursor in ("x", "%00", "WyJub3RoaW5nIiwxXQ", "%FF%FE", "W10", "bnVsbA", "WyJrZXlzIiwieCIsInkiXQ", "ü" * 50):
            answer = await admin.get(f"{path}?cursor={cursor}")
            assert answer.status in (400, 422), (path, cursor)
            assert answer.error["param"] == "cursor"
        answer = await admin.get(f"{path}?sort=up")
        assert (answer.status, answer.fields) == (422, ["sort"])


async def test_a_cursor_is_good_for_its_own_list_only(admin: Person) -> None:
    for name in ("a", "b"):
        await admin.make_key(name=name)
    cursor = (await admin.get("/keys?page_size=1")).json["next"]
    assert (await admin.get(f"/keys?page_size=1&cursor={cursor}")).json["next"] is None
    for path in ("/tiers", "/teams", "/prices", "/audit", "/usage/records"):
        assert (await admin.get(f"{path}?cursor={cursor}")).status in (400, 422)


async def test_windows_and_leases_are_what_the_store_has(admin: Person, deps: AdminDeps) -> None:
    await admin.ask("PUT", "/teams/search", {"cap": {"tokens": 9_000, "seconds": 60}}, If_None_Match="*")
    made = await admin.make_key(team="search")
    other = await admin.make_key(name="other", team="search")
    for key in (made, other):
        caller = await eventually(partial(deps.directory.by_key, key["id"]))
        ask = Ask(lease=f"run {key['id']}", expected=100, first_hold=150, ceiling=150, least=50)
        assert (await deps.store.admit(caller.account, ask)).kind == "base"
    view = (await admin.get(f"/keys/{made['id']}/windows")).json
    windows = {(window["scope"], window["name"]): window for window in view["windows"]}
    assert windows.keys() == {("key", "minute"), ("key", "burst"), ("key", "hour"), ("team", "hour")}
    assert windows["key", "hour"].keys() == {
        "name", "scope", "limit", "seconds", "used", "held", "remaining", "reset_seconds",
    }  # fmt: skip
    assert (windows["key", "hour"]["held"], windows["team", "hour"]["held"]) == (150, 300)
    (lease,) = view["leases"]
    assert lease.keys() >= {"request_id", "route", "held", "charged", "age_seconds"}
    assert (lease["request_id"], lease["held"], lease["charged"]) == (f"run {made['id']}", 150, 0)
    team = (await admin.get("/teams/search/windows")).json
    assert [(window["scope"], window["held"]) for window in team["windows"]] == [("team", 300)]
    assert (await admin.get("/keys/nobody/windows")).status == 404
    assert (await admin.get("/teams/nobody/windows")).status == 404


async def test_a_raised_limit_is_in_force_at_once_and_what_was_used_stays(admin: Person, deps: AdminDeps) -> None:
    """T105, the part without grants"""
    made = await admin.make_key(policy={"cap": {"tokens": 2_000, "seconds": 3_600}, "rate": None, "burst": None})
    ask = Ask(lease="one", expected=2_000, first_hold=2_000, ceiling=2_000, least=2_000)
    caller = await eventually(lambda: deps.directory.by_key(made["id"]))
    await deps.store.admit(caller.account, ask)
    await deps.store.settle(caller.account, "one", 2_000)
    next_ask = Ask(lease="two", expected=500, first_hold=500, ceiling=500, least=500)
    assert (await deps.store.admit(caller.account, next_ask)).kind == "cap"
    quota = {"cap": {"tokens": 3_000, "seconds": 3_600}, "rate": None, "burst": None}
    assert (await admin.ask("PUT", f"/keys/{made['id']}/quota", quota, If_Match="*")).status == 200
    raised = await eventually(lambda: _with_cap(deps.directory, made["id"], 3_000))
    assert (await deps.store.admit(raised.account, next_ask)).kind == "base"
    (hour,) = (await admin.get(f"/keys/{made['id']}/windows")).json["windows"]
    assert (hour["used"], hour["held"], hour["limit"], hour["remaining"]) == (2_000, 500, 3_000, 500)


def _with_cap(directory: Directory, key_id: str, tokens: int) -> Any:
    caller = directory.by_key(key_id)
    return caller if caller and caller.tier.cap and caller.tier.cap.tokens == tokens else None


async def test_an_override_is_shown_with_what_is_in_force_and_can_be_taken_back(admin: Person) -> None:
    made = await admin.make_key()
    path = f"/keys/{made['id']}/quota"
    none = await admin.get(path)
    assert none.json.keys() == {"effective"}
    put = await admin.ask("PUT", path, {"max_output_tokens": None, "max_n": 2}, If_Match=none.etag)
    assert (put.json["max_output_tokens"], put.json["max_n"], put.json["effective"]["max_n"]) == (None, 2, 2)
    assert put.json["effective"]["default_output_tokens"] == 512
    assert (await admin.get(path)).text == put.text
    back = await admin.ask("DELETE", path, If_Match=put.etag)
    assert (back.status, back.json) == (200, none.json)


async def test_a_rotation_keeps_the_old_secret_for_its_grace(admin: Person, directory: Directory) -> None:
    made = await admin.make_key()
    rotated = await admin.ask("POST", f"/keys/{made['id']}/rotate", {"grace_seconds": 600})
    assert rotated.status == 200
    await eventually(lambda: directory.known.keys.get(made["id"]) and directory.known.keys[made["id"]].previous_until)
    for secret in (made["secret"], rotated.json["secret"]):
        assert directory.identify(secret, now()).key_id == made["id"]
    assert (await admin.ask("POST", f"/keys/{made['id']}/rotate")).status == 200
    for grace in (-1, 1.5, "60", 10**9, None):
        answer = await admin.ask("POST", f"/keys/{made['id']}/rotate", {"grace_seconds": grace})
        assert (answer.status, answer.fields) == (422, ["grace_seconds"])


async def test_a_key_of_the_file_says_who_rules_it(admin: Person, registry: Registry) -> None:
    file_key = {"id": "gitops1", "name": "git", "tier": "standard", "secret_sha256": "ab" * 32}
    await registry.seed(config(keys=[file_key]))
    answer = await admin.ask("PATCH", "/keys/gitops1", {"name": "mine"}, If_Match="*")
    assert (answer.status, answer.error["code"]) == (409, "managed_by_file")
    assert "configuration file" in answer.error["message"]
    assert (await admin.ask("PATCH", "/keys/gitops1", {"state": "disabled"}, If_Match="*")).status == 200
    assert json.loads((await admin.get("/keys/gitops1")).text)["managed_by"] == "file"
