"""A worker that speaks vLLM's wire, with scripted speed and faults: for the demo, for tests, for measuring.

    simulator = Simulator(model="sim", tokens_per_second=50)
    port = await simulator.start("127.0.0.1")
    ...
    await simulator.stop()

Chat and plain completions (streamed or not, n, lists of prompts, token ids, echo), embeddings, /tokenize, /detokenize,
/health, /ping, /version, /load, /metrics, /v1/models. What it writes is what vLLM 0.32.0 writes, byte for byte, apart from the words.

Sizes can be told by eye: a word is a token; a chat message costs 5 tokens besides its words, and the reply's head 3. An answer has
exactly `max_tokens` (`max_completion_tokens` wins; 128 if neither is there), cut to what the context leaves, one token an event.
A reply that is continued elsewhere (its text sent as the last message, or its token ids) goes on with the same words.

Faults are in `faults.py`: for all requests (`simulator.faults`), for the next ones (`simulator.next_faults`), or for one by the
header `x-sim-fault`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from engine_adapter.simulator.faults import Faults, describe, parse_fault, parse_faults
from engine_adapter.simulator.server import Seen, Simulator

__all__ = ["Faults", "Seen", "Simulator", "describe", "parse_fault", "parse_faults", "run"]


async def run(
    host: str,
    port: int,
    model: str = "sim",
    tokens_per_second: float | None = None,
    faults: Iterable[str] = (),
    ready: Callable[[int], object] | None = None,
) -> None:
    """Serves until cancelled. `ready` gets the port once it listens. Raises ValueError for a wrong fault, OSError for a taken port."""
    simulator = Simulator(model, tokens_per_second, faults=parse_faults(faults))
    bound = await simulator.start(host, port)
    try:
        if ready is not None:
            ready(bound)
        await asyncio.Event().wait()
    finally:
        await simulator.stop()
