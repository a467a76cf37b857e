"""A fresh database of each kind, and what lives on it. Fixtures for the rooms that edit and read callers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from meter.callers.directory import Directory
from meter.callers.registry import Registry
from meter.config import Config
from meter.ledger.database import migrate, open_engine
from meter.ledger.schema import metadata
from tests.services.postgres import PostgresServer

DEADLINE_SECONDS = 20.0
Found = TypeVar("Found")


def now() -> datetime:
    return datetime.now(UTC)


def config(**sections: Any) -> Config:
    return Config.model_validate(sections)


async def eventually(look: Callable[[], Found | None]) -> Found:
    """What `look` gives as soon as it gives something; fails at the deadline."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not (found := look()):
            await asyncio.sleep(0.02)
    return found


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated, empty SQLite file, to be copied."""
    path = tmp_path_factory.mktemp("template") / "weir.db"
    asyncio.run(migrate(f"sqlite+aiosqlite:///{path}"))
    return path


@pytest.fixture(scope="session")
def postgres_url(postgres_server: PostgresServer) -> str:
    """A migrated Postgres database, to be emptied before use."""
    url = postgres_server.create_database()
    asyncio.run(migrate(url))
    return url


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database that is migrated and empty."""
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("sqlite_template"), tmp_path / "weir.db")
        return f"sqlite+aiosqlite:///{tmp_path}/weir.db"
    url: str = request.getfixturevalue("postgres_url")
    asyncio.run(_emptied(url))
    return url


async def _emptied(url: str) -> None:
    engine = open_engine(url)
    async with engine.begin() as connection:
        names = ", ".join(table.name for table in metadata.sorted_tables)
        await connection.execute(text(f"TRUNCATE {names} RESTART IDENTITY"))
    await engine.dispose()


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = open_engine(database_url)
    yield engine
    await engine.dispose()


@pytest.fixture
async def registry(engine: AsyncEngine) -> Registry:
    registry = Registry(engine, now)
    await registry.seed(Config())
    return registry


@pytest.fixture
async def directory(engine: AsyncEngine, registry: Registry, tmp_path: Path) -> AsyncIterator[Directory]:
    directory = Directory(engine, Config(), tmp_path / "directory.json", now)
    await directory.start()
    yield directory
    await directory.stop()
