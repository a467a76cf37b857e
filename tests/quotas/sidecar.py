"""One sidecar of several, as a process of its own: asks a real Redis in Redis' own time, and prints what it was told.

    python -m tests.quotas.sidecar URL WORK…

prints a JSON array of events on its standard output. WORK is `mixed SEED SECONDS` (whole lives of requests) or
`race ROUNDS PARALLEL` (as many at once as it can, round after round).
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any
from uuid import uuid4

from quotas.policy import Limit, Policy
from quotas.redis import RedisStore
from quotas.store import Account, Ask, Scope, Target

LEASE_SECONDS = 0.5
KEYS = 3
KEY = Policy(Limit(2_000, 1), Limit(4_000, 1), Limit(7_000, 3), 8)
TEAM = Policy(Limit(4_800, 1), Limit(9_000, 1), Limit(18_000, 3), 16)
CHEAP = Target("cheap", Limit(800, 1))


def account(key: int) -> Account:
    return Account("team:t", (Scope("key", f"k{key}", KEY), Scope("team", "t", TEAM)))


def contested(number: int) -> Account:
    """Room for ten of a hundred tokens."""
    return Account(f"key:race {number}", (Scope("key", "r", Policy(None, None, Limit(1_000, 3_600), None)),))


class Watched(RedisStore):
    """Keeps the moment of each answer: Redis' time, in microseconds."""

    async def _call(self, slot: int, call: bytes, timeout: float) -> Any:
        reply = await super()._call(slot, call, timeout)
        if isinstance(reply, list):
            moment.set(reply[1] if b"_admit\r\n" in call else reply[0])
        return reply


class _Moment:
    """The moment of the last answer that this task was given."""

    def __init__(self) -> None:
        self._of: dict[asyncio.Task[Any] | None, int] = {}

    def set(self, value: int) -> None:
        self._of[asyncio.current_task()] = value

    def get(self) -> int:
        return self._of[asyncio.current_task()]


moment = _Moment()
events: list[dict[str, Any]] = []


def note(what: str, lease: str, **more: Any) -> None:
    events.append({"what": what, "at": moment.get(), "lease": lease, **more})


async def life(store: RedisStore, chance: random.Random) -> None:
    """One request from its admission to its end; some fall silent, some are settled after they expired."""
    key, expected = chance.randrange(KEYS), chance.randint(20, 250)
    least = chance.randint(1, expected)
    targets = (CHEAP,) if chance.random() < 0.3 else ()
    ask = Ask(uuid4().hex, expected, expected, expected * chance.choice([1, 1, 1, 3]), least, targets=targets)
    verdict = await store.admit(account(key), ask)
    told = {
        name: getattr(verdict, name) for name in ("kind", "expected", "hold", "ceiling", "target", "scope", "answers")
    }
    note("admit", ask.lease, key=key, need=ask.cap_need, first_hold=ask.first_hold, **told)
    if not verdict.admitted:
        return
    consumed = 0
    for _ in range(chance.randrange(3)):
        await asyncio.sleep(chance.random() * 0.05)
        consumed += chance.randrange(expected)
        extend = consumed + chance.randrange(200) if chance.random() < 0.5 else None
        progress = await store.progress(account(key), ask.lease, consumed, extend)
        note(
            "progress",
            ask.lease,
            consumed=consumed,
            extend=extend,
            expired=progress.expired,
            extended=progress.extended,
        )
    silent = chance.random()
    if silent < 0.04:
        return
    await asyncio.sleep(LEASE_SECONDS * 1.5 if silent < 0.07 else chance.random() * 0.05)
    consumed += chance.randrange(200)
    await store.settle(account(key), ask.lease, consumed)
    note("settle", ask.lease, consumed=consumed)


async def mixed(store: RedisStore, seed: int, seconds: int) -> None:
    chance = random.Random(seed)
    end = time.monotonic() + seconds

    async def caller() -> None:
        while time.monotonic() < end:
            await life(store, chance)
            await asyncio.sleep(chance.random() * 0.2)

    await asyncio.gather(*(caller() for _ in range(8)))


async def race(store: RedisStore, rounds: int, parallel: int) -> None:
    for number in range(rounds):
        asks = (Ask(uuid4().hex, 100, 100, 100, 100, "refuse") for _ in range(parallel))
        for verdict in await asyncio.gather(*(store.admit(contested(number), ask) for ask in asks)):
            events.append({"round": number, "admitted": verdict.admitted})


async def main(url: str, work: str, *numbers: str) -> None:
    store = Watched(url, timeout=10, lease_seconds=LEASE_SECONDS)
    await {"mixed": mixed, "race": race}[work](store, *map(int, numbers))
    await store.close()
    print(json.dumps(events))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
