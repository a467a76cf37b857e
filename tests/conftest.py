"""Real parts for tests: a Redis and a Postgres of our own, on free ports, started once per test process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer

for name, examples in (("quick", 100), ("deep", 1_000)):
    settings.register_profile(
        name,
        max_examples=examples,
        derandomize=name == "quick",  # the same every time; `deep` looks for new ones
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server
