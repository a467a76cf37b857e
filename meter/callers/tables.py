"""The statements about keys, tiers, teams and prices, and what a transaction over them can count on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Select, Table, and_, or_, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from meter.callers.stored import Known, StoredKey, StoredPrice, StoredTerms, TermsKind, utc
from meter.ledger.database import DatabaseUnavailable, SchemaMissing, schema_missing
from meter.ledger.schema import api_key, directory_revision, price, team, tier

TERMS: Mapping[TermsKind, Table] = {"tier": tier, "team": team}
ROWS_AT_ONCE = 500
"""So many rows are turned into values before other work gets its turn on the loop: about 5 ms."""

Row = TypeVar("Row", bound=msgspec.Struct)


@asynccontextmanager
async def transaction(engine: AsyncEngine, seconds: float) -> AsyncIterator[AsyncConnection]:
    """One transaction, committed at the end. DatabaseUnavailable: it cannot be had, or takes longer than `seconds`.

    When that comes at the end, the transaction may or may not have happened.
    """
    try:
        async with asyncio.timeout(seconds), _connected(engine) as connection, connection.begin():
            yield connection
    except (IntegrityError, DataError):
        raise
    except (SQLAlchemyError, OSError, TimeoutError) as error:
        raise _away(error) from error


@asynccontextmanager
async def reading(engine: AsyncEngine, seconds: float) -> AsyncIterator[AsyncConnection]:
    """Statements that change nothing, each by itself: they wait for no writer. Raises as `transaction` does."""
    async with transaction(engine.execution_options(isolation_level="AUTOCOMMIT"), seconds) as connection:
        yield connection


@asynccontextmanager
async def _connected(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """A connection. Drivers have many ways to say that there is none: refused, starting up, wrong password, no database."""
    try:
        connection = await engine.connect()
    except Exception as error:
        raise _away(error) from error
    try:
        yield connection
    finally:
        await connection.close()


def _away(error: BaseException) -> DatabaseUnavailable:
    if schema_missing(error):
        return SchemaMissing()
    return DatabaseUnavailable("The database cannot be reached or does not answer; try again in a moment.")


async def current_revision(connection: AsyncConnection) -> int:
    """Goes up with every edit; 0: never edited."""
    return await connection.scalar(select(directory_revision.c.revision)) or 0


async def next_revision(connection: AsyncConnection) -> int:
    """Counts one up. Until the transaction ends, every other edit waits here: edits happen one after the other."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = (
        insert(directory_revision)
        .values(id=1, revision=1)
        .on_conflict_do_update(index_elements=["id"], set_={"revision": directory_revision.c.revision + 1})
        .returning(directory_revision.c.revision)
    )
    return int((await connection.execute(statement)).scalar_one())


async def key_with(connection: AsyncConnection, **columns: str) -> StoredKey | None:
    """The key whose columns (its id, its name) have these values."""
    return await _one(connection, select(api_key).filter_by(**columns), StoredKey)


async def keys_on(connection: AsyncConnection, kind: TermsKind, name: str) -> list[StoredKey]:
    """All keys of a tier or a team, by name."""
    statement = select(api_key).where(api_key.c[kind] == name).order_by(api_key.c.name)
    return [row async for row in _rows(connection, statement, StoredKey)]


async def terms_named(connection: AsyncConnection, kind: TermsKind, name: str) -> StoredTerms | None:
    return await _one(connection, select(TERMS[kind]).filter_by(name=name), StoredTerms)


async def terms_by_name(connection: AsyncConnection, kind: TermsKind) -> list[StoredTerms]:
    statement = select(TERMS[kind]).order_by(TERMS[kind].c.name)
    return [row async for row in _rows(connection, statement, StoredTerms)]


async def page_of_prices(connection: AsyncConnection, after: int, limit: int) -> list[StoredPrice]:
    """In the order of their ids, from behind this one."""
    statement = select(price).where(price.c.id > after).order_by(price.c.id).limit(limit)
    return [row async for row in _rows(connection, statement, StoredPrice)]


async def price_at(connection: AsyncConnection, model: str, backend: str, moment: datetime) -> StoredPrice | None:
    """The price that starts at exactly this moment."""
    statement = select(price).filter_by(model=model, backend=backend, effective_from=moment)
    return await _one(connection, statement, StoredPrice)


async def price_in_force(connection: AsyncConnection, model: str, backend: str, moment: datetime) -> StoredPrice | None:
    """The price of an exchange that starts at this moment."""
    statement = (
        select(price)
        .filter_by(model=model, backend=backend)
        .where(price.c.effective_from <= moment)
        .order_by(price.c.effective_from.desc())
        .limit(1)
    )
    return await _one(connection, statement, StoredPrice)


async def page_of_keys(connection: AsyncConnection, after: tuple[datetime, str] | None, limit: int) -> list[StoredKey]:
    """The oldest first, from behind the one that was created at this moment with this id."""
    statement = select(api_key).order_by(api_key.c.created_at, api_key.c.id).limit(limit)
    if after is not None:
        moment, key_id = after
        same = and_(api_key.c.created_at == moment, api_key.c.id > key_id)
        statement = statement.where(or_(api_key.c.created_at > moment, same))
    return [row async for row in _rows(connection, statement, StoredKey)]


async def everything(connection: AsyncConnection) -> Known:
    """All rows as they stood at one moment: read again until no edit came in between."""
    while True:
        revision = await current_revision(connection)
        known = Known(
            revision=revision,
            keys={row.id: row async for row in _rows(connection, select(api_key), StoredKey)},
            tiers={row.name: row async for row in _rows(connection, select(tier), StoredTerms)},
            teams={row.name: row async for row in _rows(connection, select(team), StoredTerms)},
            prices=[row async for row in _rows(connection, select(price).order_by(price.c.id), StoredPrice)],
        )
        if await current_revision(connection) == revision:
            return known


async def _one(connection: AsyncConnection, statement: Select[Any], kind: type[Row]) -> Row | None:
    row = (await connection.execute(statement)).mappings().one_or_none()
    return None if row is None else _value(row, kind)


async def _rows(connection: AsyncConnection, statement: Select[Any], kind: type[Row]) -> AsyncIterator[Row]:
    result = await connection.execute(statement)
    for batch in result.mappings().partitions(ROWS_AT_ONCE):
        for row in batch:
            yield _value(row, kind)
        await asyncio.sleep(0)


def _value(row: Mapping[str, Any], kind: type[Row]) -> Row:
    return kind(**{name: utc(value) if isinstance(value, datetime) else value for name, value in row.items()})
