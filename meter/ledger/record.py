"""The frozen row of one exchange, and how an exchange can end."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import msgspec

Ending = Literal[
    "completed",
    "client_gone",
    "engine_broke",
    "engine_unavailable",
    "engine_refused",
    "cut_at_cap",
    "shut_down",
    "crashed",
]
Route = Literal["primary", "overflow"]
UsageSource = Literal["engine", "counted", "estimated", "none"]


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One exchange: one lease's passage from admission to its end. Fields are the columns of `usage_record`.

    Times are UTC; durations whole milliseconds; amounts tokens; money integer nano-dollars, None without a price.
    """

    exchange_id: UUID
    request_id: UUID
    started_at: datetime
    key_id: str
    endpoint: str
    model_requested: str
    model_served: str
    backend: str
    route: Route
    verdict: str
    ending: Ending
    attempt: int = 1
    team_id: str | None = None
    tags: dict[str, str] = {}
    reason: str | None = None
    streamed: bool = False
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    engine_prompt_tokens: int = 0
    engine_completion_tokens: int = 0
    usage_source: UsageSource = "none"
    expected_tokens: int = 0
    ceiling_tokens: int = 0
    http_status: int | None = None
    finish_reason: str | None = None
    first_token_ms: int | None = None
    duration_ms: int = 0
    price_id: int | None = None
    cost_nanousd: int | None = None

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Opened(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An exchange that was admitted: what a successor needs to book and settle it if this process dies.

    `record` is how it would be booked (ending `crashed`). `account_slot` and `scope_names` say whose lease it holds.
    """

    record: UsageRecord
    account_slot: str
    scope_names: tuple[tuple[Literal["key", "team"], str], ...]


class Advanced(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far a running stream had come, noted with its slices, so that a crash books what was known by then.

    `duration_ms`: since it began; 0: not noted.
    """

    exchange_id: UUID
    prompt_tokens: int
    completion_tokens: int
    engine_prompt_tokens: int = 0
    duration_ms: int = 0


MAX_INTEGER = 2**63 - 1


def storable(record: UsageRecord) -> UsageRecord:
    """The same, but for what no file and no database takes: NUL and lone surrogates in texts, numbers beyond 64 bits."""
    return UsageRecord(**{name: _storable(value) for name, value in msgspec.structs.asdict(record).items()})


def _storable(value: Any) -> Any:
    match value:
        case str():
            return value.replace("\0", "").encode(errors="replace").decode()
        case dict():
            return {_storable(name): _storable(item) for name, item in value.items()}
        case int() if not isinstance(value, bool):
            return max(-MAX_INTEGER, min(value, MAX_INTEGER))
    return value
