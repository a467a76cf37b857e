"""Records as the gateway makes them, each different."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from meter.ledger.record import Opened, UsageRecord

NOON = datetime(2026, 3, 14, 12, tzinfo=UTC)


def record(**changes: Any) -> UsageRecord:
    """9 prompt and 4 completion tokens at NOON, unless `changes` say otherwise."""
    plain: dict[str, Any] = {
        "exchange_id": uuid4(),
        "request_id": uuid4(),
        "started_at": NOON,
        "key_id": "key1",
        "endpoint": "/v1/chat/completions",
        "model_requested": "assistant",
        "model_served": "big-one",
        "backend": "gpu",
        "route": "primary",
        "verdict": "base",
        "ending": "completed",
        "prompt_tokens": 9,
        "completion_tokens": 4,
        "usage_source": "engine",
        "http_status": 200,
    }
    return UsageRecord(**(plain | changes))


def opened(**changes: Any) -> Opened:
    """An exchange as it begins: nothing used yet, to be booked as crashed."""
    begun = {
        "ending": "crashed",
        "prompt_tokens": 0,
        "completion_tokens": 0,
        "usage_source": "none",
        "http_status": None,
    }
    return Opened(record=record(**(begun | changes)), account_slot="key:key1", scope_names=(("key", "key1"),))
