"""A ledger on each database: every test that asks for `database` runs on SQLite and on a real Postgres."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from meter.ledger.database import migrate, open_engine
from meter.ledger.journal import Journal


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a fresh, empty database."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path}/ledger.db"
    url: str = request.getfixturevalue("postgres_server").create_database()
    return url


@pytest.fixture
async def engine(database: str) -> AsyncIterator[AsyncEngine]:
    await migrate(database)
    engine = open_engine(database)
    yield engine
    await engine.dispose()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal", fsync_seconds=0.05, max_bytes=1 << 26)
    journal.start()
    yield journal
    journal.stop()
