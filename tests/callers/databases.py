"""A fresh database of each kind, and what lives on it. Fixtures for the rooms that edit and read callers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from meter.callers.directory import Directory
from meter.callers.registry import Registry
from meter.config import Config
from meter.ledger.database import migrate, open_engine

DEADLINE_SECONDS = 20.0
Found = TypeVar("Found")


def now() -> datetime:
    return datetime.now(UTC)


def config(**sections: Any) -> Config:
    return Config.model_validate(sections)


async def eventually(look: Callable[[], Found]) -> Found:
    """What `look` gives as soon as it gives something; fails at the deadline."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not (found := look()):
            await asyncio.sleep(0.02)
    return found


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path}/weir.db"
    url: str = request.getfixturevalue("postgres_server").create_database()
    return url


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    await migrate(database_url)
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
