"""Many calls at once, but not too many; and one thing at a time, however many ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from itertools import islice
from typing import Any

TOGETHER = 64
"""So many calls are under way at once."""


async def together(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Runs them all, some at a time; raises the first trouble after its companions have ended."""
    waiting, outcomes = iter(calls), list[Any]()
    while batch := list(islice(waiting, TOGETHER)):
        for outcome in await asyncio.gather(*batch, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
            outcomes.append(outcome)
    return outcomes


class OnceAtATime:
    """Work that several may ask for, each named thing of it done once at a time; all who ask get its outcome."""

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Task[bool]] = {}

    async def do(self, what: str, work: Callable[[], Coroutine[Any, Any, bool]], seconds: float) -> bool:
        """Raises TimeoutError after so many seconds; the work goes on."""
        task = self._under_way.get(what)
        if task is None:
            task = self._under_way[what] = asyncio.create_task(work())
            task.add_done_callback(lambda _: self._under_way.pop(what, None))
        async with asyncio.timeout(seconds):
            return await asyncio.shield(task)

    async def close(self) -> None:
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
