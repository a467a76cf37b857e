"""Both stores behind one name, on a clock that the test moves."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from quotas.memory import MemoryStore
from quotas.redis import RedisStore
from quotas.store import QuotaStore
from tests.quotas.histories import Clock
from tests.services.redis import RedisServer

for name, examples in (("quick", 100), ("deep", 1_000)):
    settings.register_profile(
        name,
        max_examples=examples,
        derandomize=name == "quick",  # the same histories every time; `deep` looks for new ones
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


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
        "memory": lambda: MemoryStore(clock),
        "redis": lambda: RedisStore(redis_server.url, timeout=5, clock=clock),
    }
    opened = openers[request.param]()
    yield opened
    await opened.close()
