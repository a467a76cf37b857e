"""Exact prompt sizes, asked for only where a decision hangs on them: by the engine, or by a tokenizer that runs here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from engine_adapter import exact_size, request
from engine_adapter.errors import EngineBroke, EngineUnavailable
from engine_adapter.http1 import Workers
from meter.gateway.fleet import Fleet, Model
from meter.telemetry import log

ENGINE_SECONDS = 5.0
MAX_TOKENIZED_BYTES = 64 * 1024 * 1024
"""/tokenize lists every token id: some ten bytes each."""
COUNT_SECONDS = 2.0
"""What a tokenizer takes for some ten megabytes. Who waits longer, also for others' prompts, gets the bound."""
THREADS = 2


class ExactPrompts:
    """One per process. Where no exact size is to be had the answer is None, and the proven bound stands."""

    def __init__(
        self, workers: Workers, tokenizers: Mapping[str, exact_size.Tokenizer], seconds: float = COUNT_SECONDS
    ) -> None:
        self._workers = workers
        self._tokenizers = tokenizers
        self._seconds = seconds
        self._threads = ThreadPoolExecutor(THREADS, "tokenizer")

    async def count(self, model: Model, call: request.Call) -> int | None:
        if model.tokenizer == "bytes" or not call.prompt.text_bytes:
            return None
        if model.tokenizer == "engine":
            return await self._by_engine(model, call)
        tokenizer = self._tokenizers.get(model.tokenizer)
        return None if tokenizer is None else await self._here(tokenizer, model, call)

    async def _here(self, tokenizer: exact_size.Tokenizer, model: Model, call: request.Call) -> int | None:
        """In a thread, for a while; a count that nobody waits for any more ends after its next piece."""
        given_up = threading.Event()
        counting = self._threads.submit(tokenizer.count, call.prompt, given_up.is_set)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(counting), self._seconds)
        except TimeoutError:
            log.warning("prompt not counted exactly", model=model.name, reason=f"it took {self._seconds:g} s")
            return None
        finally:
            given_up.set()

    async def _by_engine(self, model: Model, call: request.Call) -> int | None:
        target = model.primary[0]
        try:
            path, body = exact_size.question(call, target.model)
            async with await self._workers.open(
                target.backend.origin,
                method=b"POST",
                path=path,
                headers=target.backend.headers,
                body=body,
                connect_seconds=target.backend.terms.connect_seconds,
                head_seconds=ENGINE_SECONDS,
            ) as answer:
                counted = await answer.read_all(ENGINE_SECONDS, MAX_TOKENIZED_BYTES)
                return exact_size.answered(counted) if answer.status == 200 else None
        except (EngineUnavailable, EngineBroke, TimeoutError, ValueError) as error:
            log.warning("prompt not counted exactly", model=model.name, reason=str(error))
            return None


def tokenizers_of(fleet: Fleet) -> dict[str, exact_size.Tokenizer]:
    """The tokenizers that models name and that run in this process. Raises exact_size.TokenizerUnavailable."""
    named = {model.tokenizer for model in fleet.models.values()}
    return {spec: exact_size.tokenizer(spec) for spec in sorted(named - {"bytes", "engine"})}
