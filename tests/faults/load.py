"""Callers of several sidecars' stores at once, in one process: every admission and every token is told to the truth."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Literal, Self

from quotas.guarded import GuardedStore
from quotas.policy import Policy
from quotas.redis import RedisStore
from quotas.store import Account, Ask, Scope, StoreUnavailable, Target
from tests.cases.wire import eventually
from tests.faults.truth import Truth

CALLERS = 6
"""At each store at once."""
CHEAPER = (Target("cheaper"),)
serial = itertools.count()


def account(policy: Policy, name: str | None = None) -> Account:
    name = name or f"under load {next(serial)}"
    return Account(f"key:{name}", (Scope("key", name, policy),))


@asynccontextmanager
async def sidecars(
    *urls: str, on_down: Literal["local", "deny", "allow"], timeout: float = 0.2
) -> AsyncIterator[list[GuardedStore]]:
    """The stores of sidecars that reach one Redis by these addresses, each with its equal share."""
    async with AsyncExitStack() as stack:
        stores = []
        for url in urls:
            store = GuardedStore(
                RedisStore(url, timeout=timeout),
                on_down=on_down,
                local_share=1 / len(urls),
                clock=time.time,
                timer=time.monotonic,
            )
            stack.push_async_callback(store.close)
            await eventually(partial(_answers, store), bool)
            stores.append(store)
        yield stores


async def _answers(store: GuardedStore) -> bool:
    try:
        await store.ping()
    except StoreUnavailable:
        return False
    return True


class Load:
    """Requests of 100 to 900 tokens, which use half of that or more, one after the other by each caller until the end.

    What finds no room in the rate overflows, so that the cap gets spent too.
    """

    def __init__(self, stores: Sequence[GuardedStore], who: Account, truth: Truth, seed: int = 1) -> None:
        self.admitted = 0
        self.refused = 0
        self._who = who
        self._truth = truth
        self._ending = asyncio.Event()
        self._callers = [
            (store, random.Random(f"{seed} {place} {n}")) for place, store in enumerate(stores) for n in range(CALLERS)
        ]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._call(store, chance)) for store, chance in self._callers]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Every request that runs comes to its end."""
        self._ending.set()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if kind is None and isinstance(outcome, BaseException):
                raise outcome

    async def until(self, holds: Callable[[], bool]) -> None:
        async def probe() -> bool:
            assert not any(task.done() for task in self._tasks)
            return holds()

        await eventually(probe, bool, 60.0)

    async def further(self, requests: int) -> None:
        """Waits until so many more were decided."""
        decided = self.admitted + self.refused
        await self.until(lambda: self.admitted + self.refused >= decided + requests)

    async def _call(self, store: GuardedStore, chance: random.Random) -> None:
        while not self._ending.is_set():
            if not await self._request(store, chance):
                self.refused += 1
                await asyncio.sleep(0.02)

    async def _request(self, store: GuardedStore, chance: random.Random) -> bool:
        lease, tokens = f"lease {next(serial)}", chance.randint(100, 900)
        try:
            verdict = await store.admit(self._who, Ask(lease, tokens, tokens, tokens, tokens, targets=CHEAPER))
        except StoreUnavailable:
            return False
        if not verdict.admitted:
            return False
        self.admitted += 1
        self._truth.admitted(lease, verdict.hold, verdict.expected, primary=verdict.kind != "overflow")
        used = chance.randint(tokens // 2, tokens)
        await asyncio.sleep(chance.random() / 50)
        self._truth.used_so_far(lease, used // 2)
        with suppress(StoreUnavailable):
            await store.progress(self._who, lease, used // 2)
        await asyncio.sleep(chance.random() / 50)
        self._truth.ended(lease, used)
        await store.settle(self._who, lease, used)
        return True


async def spent(store: GuardedStore, who: Account, truth: Truth, tokens: int) -> None:
    """One request that uses exactly this, on the cheaper route where the rate has no room for it."""
    lease = f"lease {next(serial)}"
    verdict = await store.admit(who, Ask(lease, tokens, tokens, tokens, tokens, targets=CHEAPER))
    truth.admitted(lease, verdict.hold, verdict.expected, primary=verdict.kind != "overflow")
    truth.ended(lease, tokens)
    await store.settle(who, lease, tokens)


async def all_up(stores: Sequence[GuardedStore]) -> bool:
    return all(store.up for store in stores)


async def told_all(stores: Sequence[GuardedStore], who: Account, truth: Truth) -> None:
    """Waits until the store counts exactly what was used, and holds nothing."""
    for store in stores:
        await eventually(partial(_agrees, store, who, truth), bool, 20.0)


async def _agrees(store: GuardedStore, who: Account, truth: Truth) -> bool:
    try:
        windows = (await store.peek(who)).windows
    except StoreUnavailable:
        return False
    return [(window.used, window.held) for window in windows if window.name == "hour"] == [(truth.used, 0)]
