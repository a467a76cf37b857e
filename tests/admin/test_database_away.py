from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from meter.admin.deps import AdminDeps
from meter.admin.site import admin_app
from meter.callers.directory import Directory
from meter.callers.registry import Registry
from meter.config import Config
from meter.ledger.database import migrate, open_engine
from tests.admin.person import Doctor, Person
from tests.callers.databases import config, eventually, now
from tests.quotas.stores import EmptyMemory
from tests.services.postgres import PostgresServer


async def test_reads_come_from_the_last_known_state_and_writes_are_503(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_ADMIN", "token")
    with PostgresServer() as server:
        url = server.create_database()
        await migrate(url)
        engine = open_engine(url)
        directory = Directory(engine, Config(), tmp_path / "directory.json", now)
        await directory.start()
        deps = AdminDeps(
            config=config(admin={"tokens": [{"name": "admin", "token_env": "TEST_ADMIN"}]}),
            engine=engine,
            registry=Registry(engine, now),
            directory=directory,
            store=EmptyMemory(lambda: now().timestamp()),
            state=dict,
            condition=Doctor(),
            metrics=CollectorRegistry(),
            clock=now,
        )
        async with TestClient(TestServer(admin_app(deps))) as client:
            admin = Person(client, "token")
            made = [await admin.make_key(name=name) for name in ("a", "b")]
            await eventually(lambda: len(directory.known.keys) == 2)
            path = f"/keys/{made[0]['id']}"
            readable = ("/keys", "/keys?page_size=1", path, f"{path}/quota", "/tiers", "/tiers/standard", "/teams")
            before = [await admin.get(where) for where in readable]
            server.kill()
            after = [await admin.get(where) for where in readable]
            assert [answer.text for answer in after] == [answer.text for answer in before]
            assert [answer.headers.get("ETag") for answer in after] == [answer.headers.get("ETag") for answer in before]
            assert (await admin.get(f"{path}/windows")).status == 200
            assert (await admin.get("/keys/nobody")).status == 404
            writes = [
                admin.ask("POST", "/keys", {"name": "c"}),
                admin.ask("PATCH", path, {"name": "c"}, If_Match=before[2].etag),
                admin.ask("PUT", f"{path}/quota", {}, If_Match="*"),
                admin.ask("PUT", "/tiers/gold", {}, If_None_Match="*"),
                admin.ask("DELETE", path, If_Match="*"),
                *(admin.get(where) for where in ("/prices", "/audit", "/usage", "/usage?format=csv", "/usage/records")),
            ]
            for answer in await asyncio.gather(*writes):
                assert (answer.status, answer.error["code"]) == (503, "database_unavailable")
                assert answer.error["message"] == "The ledger's database cannot be reached; try again in a moment."
            server.start()
            await eventually(lambda: directory.stale_since is None)
            assert [key["name"] for key in (await admin.get("/keys")).json["items"]] == ["a", "b"]
        await directory.stop()
        await engine.dispose()


async def test_a_database_without_tables_is_answered_with_what_to_do(
    deps: AdminDeps, engine: AsyncEngine, admin: Person
) -> None:
    async with engine.begin() as connection:
        for table in ("usage_hourly", "api_key", "directory_revision"):
            await connection.execute(text(f"ALTER TABLE {table} RENAME TO {table}_of_old"))
    try:
        said = "The database's schema is missing or not the newest: run `weir migrate`."
        await eventually(lambda: deps.directory.trouble == said)
        for answer in (await admin.get("/usage"), await admin.ask("POST", "/keys", {"name": "a"})):
            assert (answer.status, answer.error["code"], answer.error["message"]) == (503, "database_unavailable", said)
    finally:
        async with engine.begin() as connection:
            for table in ("usage_hourly", "api_key", "directory_revision"):
                await connection.execute(text(f"ALTER TABLE {table}_of_old RENAME TO {table}"))
    await eventually(lambda: deps.directory.trouble is None)
