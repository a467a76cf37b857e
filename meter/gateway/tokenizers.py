"""Exact prompt sizes, asked for only where a decision hangs on them: by the engine's own /tokenize, or by tiktoken."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from engine_adapter import prompt_size, request
from engine_adapter.errors import EngineBroke, EngineUnavailable
from engine_adapter.http1 import Workers
from meter.gateway.fleet import Fleet, Model
from meter.telemetry import log

TOKENIZE_SECONDS = 5.0
MAX_TOKENIZED_BYTES = 64 * 1024 * 1024
"""/tokenize lists every token id: some ten bytes each."""


class ExactPrompts:
    """One per process. Where no exact size is to be had the answer is None, and the proven bound stands."""

    def __init__(self, workers: Workers, tokenizers: Mapping[str, prompt_size.Tokenizer]) -> None:
        self._workers = workers
        self._tokenizers = tokenizers

    async def count(self, model: Model, call: request.Call) -> int | None:
        if model.tokenizer == "bytes" or not call.prompt.text_bytes:
            return None
        if model.tokenizer == "engine":
            return await self._by_engine(model, call)
        tokenizer = self._tokenizers.get(model.tokenizer)
        return None if tokenizer is None else await asyncio.to_thread(tokenizer.count, call.prompt)

    async def _by_engine(self, model: Model, call: request.Call) -> int | None:
        target = model.primary[0]
        try:
            async with await self._workers.open(
                target.backend.origin,
                method=b"POST",
                path="/tokenize",
                headers=target.backend.headers,
                body=prompt_size.tokenize_body(call, target.model),
                connect_seconds=target.backend.terms.connect_seconds,
                head_seconds=TOKENIZE_SECONDS,
            ) as answer:
                body = await answer.read_all(TOKENIZE_SECONDS, MAX_TOKENIZED_BYTES)
                return prompt_size.tokenize_count(body) if answer.status == 200 else None
        except (EngineUnavailable, EngineBroke, TimeoutError, ValueError) as error:
            log.warning("prompt not counted exactly", model=model.name, reason=str(error))
            return None


def tokenizers_of(fleet: Fleet) -> dict[str, prompt_size.Tokenizer]:
    """The tokenizers that models name and that run in this process. Raises prompt_size.TokenizerUnavailable."""
    named = {model.tokenizer for model in fleet.models.values()}
    return {spec: prompt_size.tokenizer(spec) for spec in sorted(named - {"bytes", "engine"})}
