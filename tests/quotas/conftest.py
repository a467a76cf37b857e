"""Both stores behind one name, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from quotas.store import QuotaStore
from tests.quotas.histories import Clock
from tests.quotas.stores import EmptyMemory, EmptyRedis
from tests.services.redis import RedisServer


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def broken_server() -> Iterator[RedisServer]:
    """A Redis of the test's own, to be stopped and killed."""
    with RedisServer() as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, clock: Clock, redis_server: RedisServer) -> AsyncIterator[QuotaStore]:
    openers: dict[str, Callable[[], QuotaStore]] = {
        "memory": lambda: EmptyMemory(clock),
        "redis": lambda: EmptyRedis(redis_server.url, timeout=5, clock=clock),
    }
    opened = openers[request.param]()
    yield opened
    await opened.close()
