"""The traffic site beside the metered calls: routes, methods, the caller's own models and quota, browsers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.house import CHAT, HELLO, House


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("POST", "/v1/unknown", 404, "not_found"),
        ("POST", "/tokenize/", 404, "not_found"),
        ("POST", "/v1/tokenize", 404, "not_found"),
        ("POST", "/v1/responses/", 404, "not_found"),
        ("GET", "/v1/responses/resp_1", 404, "not_found"),
        ("POST", "/v1/chat/completions/batch", 404, "not_found"),
        ("POST", "//v1/rerank", 404, "not_found"),
        ("POST", "/v2/rerank", 404, "not_found"),
        ("POST", "/rerank", 404, "not_found"),
        ("GET", "/detokenize", 405, "method_not_allowed"),
        ("GET", "/v1/score", 405, "method_not_allowed"),
        ("POST", "/v1%2Fchat%2Fcompletions", 404, "not_found"),
        ("POST", "/V1/CHAT/COMPLETIONS", 404, "not_found"),
        ("POST", "/v1/chat/completions/", 404, "not_found"),
        ("GET", "//admin/keys", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("PUT", "/v1/models", 405, "method_not_allowed"),
        ("OPTIONS", CHAT, 405, "method_not_allowed"),
        ("GET", "/v1/models/no%2Fsuch", 404, "model_not_found"),
    ],
)
async def test_what_is_not_served_is_refused_in_the_error_shape(
    tmp_path: Path, method: str, path: str, status: int, code: str
) -> None:
    async with House(tmp_path) as house:
        answer = await house.raw(method, path)
        assert (answer.status, answer.json["error"]["code"]) == (status, code)
        assert ("allow" in answer.headers) is (status == 405)
        assert not house.large.requests


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status", "kind"),
    [
        ("POST", "/v1/messages", {}, b"{}", 401, "authentication_error"),
        ("POST", "/v1/messages", None, b"{", 400, "invalid_request_error"),
        ("POST", "/v1/messages", None, b'{"model":"m9","messages":[],"max_tokens":1}', 400, "invalid_request_error"),
        ("POST", "/v1/messages/count_tokens", None, b'{"model":"m9"}', 404, "not_found_error"),
        ("POST", "/v1/messages/count_tokens", {}, b"{}", 401, "authentication_error"),
        ("POST", "/v1/messages/batches", None, b"{}", 404, "not_found_error"),
        ("GET", "/v1/messages", None, None, 405, "invalid_request_error"),
        ("POST", "/v1/messages", None, b" " * 20_000, 413, "request_too_large"),
    ],
)
async def test_messages_are_refused_in_anthropic_s_shape(
    tmp_path: Path, method: str, path: str, headers: dict[str, str] | None, body: bytes | None, status: int, kind: str
) -> None:
    async with House(tmp_path, listen={"max_body_mb": 0.01}) as house:
        answer = await house.raw(method, path, headers=headers, body=body)
        said = answer.json
        assert (answer.status, said["type"], said["error"]["type"]) == (status, "error", kind)
        assert set(said["error"]) == {"type", "message"}
        assert answer.headers["x-weir-request-id"]
        assert not house.large.requests


async def test_a_caller_sees_its_own_models_also_those_with_a_slash(tmp_path: Path) -> None:
    route = {"primary": [{"backend": "u1", "model": "m1"}]}
    async with House(tmp_path, tier={"models": ["m1", "org/m"]}, models={"org/m": route, "hidden": route}) as house:
        listed = (await house.get("/v1/models")).json
        assert [model["id"] for model in listed["data"]] == ["m1", "org/m"]
        assert (await house.raw("GET", "/v1/models/org%2Fm")).json["id"] == "org/m"
        assert (await house.get("/v1/models/hidden")).status == 404
        refused = await house.post({**HELLO, "model": "hidden"})
        assert (refused.status, refused.json["error"]["code"]) == (404, "model_not_found")
        head = await house.get("/v1/models", method="HEAD")
        assert (head.status, head.body) == (200, b"")


async def test_the_quota_shows_every_window_and_a_null_one_nowhere(tmp_path: Path) -> None:
    async with House(tmp_path, tier={"cap": None}) as house:
        answer = await house.post()
        view = (await house.get("/v1/quota")).json
        assert [window["name"] for window in view["windows"]] == ["minute", "burst"]
        assert "hour" not in answer.headers["ratelimit-policy"]


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wk-nobody-nothing"}, {"Authorization": "Basic eDp5"}]
)
async def test_without_a_known_key_nothing_is_read(tmp_path: Path, headers: dict[str, str]) -> None:
    async with House(tmp_path) as house:
        for path in (CHAT, "/v1/models", "/v1/quota"):
            answer = await house.raw("POST" if path == CHAT else "GET", path, headers=headers, body=b"{")
            assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": "16"}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"n": 5}, "n"),
        ({"messages": []}, "messages"),
        ({"model": 5}, "model"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
)
async def test_an_odd_body_is_refused_with_the_field_named(tmp_path: Path, change: dict[str, Any], param: str) -> None:
    async with House(tmp_path) as house:
        answer = await house.post({**HELLO, **change})
        assert (answer.status, answer.json["error"]["param"]) == (400, param)
        assert not house.large.requests


async def test_a_body_above_the_limit_is_refused_whether_or_not_it_says_its_size(tmp_path: Path) -> None:
    async with House(tmp_path, listen={"max_body_mb": 0.01}) as house:

        async def pieces() -> Any:
            for _ in range(20):
                yield b" " * 1024

        declared = await house.post(b" " * 20_000)
        async with house.session.post(house.base + CHAT, data=pieces(), headers=house.auth) as undeclared:
            assert [declared.status, undeclared.status] == [413, 413]
        assert declared.json["error"]["code"] == "request_too_large"


async def test_browsers_of_a_configured_origin_are_told_what_they_may(tmp_path: Path) -> None:
    async with House(tmp_path, listen={"cors_origins": ["https://app.test"]}) as house:
        origin = {"Origin": "https://app.test"}
        preflight = await house.raw("OPTIONS", CHAT, headers=origin)
        answered = await house.post(headers=origin)
        refused = await house.raw("POST", CHAT, headers=origin, body=b"{}")
        stranger = await house.raw("OPTIONS", CHAT, headers={"Origin": "https://other.test"})
        assert preflight.status == 204 and "authorization" in preflight.headers["access-control-allow-headers"]
        assert refused.status == 401
        for answer in (preflight, answered, refused):
            assert answer.headers["access-control-allow-origin"] == "https://app.test"
        assert "access-control-allow-origin" not in stranger.headers


async def test_a_prompt_is_counted_exactly_before_it_is_refused_for_its_bound(tmp_path: Path) -> None:
    """Long words: many bytes, few tokens. Only the engine's own tokenizer knows that they fit."""
    cap = {"rate": None, "burst": None, "cap": {"tokens": 500, "seconds": 3600}}
    body = {**HELLO, "messages": [{"role": "user", "content": "incomprehensibilities " * 60}]}
    route = {"primary": [{"backend": "u1", "model": "m1"}]}
    async with House(tmp_path, tier=cap, models={"m1": {**route, "tokenizer": "engine"}, "m2": route}) as house:
        refused = await house.post({**body, "model": "m2"})
        counted = await house.post(body)
        assert (refused.status, refused.json["error"]["code"]) == (413, "request_exceeds_quota")
        assert counted.status == 200


async def test_the_answer_tells_that_and_how_far_the_output_was_lowered(tmp_path: Path) -> None:
    async with House(tmp_path, tier={"max_output_tokens": 10}) as house:
        lowered = await house.post()
        assert lowered.headers["x-weir-max-tokens"] == "10"
        assert lowered.json["usage"]["completion_tokens"] == 10
        assert json.loads(house.large.requests[-1].body)["max_tokens"] == 10
        untouched = await house.post({**HELLO, "max_tokens": 9})
        assert "x-weir-max-tokens" not in untouched.headers


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"\x00\x01\x02 not http\r\n\r\n", 400),
        (b"FOO /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nCookie: a=" + b"x" * 20_000 + b"\r\n\r\n", 400),
        (b"POST /v1/models HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    ],
)
async def test_what_is_no_proper_http_is_refused_in_the_error_shape(tmp_path: Path, head: bytes, status: int) -> None:
    async with House(tmp_path) as house:
        reader, writer = await asyncio.open_connection("127.0.0.1", house.sidecar.ports.traffic)
        writer.write(head)
        answer = await reader.read()
        writer.close()
        assert int(answer.split(b" ")[1]) == status
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
        assert (await house.post()).status == 200
