"""`weir check`: reaches everything the configuration names, and says one line of each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass

import msgspec

from engine_adapter.errors import EngineBroke, EngineUnavailable
from engine_adapter.http1 import Workers
from meter.app import quota_store
from meter.config import AdminTerms, Config
from meter.gateway.fleet import Backend, Fleet
from meter.gateway.tokenizers import tokenizers_of
from meter.ledger.database import DatabaseUnavailable, open_engine, schema_current
from quotas.store import StoreUnavailable

PATIENCE = 5.0
"""Seconds for each answer."""


@dataclass(frozen=True, slots=True)
class Result:
    what: str
    good: bool
    said: str


async def run(config: Config) -> list[Result]:
    """Everything at once; the order is that of the file."""
    fleet, workers = Fleet.of(config), Workers()
    asked: list[Awaitable[Result]] = [_backend(workers, backend, fleet) for backend in fleet.backends.values()]
    try:
        found = await asyncio.gather(*asked, _store(config), _database(config))
    finally:
        await workers.close()
    return [*found, _admin(config.admin), _tokenizers(fleet)]


async def _backend(workers: Workers, backend: Backend, fleet: Fleet) -> Result:
    what = f"backend {backend.name}"
    try:
        async with await workers.open(
            backend.origin,
            method=b"GET",
            path="/v1/models",
            headers=backend.headers,
            body=b"",
            connect_seconds=backend.terms.connect_seconds,
            head_seconds=PATIENCE,
        ) as answer:
            body = await answer.read_all(PATIENCE, 16 * 1024 * 1024)
    except (EngineUnavailable, EngineBroke, TimeoutError) as error:
        return Result(what, False, f"{error} ({backend.terms.url})")
    if answer.status in (401, 403):
        return Result(what, False, f"refused our key ({answer.status}): set api_key_env or api_key_file")
    if answer.status != 200:
        return Result(what, False, f"GET /v1/models answered {answer.status}")
    return _serves(what, backend, fleet, body)


def _serves(what: str, backend: Backend, fleet: Fleet, body: bytes) -> Result:
    try:
        listed = {item["id"] for item in msgspec.json.decode(body)["data"]}
    except (msgspec.DecodeError, KeyError, TypeError):
        return Result(what, False, "GET /v1/models answered something that lists no models")
    targets = (t for model in fleet.models.values() for t in (*model.primary, *model.overflow))
    wanted = {target.model for target in targets if target.backend is backend}
    if missing := sorted(wanted - listed):
        return Result(what, False, f"does not serve {', '.join(missing)}; it lists {', '.join(sorted(listed))}")
    return Result(what, True, f"serves {', '.join(sorted(wanted)) or 'no configured model'}")


async def _store(config: Config) -> Result:
    store = quota_store(config.quota_store, lambda _: None)
    try:
        await store.ping()
    except StoreUnavailable as error:
        return Result("quota store", False, f"{error}; see quota_store.url and timeout_ms")
    finally:
        await store.close()
    return Result("quota store", True, "answers")


async def _database(config: Config) -> Result:
    engine = open_engine(config.ledger.url)
    try:
        current = await asyncio.wait_for(schema_current(engine), PATIENCE)
    except (DatabaseUnavailable, TimeoutError) as error:
        return Result("database", False, str(error) or "does not answer; see ledger.url")
    finally:
        await engine.dispose()
    if not current and engine.dialect.name == "sqlite":
        return Result("database", True, "can be opened; `weir serve` brings its schema up to date")
    if not current:
        return Result("database", False, "its schema is not the newest: run `weir migrate`")
    return Result("database", True, "answers, its schema is the newest")


def _admin(terms: AdminTerms) -> Result:
    unset = [token.name for token in terms.tokens if token.token is None]
    if unset:
        return Result("admin tokens", False, f"{', '.join(unset)}: the variable or file is empty, so it opens nothing")
    if not terms.tokens:
        return Result("admin tokens", True, "none: the admin REST is closed to everybody")
    return Result("admin tokens", True, ", ".join(f"{token.name} ({token.role})" for token in terms.tokens))


def _tokenizers(fleet: Fleet) -> Result:
    named = sorted(tokenizers_of(fleet))
    return Result("tokenizers", True, ", ".join(named) or "bounds by bytes, or the engine's own")
