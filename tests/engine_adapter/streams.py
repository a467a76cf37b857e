"""Event streams of all dialects for tests: written by hand, or recorded of vLLM 0.32 (`wire/*.sse`: bodies as they came)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine_adapter import events
from engine_adapter.events import Scanner

WIRE = Path(__file__).with_name("wire")
DONE = b"data: [DONE]\n\n"


def scanner(endpoint: Any = "chat", **changed: Any) -> Scanner:
    """For a client that asked for nothing special; the prompt is thought to have 11 tokens."""
    unasked = {"wants_usage": False, "wants_live_usage": False, "wants_token_ids": False}
    settings = {**unasked, "choices": 1, "prompt_estimate": 11, "rename": None}
    return events.scanner(endpoint, **{**settings, **changed})


def run(stream: bytes, endpoint: Any = "chat", **changed: Any) -> tuple[bytes, Scanner]:
    scan = scanner(endpoint, **changed)
    return scan.feed(stream) + scan.end(), scan


def recorded(name: str) -> bytes:
    return (WIRE / f"{name}.sse").read_bytes()


def data(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def typed(kind: str, **members: Any) -> bytes:
    """An event as responses and messages have them."""
    return f"event: {kind}\n".encode() + data({"type": kind, **members})


def values(stream: bytes) -> list[Any]:
    """What the data of each event says, without [DONE]."""
    lines = (line for event in stream.split(b"\n\n") for line in event.split(b"\n") if line.startswith(b"data: "))
    return [json.loads(line[6:]) for line in lines if line != b"data: [DONE]"]
