from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer
from tests.vllm.engine import Vllm
from tests.vllm.traffic import Caller
from tests.vllm.weir import PUBLIC_MODEL, Weir


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    with Vllm(tmp_path_factory.mktemp("vllm")) as engine:
        yield engine


@pytest.fixture
def weir(
    tmp_path_factory: pytest.TempPathFactory, engine: Vllm, redis_server: RedisServer, postgres_server: PostgresServer
) -> Iterator[Weir]:
    directory = tmp_path_factory.mktemp("weir")
    with Weir(directory, engine.url, redis_server.url, postgres_server.create_database()) as weir:
        yield weir


@pytest.fixture
def caller(weir: Weir) -> Iterator[Caller]:
    caller = Caller(weir.url, weir.key, PUBLIC_MODEL)
    yield caller
    caller.close()
