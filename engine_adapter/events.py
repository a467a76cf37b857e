"""Event streams: which scanner reads those of which endpoint."""

from __future__ import annotations

from engine_adapter.chat_events import ChatScanner
from engine_adapter.framing import LARGEST_EVENT
from engine_adapter.messages_events import MessagesScanner
from engine_adapter.request import Endpoint
from engine_adapter.responses_events import ResponsesScanner
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
    if endpoint == "responses":
        return ResponsesScanner(prompt_estimate=prompt_estimate, rename=rename)
    if endpoint == "messages":
        return MessagesScanner(prompt_estimate=prompt_estimate, rename=rename)
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
