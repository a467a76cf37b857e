"""The admin site behind a real HTTP server, on a real database."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry, Counter
from sqlalchemy.ext.asyncio import AsyncEngine

from meter.admin.deps import AdminDeps
from meter.admin.site import admin_app
from meter.callers.directory import Directory
from meter.callers.registry import Registry
from tests.admin.person import SECRETS, Client, Doctor, Person
from tests.callers.databases import (
    config,
    database_url,
    directory,
    engine,
    now,
    postgres_url,
    registry,
    sqlite_template,
)
from tests.quotas.stores import EmptyMemory

__all__ = ["database_url", "directory", "engine", "postgres_url", "registry", "sqlite_template"]


@pytest.fixture
def deps(engine: AsyncEngine, registry: Registry, directory: Directory, monkeypatch: pytest.MonkeyPatch) -> AdminDeps:
    for role, secret in SECRETS.items():
        monkeypatch.setenv(f"TEST_{role.upper()}", secret)
    monkeypatch.setenv("TEST_EMPTY", "")
    tokens = [{"name": role, "role": role, "token_env": f"TEST_{role.upper()}"} for role in SECRETS]
    tokens += [{"name": "unset", "token_env": "TEST_UNSET"}, {"name": "empty", "token_env": "TEST_EMPTY"}]
    tokens += [{"name": "nofile", "token_file": "/nowhere/token"}]
    metrics = CollectorRegistry()
    Counter("weir_refusals", "Refusals", ["rule"], registry=metrics).labels("cap").inc()
    return AdminDeps(
        config=config(admin={"tokens": tokens}),
        engine=engine,
        registry=registry,
        directory=directory,
        store=EmptyMemory(time.time),
        state=lambda: {"directory": repr(directory)},
        condition=Doctor(),
        metrics=metrics,
        clock=now,
    )


@pytest.fixture
async def server(deps: AdminDeps) -> AsyncIterator[TestServer]:
    server = TestServer(admin_app(deps))
    async with server:
        yield server


@pytest.fixture
async def client(server: TestServer) -> AsyncIterator[Client]:
    async with TestClient(server) as client:
        yield client


@pytest.fixture
def admin(client: Client) -> Person:
    return Person(client, SECRETS["admin"])


@pytest.fixture
def operator(client: Client) -> Person:
    return Person(client, SECRETS["operator"])


@pytest.fixture
def finance(client: Client) -> Person:
    return Person(client, SECRETS["finance"])
