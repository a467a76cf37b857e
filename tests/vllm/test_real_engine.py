"""The meter beside a real vLLM: what is booked is what the engine itself counted."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.vllm.engine import Counters, Vllm
from tests.vllm.traffic import Ask, Caller, Seen, endless, finishing
from tests.vllm.weir import Weir

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Booked:
    """A request: what its client saw, how it was booked, and what the engine counted meanwhile (None: not alone)."""

    seen: Seen
    row: Row
    counted: Counters | None = None

    @property
    def ask(self) -> Ask:
        return self.seen.ask

    @property
    def engine_tokens(self) -> tuple[int, int]:
        return self.row["engine_prompt_tokens"], self.row["engine_completion_tokens"]

    @property
    def usage(self) -> tuple[int, int, int]:
        prompt, completion = self.row["prompt_tokens"], self.row["completion_tokens"]
        return prompt, completion, prompt + completion


def test_what_finished_requests_used_is_what_the_engine_counted(engine: Vllm, weir: Weir, caller: Caller) -> None:
    before = _idle(engine, seconds=30)
    seen = caller.send_all(finishing())
    counted = _idle(engine, seconds=30).since(before)
    booked = _booked(weir, seen)

    _print(f"vLLM {engine.version}: {len(booked)} finished requests", booked, counted)
    _ended(booked, "completed", "engine")
    told = [item for item in booked if item.ask.wants_usage]
    assert [item.seen.usage for item in told] == [item.usage for item in told]
    assert [item.ask.kind for item in booked if item.seen.usage and not item.ask.wants_usage] == []
    assert _sum(item.engine_tokens for item in booked) == (counted.prompt, counted.generation)
    _windows_hold(weir, sum(item.usage[2] for item in booked))


def test_a_stream_that_is_hung_up_is_booked_within_one_step_of_the_engine(
    engine: Vllm, weir: Weir, caller: Caller
) -> None:
    """One after another, so that the engine's growth is this stream's. A step makes one token for each choice."""
    booked = [_hung_up(engine, weir, caller, ask, events) for ask, events in endless()]
    counted = Counters(*_sum(_pair(item.counted) for item in booked), unfinished=0)

    _print(f"vLLM {engine.version}: {len(booked)} streams hung up", booked, counted)
    _ended(booked, "client_gone", "counted")
    assert [item.row["engine_prompt_tokens"] for item in booked] == [_pair(item.counted)[0] for item in booked]
    assert [(item.ask, _missed(item)) for item in booked if not 0 <= _missed(item) <= item.ask.choices] == []
    _windows_hold(weir, sum(item.usage[2] for item in booked))


def _hung_up(engine: Vllm, weir: Weir, caller: Caller, ask: Ask, events: int) -> Booked:
    before = _idle(engine, seconds=30)
    seen = caller.hang_up(ask, events)
    after = engine.idle(1)
    assert after is not None, f"the engine still worked a second after the client of {ask.kind!r} had left"
    return Booked(seen, weir.records([seen.request_id])[seen.request_id], after.since(before))


def _booked(weir: Weir, seen: list[Seen]) -> list[Booked]:
    rows = weir.records([item.request_id for item in seen])
    return [Booked(item, rows[item.request_id]) for item in seen]


def _ended(booked: list[Booked], ending: str, source: str) -> None:
    ends = [(item.ask.kind, item.row["ending"], item.row["usage_source"]) for item in booked]
    assert ends == [(item.ask.kind, ending, source) for item in booked]


def _windows_hold(weir: Weir, tokens: int) -> None:
    """Every charge is in the windows, and nothing is held any more, soon after the last answer."""
    expected = {"minute": (tokens, 0), "hour": (tokens, 0)}
    deadline = time.monotonic() + 10
    while True:
        shown = weir.windows()
        windows = {window["name"]: (window["used"], window["held"]) for window in shown["windows"]}
        if (windows == expected and not shown["leases"]) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert windows == expected
    assert shown["leases"] == []


def _idle(engine: Vllm, seconds: float) -> Counters:
    counters = engine.idle(seconds)
    assert counters is not None, f"the engine was not idle within {seconds} s"
    return counters


def _pair(counted: Counters | None) -> tuple[int, int]:
    assert counted is not None
    return counted.prompt, counted.generation


def _sum(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    prompts, completions = zip(*pairs, strict=True)
    return sum(prompts), sum(completions)


def _print(title: str, booked: list[Booked], counted: Counters) -> None:
    """A line for each kind of request, and what they come to beside the engine's own counters."""
    kinds: dict[tuple[str, str], list[Booked]] = defaultdict(list)
    for item in booked:
        kinds[item.ask.endpoint, item.ask.kind].append(item)
    prompt, generation = _sum(item.engine_tokens for item in booked)
    lines = [
        f"\n{title}",
        f"{'':12} {'':36} {'requests':>8} {'prompt':>8} {'completion':>10}",
        *(_line(*kind, items) for kind, items in kinds.items()),
        f"{'booked':49} {len(booked):8} {prompt:8} {generation:10}",
        f"{'counted by the engine':49} {'':8} {counted.prompt:8} {counted.generation:10}",
    ]
    print("\n".join(lines))


def _line(endpoint: str, kind: str, items: list[Booked]) -> str:
    """Their booked tokens, and how many the engine counted beyond them, one by one, where that is known."""
    prompt, completion = _sum(item.engine_tokens for item in items)
    missed = [_missed(item) for item in items if item.counted]
    beyond = f"  + {missed}" if any(missed) else ""
    return f"{endpoint:12} {kind:36} {len(items):8} {prompt:8} {completion:10}{beyond}"


def _missed(item: Booked) -> int:
    """Tokens the engine made after the last event that arrived here."""
    return _pair(item.counted)[1] - item.engine_tokens[1]
