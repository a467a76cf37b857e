"""A sidecar for clients that others wrote. The model's name is the caller's alone, and what a client was told stands beside what was booked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine_adapter.simulator import parse_fault
from tests.gateway.house import House

MODEL = "assistant"
PROMPT = "say something about the river"
LIMIT = 12

BLOCKED: dict[str, Any] = {"rate": None, "burst": None, "cap": {"tokens": 0, "seconds": 3600}}
CAP, BEYOND = 1000, 900
EVENT = 2
"""Tokens that one event may have: a word, or by its bytes two where the engine gives no figures on the way."""
CAPPED: dict[str, Any] = {
    "rate": None,
    "burst": None,
    "max_output_tokens": None,
    "cap": {"tokens": CAP, "seconds": 3600},
}

ZONE: dict[str, Any] = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}

T = TypeVar("T")


@dataclass(frozen=True)
class Told:
    """What a client was told of one answer. The simulated worker's tokens are words."""

    model: str | None
    prompt: int
    completion: int
    text: str = ""
    reason: str | None = None


def house(directory: Path, *, tier: dict[str, Any] | None = None, served: str = "m1", url: str | None = None) -> House:
    """`served`: the model's name at the first worker, which is at `url`, or the simulated one."""
    routes = {"primary": [{"backend": "u1", "model": served}], "overflow": [{"backend": "u2", "model": "m2"}]}
    return House(
        directory,
        tier=tier,
        models={MODEL: routes},
        prices={f"{MODEL}@u1": {"prompt": 1, "completion": 2}},
        backends={"u1": {"url": url}} if url else {},
    )


# ---- what the worker does --------------------------------------------------------------------------------------------


def breaking(house: House, after: int = 3) -> None:
    """The next answer's connection breaks after so many tokens."""
    house.large.next_faults.append(parse_fault(f"break:{after}"))


def side_by_side(house: House, opened: Callable[[], Iterator[T]]) -> list[list[T]]:
    """Two streams to their ends: both run before either goes on at full speed, so neither was told of the other's use."""
    house.large.tokens_per_second = 20
    streams = [opened(), opened()]
    begun = [[next(stream)] for stream in streams]
    house.large.tokens_per_second = None
    return [[*events, *stream] for events, stream in zip(begun, streams, strict=True)]


# ---- what became of it -----------------------------------------------------------------------------------------------


def statuses(house: House) -> Counter[int]:
    """How often weir answered with which status."""
    found: Counter[int] = Counter()
    for family in house.sidecar._metrics.registry.collect():
        for sample in family.samples:
            if sample.name == "weir_requests_total":
                found[int(sample.labels["status"])] += int(sample.value)
    return found


async def booked(house: House, told: Told) -> Any:
    """The only record. It says what the client was told, and the answer has as many words."""
    (row,) = await house.rows()
    assert (row.prompt_tokens, row.completion_tokens) == (told.prompt, told.completion)
    assert (row.model_requested, told.model) == (MODEL, MODEL)
    assert (row.ending, row.usage_source) == ("completed", "engine")
    assert len(told.text.split()) == told.completion
    return row


async def cut(house: House, told: Sequence[Told], reason: str) -> None:
    """The two answers shared what the cap had left, and whichever had to end there looks like one that reached its limit."""
    rows = await house.rows(2)
    usages = sorted((one.prompt, one.completion) for one in told)
    assert sorted((row.prompt_tokens, row.completion_tokens) for row in rows) == usages
    assert {(one.model, one.reason) for one in told} == {(MODEL, reason)}
    assert "cut_at_cap" in {row.ending for row in rows} <= {"cut_at_cap", "completed"}
    assert all(len(one.text.split()) <= one.completion < BEYOND for one in told)
    assert sum(map(sum, usages)) <= CAP + len(told) * EVENT


async def broken(house: House, words: int, *, exact: bool = True) -> None:
    """The stream is charged as far as it came, and nobody asked again. Not `exact`: the engine gives no figures on the way,
    and long words are taken for several tokens."""
    (row,) = await house.rows()
    assert row.ending == "engine_broke"
    assert 0 < words <= row.completion_tokens <= words * (1 if exact else EVENT)
    assert len(house.large.requests) == 1
    assert not house.cheap.requests


async def left(house: House, words: int) -> None:
    """The stream that its client closed is charged for what was made by then, and no longer made."""
    (row,) = await house.rows()
    assert row.ending == "client_gone"
    assert words <= row.completion_tokens < BEYOND
    assert house.large.running == 0
    window = (await house.windows())["hour"]
    assert window["used"] == row.prompt_tokens + row.completion_tokens
