"""Verdicts and errors as HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meter.gateway import replies
from quotas.store import Verdict, Window

MINUTE = Window("minute", "key", 2000, 60, 620, 0, 1380, 18.4)
HOUR = Window("hour", "key", 50000, 3600, 620, 0, 49380, 3580.0)
TEAM = Window("hour", "team", 400000, 3600, 620, 0, 399380, 3580.0)


def error(reply: replies.Reply) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(reply.body("openai"))["error"]
    assert set(said) == {"message", "type", "param", "code"}
    return said


@pytest.mark.parametrize(
    ("verdict", "status", "kind", "code"),
    [
        (Verdict("rate", 0, scope="key", retry_after=3.2), 429, "tokens", "rate_limit_exceeded"),
        (
            Verdict("parallel", 0, scope="key", retry_after=1.1, guess=True),
            429,
            "requests",
            "concurrency_limit_exceeded",
        ),
        (Verdict("cap", 0, scope="key", retry_after=900.0), 429, "insufficient_quota", "insufficient_quota"),
        (Verdict("cap", 0, scope="team", retry_after=1.0, by_holds=True), 429, "tokens", "rate_limit_exceeded"),
        (Verdict("cap", 0, scope="key", impossible=True), 413, "invalid_request_error", "request_exceeds_quota"),
        (
            Verdict("cap", 0, scope="key", impossible=True, blocked=True),
            429,
            "insufficient_quota",
            "insufficient_quota",
        ),
    ],
)
def test_a_refusal_is_told_by_its_rule(verdict: Verdict, status: int, kind: str, code: str) -> None:
    reply = replies.refused(verdict, "this request needs 600 tokens", never=status == 413)
    said = error(reply)
    assert (reply.status, said["type"], said["code"]) == (status, kind, code)
    assert "600 tokens" in said["message"]
    assert ("team" in said["message"]) is (verdict.scope == "team")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (3.2, {"retry-after": "4", "retry-after-ms": "3200", "x-should-retry": "true"}),
        (900.0, {"retry-after": "900", "retry-after-ms": "900000", "x-should-retry": "false"}),
        (None, {"x-should-retry": "false"}),
    ],
)
def test_the_moment_to_come_back_is_rounded_up_and_left_out_where_waiting_cannot_help(
    seconds: float | None, expected: dict[str, str]
) -> None:
    headers = dict(replies.refused(Verdict("rate", 0, scope="key", retry_after=seconds), "").headers)
    assert {name: headers[name] for name in headers if "retry" in name} == expected


def test_the_headers_show_every_window_and_the_tightest() -> None:
    headers = dict(replies.quota_headers(Verdict("base", 0, windows=(MINUTE, HOUR, TEAM))))
    assert headers["x-ratelimit-limit-tokens"] == "2000"
    assert headers["x-ratelimit-remaining-tokens"] == "1380"
    assert headers["x-ratelimit-reset-tokens"] == "18.4s"
    assert headers["ratelimit"] == '"minute";r=1380;t=19'
    assert headers["ratelimit-policy"] == (
        '"minute";q=2000;w=60;qu="tokens", "hour";q=50000;w=3600;qu="tokens", "team-hour";q=400000;w=3600;qu="tokens"'
    )


def test_a_key_without_limits_has_a_verdict_and_no_windows() -> None:
    assert replies.quota_headers(Verdict("base", 0)) == [("x-weir-verdict", "base")]


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/messages", "anthropic"),
        ("/v1/messages/count_tokens", "anthropic"),
        ("/v1/messages/batches", "anthropic"),
        ("/v1/messagesx", "openai"),
        ("/v1/responses", "responses"),
        ("/v1/chat/completions", "openai"),
        ("/tokenize", "openai"),
        ("/", "openai"),
    ],
)
def test_errors_are_told_in_the_words_of_the_path(path: str, dialect: str) -> None:
    assert replies.dialect_of(path) == dialect


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (replies.unauthorized("missing"), "authentication_error"),
        (replies.not_found("/v1/messages/x"), "not_found_error"),
        (replies.model_not_found("m"), "not_found_error"),
        (replies.bad_request("wrong", "max_tokens"), "invalid_request_error"),
        (replies.bad_request("packed", status=415), "invalid_request_error"),
        (replies.method_not_allowed("GET", ["POST"]), "invalid_request_error"),
        (replies.too_slow(), "invalid_request_error"),
        (replies.too_large(9), "request_too_large"),
        (replies.refused(Verdict("cap", 0, scope="key", impossible=True), "", never=True), "request_too_large"),
        (replies.refused(Verdict("rate", 0, scope="key", retry_after=3.2), ""), "rate_limit_error"),
        (replies.refused(Verdict("parallel", 0, scope="key", retry_after=1.0), ""), "rate_limit_error"),
        (replies.Reply(403, "invalid_request_error", None, "no"), "permission_error"),
        (replies.internal(), "api_error"),
        (replies.engine_unavailable(502, "gone"), "api_error"),
        (replies.engine_unavailable(504, "silent"), "api_error"),
        (replies.engine_unavailable(503, "busy"), "overloaded_error"),
        (replies.quota_unavailable(), "overloaded_error"),
        (replies.ledger_full(), "overloaded_error"),
        (replies.shutting_down(), "overloaded_error"),
    ],
)
def test_messages_are_told_of_every_error_in_anthropic_s_words(reply: replies.Reply, kind: str) -> None:
    said = json.loads(reply.body("anthropic"))
    assert said == {"type": "error", "error": {"type": kind, "message": reply.message}}


OPENAI_BODY = b'{"error": {"message": "too long", "code": 400}, "more": 1}'
ANTHROPIC_BODY = b'{"type": "error", "error": {"type": "BadRequestError", "message": "too long"}}'


@pytest.mark.parametrize(
    ("dialect", "body", "passed_on"),
    [
        ("openai", OPENAI_BODY, True),
        ("responses", OPENAI_BODY, True),
        ("anthropic", ANTHROPIC_BODY, True),
        ("openai", ANTHROPIC_BODY, False),
        ("anthropic", OPENAI_BODY, False),
        ("openai", b'{"error": "Unauthorized"}', False),
        ("openai", b'{"detail": "Not Found"}', False),
        ("anthropic", b"<html>", False),
        ("openai", b"[" * 100_000, False),
    ],
)
def test_a_worker_s_own_error_goes_on_as_it_came_where_it_has_the_shape(
    dialect: replies.Dialect, body: bytes, passed_on: bool
) -> None:
    reply = replies.Reply(400, "invalid_request_error", None, "too long", as_it_came=body)
    assert (reply.body(dialect) == body) is passed_on
    assert json.loads(reply.body(dialect))["error"]["message"] == "too long"


def fields(event: bytes) -> dict[str, str]:
    assert event.endswith(b"\n\n") and event.count(b"\n\n") == 1
    return dict(line.split(": ", 1) for line in event.decode().rstrip().split("\n"))


def test_an_error_in_a_stream_has_the_shape_of_its_dialect() -> None:
    gone = replies.engine_unavailable(502, "gone")
    ours = {"message": "gone", "type": "server_error", "param": None, "code": "engine_unavailable"}
    assert fields(gone.event("openai")) == {"data": json.dumps({"error": ours}, separators=(",", ":"))}
    messages = fields(gone.event("anthropic"))
    assert (messages["event"], json.loads(messages["data"])["type"]) == ("error", "error")
    assert json.loads(messages["data"])["error"] == {"type": "api_error", "message": "gone"}
    responses = fields(gone.event("responses", 7))
    assert responses["event"] == "error"
    assert json.loads(responses["data"]) == {
        "type": "error",
        "sequence_number": 7,
        "error": ours,
        "code": "engine_unavailable",
        "message": "gone",
        "param": None,
    }
