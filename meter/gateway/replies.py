"""Verdicts and errors into HTTP: the error body of each dialect, the rate-limit headers, the words. Pure: status, headers,
bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

import msgspec

from quotas.store import Verdict, Window

Headers = list[tuple[str, str]]

RETRY_WORTH_WAITING = 60.0
"""Seconds. Official clients sleep through a retry-after up to this; beyond it, retrying by itself cannot help
(https://github.com/openai/openai-python, `_calculate_retry_timeout`)."""

RULE_WINDOWS = {"rate": "minute", "cap": "hour"}


Dialect = Literal["openai", "responses", "anthropic"]
"""Whose words an answer is in. Responses are OpenAI's, but have events of their own in a stream."""

_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""By status (https://docs.claude.com/en/api/errors); every other 4xx is an invalid_request_error, every other 5xx an
api_error."""


def dialect_of(path: str) -> Dialect:
    if path == _ANTHROPIC_PATH or path.startswith(_ANTHROPIC_PATH + "/"):
        return "anthropic"
    return "responses" if path == "/v1/responses" else "openai"


@dataclass(eq=False)
class Reply(Exception):
    """A whole answer of our own. Raised where the story of a request ends early. `type` and `code` are OpenAI's words."""

    status: int
    type: str
    code: str | None
    message: str
    param: str | None = None
    headers: Headers = field(default_factory=list)
    as_it_came: bytes | None = None
    """A worker's own body; it is passed on where it has the dialect's shape."""

    def body(self, dialect: Dialect) -> bytes:
        """`{"error": {"message", "type", "param", "code"}}` (https://platform.openai.com/docs/guides/error-codes), or
        Anthropic's `{"type": "error", "error": {"type", "message"}}`."""
        if self.as_it_came is not None and _has_shape(self.as_it_came, dialect):
            return self.as_it_came
        if dialect == "anthropic":
            return msgspec.json.encode({"type": "error", "error": {"type": self._anthropic, "message": self.message}})
        return msgspec.json.encode({"error": self._openai})

    def event(self, dialect: Dialect, sequence: int = 0) -> bytes:
        """The same as the last event of a stream that broke after its head. `sequence`: the number that a stream of
        responses has come to (https://platform.openai.com/docs/api-reference/responses-streaming/error)."""
        match dialect:
            case "openai":
                return b"data: %b\n\n" % self.body(dialect)
            case "anthropic":
                return b"event: error\ndata: %b\n\n" % self.body(dialect)
            case "responses":
                said = {"type": "error", "code": self.code, "message": self.message, "param": self.param}
                # the official client looks for `error`, others read the event's own members
                event = said | {"sequence_number": sequence, "error": self._openai}
                return b"event: error\ndata: %b\n\n" % msgspec.json.encode(event)

    @property
    def _openai(self) -> dict[str, str | None]:
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    @property
    def _anthropic(self) -> str:
        return _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")


class _ErrorBody(msgspec.Struct):
    error: dict[str, object]
    type: str | None = None


def is_error(body: bytes) -> bool:
    """Whether a worker's answer says that it is an error, in either shape."""
    return _has_shape(body, "openai") or _has_shape(body, "anthropic")


def _has_shape(body: bytes, dialect: Dialect) -> bool:
    try:
        said = msgspec.json.decode(body, type=_ErrorBody)
    except (msgspec.DecodeError, RecursionError):
        return False
    return bool(said.error) and (said.type == "error") is (dialect == "anthropic")


def bad_request(message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> Reply:
    return Reply(status, "invalid_request_error", code, message, param)


def unauthorized(reason: str) -> Reply:
    said = {
        "missing": "No API key was sent: send it as 'Authorization: Bearer wk-…'.",
        "ambiguous": "Two different API keys were sent: send one, as 'Authorization: Bearer wk-…'.",
        "expired": "This API key has expired: ask your administrator for a new one.",
        "disabled": "This API key is disabled: ask your administrator.",
    }
    message = said.get(reason, "This API key is not known: check that it is complete (wk-…) and not deleted.")
    return Reply(
        401, "invalid_request_error", "invalid_api_key", message, headers=[("www-authenticate", "Bearer"), *_no_retry()]
    )


def not_found(path: str) -> Reply:
    return Reply(404, "invalid_request_error", "not_found", f"There is nothing at {path[:200]!r} here.")


def method_not_allowed(method: str, allowed: Iterable[str]) -> Reply:
    names = ", ".join(sorted(allowed))
    return Reply(
        405,
        "invalid_request_error",
        "method_not_allowed",
        f"{method[:20]} is not possible here, only {names}.",
        headers=[("allow", names)],
    )


def model_not_found(model: str) -> Reply:
    message = (
        f"The model {model[:100]!r} does not exist or is not open to this key; GET /v1/models lists those that are."
    )
    return Reply(404, "invalid_request_error", "model_not_found", message, "model")


def not_served(model: str, path: str) -> Reply:
    message = f"The model {model[:100]!r} is not served at {path}: ask for another model, or at another endpoint."
    return Reply(404, "invalid_request_error", "model_not_found", message, "model")


def too_large(limit_bytes: int) -> Reply:
    message = f"The body is larger than the limit of {limit_bytes} bytes."
    return Reply(413, "invalid_request_error", "request_too_large", message, headers=[("connection", "close")])


def too_slow() -> Reply:
    return Reply(
        408,
        "invalid_request_error",
        "request_timeout",
        "The body did not come in time.",
        headers=[("connection", "close")],
    )


def too_many_at_once(limit: int) -> Reply:
    message = f"At most {limit} of these may run at the same time for one key: try again when one of yours has ended."
    return Reply(429, "requests", "concurrency_limit_exceeded", message, headers=_retry(1.0))


def unavailable(code: str, message: str, *, retry_after: float = 1.0) -> Reply:
    return Reply(503, "server_error", code, message, headers=_retry(retry_after))


def quota_unavailable(so: str = "nothing can be admitted") -> Reply:
    return unavailable("quota_unavailable", f"The quota store cannot be reached, so {so}; try again shortly.")


def ledger_full() -> Reply:
    return unavailable(
        "ledger_full",
        "The usage journal is full and its database away, so nothing more can be booked; try again later.",
        retry_after=10.0,
    )


def shutting_down() -> Reply:
    reply = unavailable("shutting_down", "This server is shutting down; send the request again, to another.")
    reply.headers.append(("connection", "close"))
    return reply


def engine_unavailable(status: int, message: str) -> Reply:
    """502 broken or unreachable, 503 busy or leaving, 504 silent. Never names a backend's address."""
    code = "engine_timeout" if status == 504 else "engine_unavailable"
    headers = _retry(1.0) if status == 503 else []
    return Reply(status, "server_error", code, message, headers=headers)


def internal() -> Reply:
    return Reply(500, "server_error", "internal_error", "Something went wrong here; it has been logged.")


def refused(verdict: Verdict, policy_words: str, *, never: bool = False) -> Reply:
    """The answer to a refusal: whose limit it was, the numbers, when to come back; `never`: it is too large for good."""
    headers = quota_headers(verdict)
    owner = "your team's" if verdict.scope == "team" else "this key's"
    if never:
        message = f"This request can never fit {owner} quota: {policy_words}. Shorten the prompt or the output."
        return Reply(413, "invalid_request_error", "request_exceeds_quota", message, headers=headers + _no_retry())
    kind, code = _refusal_code(verdict)
    message = f"{_refusal_words(verdict, owner)} {policy_words}. {_when(verdict)}"
    return Reply(429, kind, code, message, headers=headers + _retry(verdict.retry_after))


def _refusal_code(verdict: Verdict) -> tuple[str, str]:
    if verdict.kind == "parallel":
        return "requests", "concurrency_limit_exceeded"
    if verdict.kind == "cap" and not verdict.by_holds:
        return "insufficient_quota", "insufficient_quota"
    return "tokens", "rate_limit_exceeded"


def _refusal_words(verdict: Verdict, owner: str) -> str:
    if verdict.kind == "parallel":
        return f"Too many of {owner} requests are running at once:"
    window = next(
        (w for w in verdict.windows if w.name == RULE_WINDOWS[verdict.kind] and w.scope == verdict.scope), None
    )
    if window is None:
        return f"{owner.capitalize()} {verdict.kind} limit has no room:"
    return (
        f"{owner.capitalize()} limit of {window.limit} tokens in {window.seconds} s has no room"
        f" ({window.used} used, {window.held} held by running requests):"
    )


def _when(verdict: Verdict) -> str:
    if verdict.blocked:
        return "A limit of 0 blocks: ask your administrator."
    if verdict.retry_after is None:
        return "Waiting will not help: shorten the prompt or the output."
    seconds = max(1, ceil(verdict.retry_after))
    return f"Try again in {seconds} s{' (a guess: running requests are in the way)' if verdict.guess else ''}."


def quota_headers(verdict: Verdict) -> Headers:
    """What the caller may know of its windows: OpenAI's x-ratelimit-… of the tightest, and the IETF draft's fields
    (https://datatracker.ietf.org/doc/draft-ietf-httpapi-ratelimit-headers/)."""
    headers: Headers = [("x-weir-verdict", verdict.kind)]
    if not verdict.windows:
        return headers
    tightest = min(verdict.windows, key=lambda w: w.remaining / w.limit if w.limit else 0.0)
    return [
        *headers,
        ("x-ratelimit-limit-tokens", str(tightest.limit)),
        ("x-ratelimit-remaining-tokens", str(tightest.remaining)),
        ("x-ratelimit-reset-tokens", f"{tightest.reset_seconds:.1f}s"),
        ("ratelimit-policy", ", ".join(_policy_item(window) for window in verdict.windows)),
        ("ratelimit", f'"{_label(tightest)}";r={tightest.remaining};t={ceil(tightest.reset_seconds)}'),
    ]


def _policy_item(window: Window) -> str:
    return f'"{_label(window)}";q={window.limit};w={window.seconds};qu="tokens"'


def _label(window: Window) -> str:
    return window.name if window.scope == "key" else f"team-{window.name}"


def _retry(seconds: float | None) -> Headers:
    if seconds is None:
        return _no_retry()
    return [
        ("retry-after", str(max(1, ceil(seconds)))),
        ("retry-after-ms", str(max(1, ceil(seconds * 1000)))),
        ("x-should-retry", "true" if seconds <= RETRY_WORTH_WAITING else "false"),
    ]


def _no_retry() -> Headers:
    return [("x-should-retry", "false")]


def merged(headers: Headers, extra: Mapping[str, str]) -> Headers:
    """`headers` with `extra` set over them."""
    return [(name, value) for name, value in headers if name not in extra] + list(extra.items())
