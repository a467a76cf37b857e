"""Event streams: which scanner reads those of which endpoint."""

from __future__ import annotations

from engine_adapter.chat_events import ChatScanner
from engine_adapter.choices import NotAnAnswer
from engine_adapter.framing import LARGEST_EVENT
from engine_adapter.request import Endpoint
from engine_adapter.scanner import EngineErrorEvent, Scanner

__all__ = ["LARGEST_EVENT", "EngineErrorEvent", "Scanner", "scanner"]


def scanner(
    endpoint: Endpoint,
    *,
    wants_usage: bool,
    wants_live_usage: bool,
    wants_token_ids: bool,
    choices: int,
    prompt_estimate: int,
    rename: tuple[str, str] | None,
    prompts: int = 1,
) -> Scanner:
    """The scanner of an endpoint's streams. What a client did not ask for (`wants_…`) is taken out for it."""
    if endpoint not in ("chat", "completions"):
        raise NotAnAnswer(f"Streams of {endpoint} cannot be read yet.")
    return ChatScanner(
        endpoint,
        wants_usage=wants_usage,
        wants_live_usage=wants_live_usage,
        wants_token_ids=wants_token_ids,
        choices=choices,
        prompt_estimate=prompt_estimate,
        rename=rename,
        prompts=prompts,
    )
