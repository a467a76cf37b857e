"""One proxy for all cases that can share it, with workers, Redis and Postgres of its own; and what a case needs for a second."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.cases.house import House, Places, configuration
from tests.cases.stub import Stub
from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer

Config = dict[str, Any]
Build = Callable[..., AbstractAsyncContextManager[House]]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def u1() -> AsyncIterator[Stub]:
    async with Stub().serving() as stub:
        yield stub


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def u2() -> AsyncIterator[Stub]:
    async with Stub().serving() as stub:
        yield stub


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def config(
    u1: Stub, u2: Stub, redis_server: RedisServer, postgres_server: PostgresServer
) -> AsyncIterator[Config]:
    """The configuration of the shared proxy, with an empty database."""
    async with Places.held() as places:
        yield configuration(u1, u2, places, redis_server.url, postgres_server.create_database())


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared(config: Config, u1: Stub, u2: Stub, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    async with House.built(tmp_path_factory.mktemp("proxy"), config, u1, u2, migrate=True) as house:
        yield house


@pytest_asyncio.fixture(loop_scope="session")
async def house(shared: House) -> AsyncIterator[House]:
    """The shared proxy with idle workers; what must hold after every case is checked at the end."""
    yield shared
    try:
        await shared.after()
    finally:
        await shared.clear()


@pytest_asyncio.fixture(loop_scope="session")
async def build(config: Config, shared: House, tmp_path: Path) -> AsyncIterator[Build]:
    """Builds a house around a proxy of its own; arguments are laid over the sections of the shared configuration.

    The shared house stands already, so its database has its tables; another `ledger.url` is migrated first.
    """
    u1, u2 = shared.u1, shared.u2

    def built(**sections: Config) -> AbstractAsyncContextManager[House]:
        merged = {name: {**config.get(name, {}), **sections.get(name, {})} for name in config | sections}
        return House.built(tmp_path, merged, u1, u2, migrate="url" in sections.get("ledger", {}))

    yield built
    await u1.reset()
    await u2.reset()
