"""Waiting for what comes by itself: a store that answers again, figures that are told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from quotas.store import StoreUnavailable


async def answers(call: Awaitable[object]) -> bool:
    """Whether the store answered a call."""
    try:
        await call
    except StoreUnavailable:
        return False
    return True


async def eventually(holds: Callable[[], Awaitable[bool]], seconds: float = 20) -> None:
    """Asks until it holds; AssertionError if it never does."""
    deadline = time.monotonic() + seconds
    while not await holds():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.02)
