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
    said: dict[str, Any] = json.loads(reply.body)["error"]
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


def test_an_error_in_a_stream_has_the_same_shape() -> None:
    event = replies.engine_unavailable(502, "gone").event
    assert event.startswith(b"data: {") and event.endswith(b"}\n\n")
    assert json.loads(event[6:])["error"]["code"] == "engine_unavailable"
