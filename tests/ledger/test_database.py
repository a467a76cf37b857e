"""Opening, migrating and describing the database, on SQLite and on Postgres."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from datetime import date, datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, insert, select, text
from sqlalchemy.exc import StatementError
from sqlalchemy.ext.asyncio import AsyncEngine

from meter.ledger.database import DatabaseUnavailable, SchemaMissing, migrate, open_engine, schema_current
from meter.ledger.partitions import ensure_partitions
from meter.ledger.record import UsageRecord
from meter.ledger.reports import usage_records, usage_report
from meter.ledger.schema import api_key, audit_log, metadata, usage_record
from tests.ledger.samples import NOON
from tests.services.postgres import PostgresServer


def differences(connection: Connection) -> list[Any]:
    """What differs between the database and schema.py; a month's partition is a part of its table."""

    def is_ours(name: str | None, kind: str, _: object) -> bool:
        return kind != "table" or not (name or "").startswith("usage_record_")

    terms = {"compare_type": True, "compare_server_default": True, "include_name": is_ours}
    return list(compare_metadata(MigrationContext.configure(connection, opts=terms), metadata))


async def test_the_migrated_schema_is_the_one_in_schema_py(engine: AsyncEngine) -> None:
    async with engine.connect() as connection:
        assert await connection.run_sync(differences) == []


async def test_a_migration_makes_the_schema_current(database: str) -> None:
    engine = open_engine(database)
    assert not await schema_current(engine)
    await migrate(database)
    assert await schema_current(engine)
    await migrate(database)
    assert await schema_current(engine)
    await engine.dispose()


async def test_any_number_of_processes_may_migrate_at_once(database: str) -> None:
    await asyncio.gather(*(migrate(database) for _ in range(6)))
    engine = open_engine(database)
    assert await schema_current(engine)
    await engine.dispose()


def test_a_record_has_exactly_the_columns_of_its_table() -> None:
    assert set(UsageRecord.__struct_fields__) == set(usage_record.columns.keys())


async def test_moments_are_kept_in_utc_with_their_zone(engine: AsyncEngine) -> None:
    kolkata = timezone(timedelta(hours=5, minutes=30))
    entry = {"at": NOON.astimezone(kolkata), "actor": "ops", "action": "create", "entity": "key", "entity_id": "1"}
    async with engine.begin() as connection:
        await connection.execute(insert(audit_log), entry)
    async with engine.connect() as connection:
        found = await connection.scalar(select(audit_log.c.at))
    assert found == NOON
    assert found.utcoffset() == timedelta(0)


async def test_a_moment_without_zone_is_refused(engine: AsyncEngine) -> None:
    async with engine.connect() as connection:
        with pytest.raises(StatementError, match="has no time zone"):
            await connection.execute(select(api_key).where(api_key.c.created_at < datetime(2026, 1, 1)))  # noqa: DTZ001


async def test_transactions_that_read_before_they_write_do_not_fail_each_other(engine: AsyncEngine) -> None:
    async def count_up(_: int) -> None:
        async with engine.begin() as connection:
            if engine.dialect.name == "postgresql":
                await connection.execute(text("LOCK TABLE directory_revision"))
            seen = await connection.scalar(text("SELECT revision FROM directory_revision"))
            await connection.execute(text("UPDATE directory_revision SET revision = :next"), {"next": seen + 1})

    async with engine.begin() as connection:
        await connection.execute(text("INSERT INTO directory_revision (id, revision) VALUES (1, 0)"))
    await asyncio.gather(*map(count_up, range(20)))
    async with engine.connect() as connection:
        assert await connection.scalar(text("SELECT revision FROM directory_revision")) == 20


