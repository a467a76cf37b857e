"""What only vLLM does: the shapes of its errors and the names of its metrics. Pure.

Seen of vLLM 0.32.0; the metrics are described at https://docs.vllm.ai/en/latest/usage/metrics.html.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_MESSAGE = 4_000
"""Characters of a worker's own message that are passed on."""


@dataclass(frozen=True, slots=True)
class EngineError:
    """An error answer in OpenAI's words. `code` is the engine's own where it is a word (vLLM repeats the status there)."""

    status: int
    type: str
    code: str | None
    message: str
    param: str | None = None


def error_of(status: int, body: bytes) -> EngineError:
    """Reads any of the shapes that come: `{"error": {…}}`, `{"error": "Unauthorized"}`, `{"type": "error", "error": {…}}`,
    `{"detail": …}`, other JSON, no JSON at all."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return _error(status, body.decode("utf-8", "replace").strip())
    members = answer if isinstance(answer, dict) else {}
    error = members.get("error", members)
    if isinstance(error, dict):
        message = error.get("message", error.get("detail"))
        return _error(status, message, error.get("type"), error.get("code"), error.get("param"))
    return _error(status, error)


def _error(status: int, message: Any, kind: Any = None, code: Any = None, param: Any = None) -> EngineError:
    return EngineError(
        status,
        kind if isinstance(kind, str) and kind else "server_error" if status >= 500 else "invalid_request_error",
        code if isinstance(code, str) and not code.isdigit() else None,
        _text(message)[:MAX_MESSAGE] or f"The worker answered {status} without a word.",
        param if isinstance(param, str) else None,
    )


def _text(message: Any) -> str:
    if message is None:
        return ""
    return message if isinstance(message, str) else msgspec.json.encode(message).decode()


def refuses(field: str, status: int, body: bytes) -> bool:
    """Whether an error answer says that the engine does not know a member of the request, `return_token_ids` for example:
    named as the error's param or place, or in a sentence that calls it unknown.

    A message may repeat words of the caller's: only that the same request passes without the member proves it.
    """
    if status not in (400, 422):
        return False
    error = error_of(status, body)
    name = re.escape(field)
    if error.param is not None and re.search(rf"\b{name}\b", error.param):
        return True
    place = rf"['\"]loc['\"]\s*:\s*(?:\[[^\]]*['\"]{name}['\"]|['\"][\w.]*\b{name}\b)"
    sentence = rf"{_UNKNOWN}[^.]{{0,80}}\b{name}\b|\b{name}\b[^.]{{0,80}}{_UNKNOWN}"
    return re.search(f"{place}|{sentence}", error.message, re.IGNORECASE) is not None


_UNKNOWN = r"(?:unknown|unrecogni[sz]ed|unexpected|unsupported|not supported|not permitted|not allowed|forbidden|extra (?:field|input)s?)"
_LOST_ERROR = re.compile(r"validation errors? for ChatCompletionStreamResponse\b.*'code': ([45]\d\d)\}", re.DOTALL)


def status_of_lost_error(message: str) -> int | None:
    """The status in the message of an error event of /v1/messages. There vLLM reads its own chat events, takes one that
    is an error for a broken one, and of its words little more than the code is left. None if it is another message."""
    found = _LOST_ERROR.search(message[:MAX_MESSAGE])
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class Counters:
    """An engine's own figures, of all its models and engine cores together.

    It counts a prompt once for each of its n choices, and tokens of aborted requests too.
    """

    prompt_tokens: int
    generation_tokens: int
    running: int
    waiting: int


_NAMES = {
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
}
# name{labels} value, of the text format: https://prometheus.io/docs/instrumenting/exposition_formats/
_SAMPLE = re.compile(r"^(vllm:\w+)(?:\{.*\})?[ \t]+([0-9.eE+-]+)", re.MULTILINE)


def read_counters(text: str) -> Counters:
    """From the text of /metrics. Raises ValueError if one of the figures is missing."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        if name in _NAMES:
            sums[_NAMES[name]] = sums.get(_NAMES[name], 0) + float(value)
    if missing := [name for name, ours in _NAMES.items() if ours not in sums]:
        raise ValueError(f"/metrics has no {', '.join(missing)}; is this a vLLM server?")
    return Counters(**{name: int(value) for name, value in sums.items()})
