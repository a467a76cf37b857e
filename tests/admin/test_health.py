from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry, Counter

from meter.admin.health import from_loopback, health_app
from tests.admin.person import Client, Doctor


@pytest.fixture
def doctor() -> Doctor:
    return Doctor()


@pytest.fixture
async def client(doctor: Doctor) -> AsyncIterator[Client]:
    metrics = CollectorRegistry()
    Counter("weir_refusals", "Refusals", ["rule"], registry=metrics).labels("cap").inc()
    async with TestClient(TestServer(health_app(doctor, metrics))) as client:
        yield client


async def test_a_process_that_lives_says_so_whatever_its_condition(client: Client, doctor: Doctor) -> None:
    doctor.takes, doctor.problems = False, ["everything is wrong"]
    assert (await client.get("/healthz")).status == 200


@pytest.mark.parametrize(
    ("takes", "problems", "status", "word"),
    [
        (True, [], 200, "ready"),
        (True, ["the database is away since 12:00"], 200, "degraded"),
        (False, [], 503, "unready"),
        (False, ["not started"], 503, "unready"),
    ],
)
async def test_readiness_says_what_is_wrong(
    client: Client, doctor: Doctor, takes: bool, problems: list[str], status: int, word: str
) -> None:
    doctor.takes, doctor.problems, doctor.warnings = takes, problems, ["model m has no price"]
    response = await client.get("/readyz")
    assert response.status == status
    assert await response.json() == {"status": word, "problems": problems, "warnings": ["model m has no price"]}


async def test_metrics_are_those_of_the_registry(client: Client) -> None:
    response = await client.get("/metrics")
    assert 'weir_refusals_total{rule="cap"} 1.0' in await response.text()
    assert response.headers["Content-Type"].startswith("text/plain")


async def test_drain_waits_until_everything_has_finished(client: Client, doctor: Doctor) -> None:
    draining = [asyncio.create_task(client.post("/drain")) for _ in range(2)]
    async with asyncio.timeout(10):
        while doctor.drains < 2:
            await asyncio.sleep(0.01)
    assert (await client.get("/readyz")).status == 503
    assert not any(task.done() for task in draining)
    doctor.finished.set()
    for response in await asyncio.gather(*draining):
        assert (response.status, await response.json()) == (200, {"status": "drained"})


@pytest.mark.parametrize(
    ("remote", "is_ours"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        (None, True),
        ("10.0.0.7", False),
        ("::ffff:10.0.0.7", False),
        ("fe80::1%eth0", False),
        ("0.0.0.0", False),
        ("localhost", False),
    ],
)
def test_only_this_machine_may_drain(remote: str | None, is_ours: bool) -> None:
    assert from_loopback(remote) is is_ours


async def test_nothing_else_is_here(client: Client, doctor: Doctor) -> None:
    for method, path, status in (
        ("GET", "/", 404),
        ("GET", "/admin/v1/keys", 404),
        ("GET", "/v1/models", 404),
        ("GET", "/drain", 405),
        ("POST", "/healthz", 405),
    ):
        response = await client.request(method, path)
        assert response.status == status
        assert (await response.json())["error"]["message"]
    assert doctor.drains == 0