async def test_partitions_are_made_once_by_whoever_asks(postgres_server: PostgresServer) -> None:
    url = postgres_server.create_database()
    await migrate(url)
    engine = open_engine(url)

    async def make() -> None:
        async with engine.begin() as connection:
            await ensure_partitions(connection, date(2031, 11, 30), 2)

    await asyncio.gather(*(make() for _ in range(6)))
    listing = """SELECT c.relname, pg_get_expr(c.relpartbound, c.oid) FROM pg_inherits i JOIN pg_class c
                 ON c.oid = i.inhrelid WHERE i.inhparent = 'usage_record'::regclass AND c.relname >= 'usage_record_2031'
                 ORDER BY 1"""
    async with engine.connect() as connection:
        found = [tuple(row) for row in await connection.execute(text(listing))]
    await engine.dispose()
    edges = ["2031-11-01", "2031-12-01", "2032-01-01", "2032-02-01"]
    assert found == [
        (f"usage_record_{first[:4]}{first[5:7]}", f"FOR VALUES FROM ('{first} 00:00:00+00') TO ('{last} 00:00:00+00')")
        for first, last in pairwise(edges)
    ]


async def test_a_partition_has_the_indexes_of_its_table(postgres_server: PostgresServer) -> None:
    url = postgres_server.create_database()
    await migrate(url)
    engine = open_engine(url)
    async with engine.begin() as connection:
        await ensure_partitions(connection, date(2031, 11, 30))
        valid = await connection.scalar(
            text("SELECT bool_and(indisvalid) FROM pg_index WHERE indrelid = 'usage_record'::regclass")
        )
        attached = await connection.scalar(
            text("SELECT count(*) FROM pg_indexes WHERE tablename = 'usage_record_203111'")
        )
    await engine.dispose()
    assert valid
    assert attached == 4


async def asks(url: str) -> None:
    engine = open_engine(url)
    try:
        await schema_current(engine)
    finally:
        await engine.dispose()


@pytest.mark.parametrize("doing", [migrate, asks])
@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("", "ledger.url is not a database URL such as sqlite"),
        ("not a url", "ledger.url is not a database URL such as sqlite"),
        ("nosuchdb+nodriver://host/db", "ledger.url is not a database URL such as sqlite"),
        (
            "sqlite+aiosqlite:////no/such/directory/ledger.db",
            "The directory /no/such/directory of ledger.url does not exist or cannot be written",
        ),
        ("postgresql+asyncpg://me:geheim@127.0.0.1:1/db", r"me:\*\*\*@127.0.0.1:1/db cannot be used: .*Connect"),
    ],
)
async def test_a_database_that_is_away_is_said_plainly(
    doing: Callable[[str], Awaitable[None]], url: str, sentence: str
) -> None:
    with pytest.raises(DatabaseUnavailable, match=sentence) as caught:
        await doing(url)
    assert "geheim" not in str(caught.value)


async def test_a_database_that_is_not_there_is_said_plainly(postgres_server: PostgresServer) -> None:
    with pytest.raises(DatabaseUnavailable, match=r'database "nothere" does not exist. See ledger.url'):
        await migrate(postgres_server.url.replace("/postgres", "/nothere"))


async def test_a_database_without_tables_is_said_so_with_what_to_do(database: str) -> None:
    engine = open_engine(database)
    with pytest.raises(SchemaMissing, match="missing or not the newest: run `weir migrate`"):
        await usage_report(engine, start=NOON, end=NOON)
    await engine.dispose()


async def test_a_database_of_an_older_release_is_said_so_with_what_to_do(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.execute(text("ALTER TABLE usage_record RENAME COLUMN tags TO tags_of_old"))
    with pytest.raises(SchemaMissing, match="missing or not the newest: run `weir migrate`"):
        await usage_records(engine)


async def test_a_port_where_nobody_answers_is_said_plainly() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql+asyncpg://me:geheim@127.0.0.1:{silent.getsockname()[1]}/db"
        with pytest.raises(DatabaseUnavailable, match=r"me:\*\*\*@.* cannot be used: it does not answer in time"):
            await migrate(url)


async def test_a_file_that_is_no_database_is_said_plainly(tmp_path: Path) -> None:
    (tmp_path / "file.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(DatabaseUnavailable, match=r"file is not a database. See ledger.url"):
        await migrate(f"sqlite+aiosqlite:///{tmp_path}/file.db")
