"""What every quota store promises: the rule, watched by the monitor, whatever the history; and the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given

from quotas.memory import MemoryStore
from quotas.redis import RedisStore
from quotas.store import QuotaStore
from tests.quotas.histories import Clock, History, Play, histories
from tests.services.redis import RedisServer


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def shared_clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def both(runner: asyncio.Runner, shared_clock: Clock, redis_server: RedisServer) -> Iterator[list[QuotaStore]]:
    stores: list[QuotaStore] = [
        MemoryStore(shared_clock),
        RedisStore(redis_server.url, timeout=5, clock=shared_clock),
    ]
    yield stores
    for store in stores:
        runner.run(store.close())


@given(history=histories)
def test_any_history_keeps_the_rule_and_both_stores_answer_alike(
    runner: asyncio.Runner, shared_clock: Clock, both: list[QuotaStore], history: History
) -> None:
    runner.run(Play(history, both, shared_clock).run())
