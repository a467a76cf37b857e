"""Both stores behind one name, on a clock that the test moves; the shared one on every kind of server that is here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from quotas.store import QuotaStore
from tests.quotas.histories import Clock
from tests.quotas.stores import EmptyMemory, EmptyRedis
from tests.services.redis import RedisServer, binaries

ServerOf = Callable[[str], RedisServer]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def server_of() -> Iterator[ServerOf]:
    """The server that runs a binary; started when it is first wanted."""
    with ExitStack() as stack:
        started: dict[str, RedisServer] = {}

        def get(binary: str) -> RedisServer:
            if binary not in started:
                started[binary] = stack.enter_context(RedisServer(binary=binary))
            return started[binary]

        yield get


@pytest.fixture(scope="session", params=binaries(), ids=lambda binary: Path(binary).name)
def redis_server(request: pytest.FixtureRequest, server_of: ServerOf) -> RedisServer:
    return server_of(request.param)


@pytest.fixture
def broken_server() -> Iterator[RedisServer]:
    """A Redis of the test's own, to be stopped and killed."""
    with RedisServer() as server:
        yield server


@pytest.fixture(params=["memory", *binaries()], ids=lambda where: Path(where).name)
async def store(request: pytest.FixtureRequest, clock: Clock, server_of: ServerOf) -> AsyncIterator[QuotaStore]:
    opened: QuotaStore = (
        EmptyMemory(clock)
        if request.param == "memory"
        else EmptyRedis(server_of(request.param).url, timeout=5, clock=clock)
    )
    yield opened
    await opened.close()
