"""Real parts for tests: a Redis and a Postgres of our own, on free ports, started once per test process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server
