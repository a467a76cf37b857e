from __future__ import annotations

import asyncio
import gzip
import json

from aiohttp.test_utils import TestServer

from tests.admin.person import SECRETS, Person

BODIES = [("POST", "/keys"), ("POST", "/prices"), ("PUT", "/tiers/x"), ("PUT", "/teams/x"), ("POST", "/keys/x/rotate")]


async def test_what_is_no_json_object_is_400(admin: Person) -> None:
    nested = "[" * 100_000
    wrong = (
        "",
        "{",
        "nope",
        '{"name": }',
        "\ufeff{}",
        '{"name": "\\ud800"}',
        nested,
        f'{{"a": {nested}',
        "[]",
        "5",
        "null",
    )
    for method, path in BODIES:
        for raw in (*wrong, b"\xff\xfe{}", b'{"name": "\xff"}', '{"a": ' + "9" * 100_000 + "}"):
            if not raw and path.endswith("/rotate"):
                continue  # a rotation needs no body
            answer = await admin.ask(method, path, raw=raw, If_None_Match="*")
            assert answer.status == 400, (path, raw[:40], answer.text[:200])
            assert answer.error["type"] == "invalid_request_error"


async def test_a_body_of_10_mb_is_413(admin: Person) -> None:
    answer = await admin.ask("POST", "/keys", {"name": "x" * 10_000_000})
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")
    packed = gzip.compress(json.dumps({"name": "x" * 10_000_000}).encode())
    answer = await admin.ask("POST", "/keys", raw=packed, Content_Encoding="gzip")
    assert answer.status == 413


async def test_a_body_that_is_not_encoded_as_it_says_is_400(admin: Person) -> None:
    assert (await admin.ask("POST", "/keys", raw=b"{}", Content_Encoding="gzip")).status == 400


async def test_many_mistakes_do_not_make_a_huge_answer(admin: Person) -> None:
    answer = await admin.ask(
        "POST", "/keys", {"name": "a", **{f"field {i}": 1 for i in range(10_000)}, "z" * 100_000: 1}
    )
    assert answer.status == 422
    assert len(answer.error["details"]) == 100
    assert len(answer.text) < 100_000


async def test_paths_and_methods_that_do_not_exist_are_said_so(admin: Person) -> None:
    for path in ("", "/", "/nothing", "/keys/", "/keys/a/b", "/keys/%2F/quota/x", "/tiers/", "/%00"):
        answer = await admin.get(path)
        assert (answer.status, answer.error["code"]) == (404, "not_found"), path
    for method, path, allowed in (("PUT", "/keys", "GET, HEAD, POST"), ("POST", "/tiers/x", "DELETE, GET, HEAD, PUT")):
        answer = await admin.ask(method, path)
        assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
        assert answer.headers["Allow"] == allowed


async def test_odd_ids_are_just_not_there(admin: Person) -> None:
    for odd in ("nobody", "%00", "a%00b", "%FF", "%ED%A0%80", "x" * 5_000, "'", "%D8%A8", "..", "%2e%2e%2f"):
        for path in (
            f"/keys/{odd}",
            f"/keys/{odd}/quota",
            f"/keys/{odd}/windows",
            f"/tiers/{odd}",
            f"/teams/{odd}/windows",
        ):
            answer = await admin.get(path)
            assert answer.status == 404, (path[:60], answer.text)


async def test_usage_is_asked_in_words_that_make_sense(admin: Person) -> None:
    for query, field in (
        ("from=yesterday", "from"),
        ("from=2026-01-01T00:00:00", "from"),
        ("to=5", "to"),
        ("from=2026-02-01&to=2026-01-01", "to"),
        ("group_by=name", "group_by"),
        ("group_by=key,key", "group_by"),
        ("group_by=key&group_by=key", "group_by"),
        ("group_by=tag:", "group_by"),
        ("group_by=tag:%00", "group_by.0"),
        ("group_by=", "group_by.0"),
        ("bucket=year", "bucket"),
        ("format=xml", "format"),
        ("form=csv", "form"),
    ):
        answer = await admin.get(f"/usage?{query}")
        assert (answer.status, answer.fields) == (422, [field]), query
    for query, field in (
        ("request_id=x", "request_id"),
        ("key=%00", "key"),
        ("ending=", "ending"),
        ("price=1", "price"),
    ):
        answer = await admin.get(f"/usage/records?{query}")
        assert (answer.status, answer.fields) == (422, [field]), query


async def test_an_unescaped_plus_in_an_offset_is_understood(admin: Person) -> None:
    answer = await admin.get("/usage?from=2026-01-01T00:00:00+01:00&to=2026-01-02")
    assert (answer.json["from"], answer.json["to"]) == ("2025-12-31T23:00:00Z", "2026-01-02T00:00:00Z")


async def test_a_client_that_leaves_in_the_middle_of_its_body_harms_nobody(admin: Person, server: TestServer) -> None:
    _, writer = await asyncio.open_connection(server.host, server.port)
    head = f"POST /admin/v1/keys HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SECRETS['admin']}\r\nContent-Length: 100\r\n\r\n"
    writer.write(head.encode() + b'{"name": "ha')
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await admin.get("/keys")).json["items"] == []


async def test_an_unknown_field_is_answered_with_those_that_there_are(admin: Person) -> None:
    limit = "tokens, seconds"
    for method, path, body, field, there_are in (
        ("POST", "/keys", {"name": "a", "nam": 1}, "nam", "name, tier, team, models, tags, expires_at, policy"),
        ("POST", "/keys", {"name": "a", "policy": {"rate": {"token": 1}}}, "policy.rate.token", limit),
        ("PUT", "/teams/a", {"max_n": 1}, "max_n", "rate, burst, cap, max_parallel"),
        ("POST", "/keys/x/rotate", {"grace": 1}, "grace", "grace_seconds"),
    ):
        answer = await admin.ask(method, path, body, If_None_Match="*")
        said = {detail["field"]: detail["message"] for detail in answer.error["details"]}
        assert said[field] == f"is not a field here; there are: {there_are}"
    answer = await admin.get("/usage?form=csv")
    assert answer.error["details"][0]["message"].endswith(
        "there are: page_size, cursor, from, to, group_by, bucket, format"
    )
