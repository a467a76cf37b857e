"""The database: opening it, bringing it to the newest schema, and saying plainly that it is away."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, event, make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolExhausted
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from meter.ledger.partitions import MONTHS_AHEAD, ensure_partitions

CONNECT_SECONDS = 5
COMMAND_SECONDS = 60
BUSY_SECONDS = 10
_MIGRATION_LOCK = 0x77656972
"""Any number that only our migrations use ("weir")."""


_UNDEFINED = frozenset({"42P01", "42703", "3F000"})
"""SQLSTATE of an undefined table, column or schema."""
_NO_SUCH = ("no such table", "no such column", "has no column named")
"""How SQLite says so."""


class DatabaseUnavailable(Exception):
    """The database does not answer, or not usably. The message is a plain sentence without a password."""


class SchemaMissing(DatabaseUnavailable):
    """It answers, but its tables are not those of this release."""

    def __init__(self) -> None:
        super().__init__("The database's schema is missing or not the newest: run `weir migrate`.")


def schema_missing(error: BaseException) -> bool:
    """Whether a driver says that a table or a column is not there.

    https://www.postgresql.org/docs/current/errcodes-appendix.html
    """
    origin = getattr(error, "orig", None) or error
    if state := getattr(origin, "sqlstate", None):
        return state in _UNDEFINED
    return isinstance(origin, sqlite3.OperationalError) and any(words in str(origin) for words in _NO_SUCH)


def reason_of(error: BaseException) -> str:
    """What an error of the database or its driver says, in one line without the statement; a missing schema by name."""
    if schema_missing(error):
        return str(SchemaMissing()).rstrip(".")
    cause = getattr(error, "orig", None) or error
    said = " ".join(str(cause).split()).rsplit(">: ", 1)[-1]
    return said or ("it does not answer in time" if isinstance(cause, TimeoutError) else type(cause).__name__)


def open_engine(url: str, *, command_seconds: float | None = COMMAND_SECONDS) -> AsyncEngine:
    """An engine for `sqlite+aiosqlite:///file.db` or `postgresql+asyncpg://…`; connects when it is first used.

    `command_seconds`: how long Postgres may take over one statement before it counts as away (None: for ever).
    DatabaseUnavailable: the URL is not one, its driver is not installed, or there is no place for the file.
    """
    try:
        parsed = make_url(url)
        return _sqlite(parsed) if parsed.get_backend_name() == "sqlite" else _postgres(parsed, command_seconds)
    except ArgumentError as error:
        raise DatabaseUnavailable("ledger.url is not a database URL such as sqlite+aiosqlite:///weir.db.") from error
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        raise DatabaseUnavailable(
            f"The driver of ledger.url is not installed ({error}): pip install 'tokenweir[postgres]'."
        ) from error


def _postgres(url: URL, command_seconds: float | None) -> AsyncEngine:
    return create_async_engine(
        url,
        hide_parameters=True,
        pool_size=4,
        max_overflow=4,
        pool_timeout=CONNECT_SECONDS,
        pool_pre_ping=True,
        connect_args={
            "timeout": CONNECT_SECONDS,
            "command_timeout": command_seconds,
            "server_settings": {"application_name": "weir", "timezone": "UTC"},
        },
    )


def _sqlite(url: URL) -> AsyncEngine:
    """Transactions take the write lock when they begin, so that none fails in the middle because another wrote.

    https://docs.sqlalchemy.org/en/20/dialects/sqlite.html#pysqlite-sqlite-transactions · readers that need no
    transaction use the isolation level AUTOCOMMIT and wait for nobody.
    """
    directory = Path(url.database or ".").parent
    if not os.access(directory, os.W_OK):
        raise DatabaseUnavailable(f"The directory {directory} of ledger.url does not exist or cannot be written.")
    engine = create_async_engine(url, hide_parameters=True, connect_args={"timeout": BUSY_SECONDS})
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_immediate)
    return engine


def _prepare_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # the driver begins nothing by itself
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")  # the journal keeps what a loss of power could take
    cursor.execute("PRAGMA foreign_keys=OFF")
    cursor.close()


def _begin_immediate(connection: Connection) -> None:
    if connection.get_execution_options().get("isolation_level") != "AUTOCOMMIT":
        connection.exec_driver_sql("BEGIN IMMEDIATE")


@contextmanager
def reaching(url: URL) -> Iterator[None]:
    """Says as DatabaseUnavailable what drivers say in many ways: refused, timed out, not allowed, not there."""
    try:
        yield
    except (OSError, DBAPIError, PoolExhausted) as error:
        if schema_missing(error):
            raise SchemaMissing from error
        place = url.render_as_string(hide_password=True)
        raise DatabaseUnavailable(
            f"The database {place} cannot be used: {reason_of(error)}. See ledger.url."
        ) from error


async def migrate(url: str) -> None:
    """Brings the database to the newest schema; does nothing where it is there already.

    Any number of processes may do this at once: one does it, the others wait. DatabaseUnavailable.
    """
    engine = open_engine(url, command_seconds=None)
    try:
        with reaching(engine.url):
            async with engine.begin() as connection:
                if engine.dialect.name == "postgresql":
                    await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
                await connection.run_sync(_upgrade)
                await ensure_partitions(connection, datetime.now(UTC).date(), MONTHS_AHEAD)
    finally:
        await engine.dispose()


async def schema_current(engine: AsyncEngine) -> bool:
    """Whether the database has the newest schema. DatabaseUnavailable."""
    with reaching(engine.url):
        async with engine.connect() as connection:
            found = await connection.run_sync(lambda sync: MigrationContext.configure(sync).get_current_revision())
    return found == await asyncio.to_thread(_newest)


def _newest() -> str | None:
    return ScriptDirectory.from_config(_config()).get_current_head()


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", "migrations:")  # the installed package, wherever it is
    config.set_main_option("path_separator", "os")
    return config


def _upgrade(connection: Connection) -> None:
    config = _config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
