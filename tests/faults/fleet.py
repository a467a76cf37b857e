"""Several sidecars as processes, on one Redis and one database, before one engine that knows what it really did."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from meter.callers.tiers import Tier
from meter.ledger.database import migrate
from quotas.policy import Policy
from tests.cases.house import NO_LIMITS
from tests.cases.proxy import ADMIN_TOKEN, Proxy
from tests.cases.stub import Call, Stub, event, usage
from tests.cases.wire import Connection, Reply, as_json, ask, bearer, eventually, request
from tests.faults.truth import Truth

PATH = "/v1/completions"
PROMPT = 100
CALLERS = 4
"""At each sidecar at once, of `Fleet.spend`."""
EVENT_TOKENS = 10
"""Tokens that the engine puts into one event of a stream: several, as a busy one does."""


class Engine:
    """Uses exactly the tokens it is asked for, and tells the truth of each key. `release`: plain answers wait for it, and
    streams after their first event."""

    def __init__(self) -> None:
        self.stub = Stub()
        self.stub.does(self._serve)
        self.truths: dict[str, Truth] = {}
        self.release = asyncio.Event()
        self.release.set()
        self._serial = itertools.count()

    async def _serve(self, call: Call) -> None:
        """The key is known by the first token of its prompt."""
        asked, name = call.seen.json(), f"call {next(self._serial)}"
        truth = self.truths[str(asked["prompt"][0])]
        if asked.get("stream"):
            await self._stream(call, asked["max_tokens"], truth, name)
            return
        tokens = PROMPT + asked["max_tokens"]
        truth.admitted(name, tokens, tokens, primary=True)
        await self.release.wait()
        truth.ended(name, tokens)
        await call.plain(200, _answer(asked["max_tokens"]))

    async def _stream(self, call: Call, limit: int, truth: Truth, name: str) -> None:
        truth.admitted(name, 0, 0, primary=True)
        made = 0
        await call.open_stream()
        while made < limit and not call.gone:
            made = min(limit, made + EVENT_TOKENS)
            truth.used_so_far(name, PROMPT + made)
            await call.chunk(_event(made))
            await self.release.wait()
            await asyncio.sleep(0.02)  # its pace
        truth.ended(name, PROMPT + made)
        if not call.gone:
            await call.chunk(b"data: [DONE]\n\n")
            await call.finish()


def _answer(completion: int) -> bytes:
    choice = {"index": 0, "text": "ok", "finish_reason": "length"}
    figures = usage(PROMPT, completion)
    return json.dumps({"id": "c", "object": "text_completion", "choices": [choice], "usage": figures}).encode()


def _event(made: int) -> bytes:
    choice = {"index": 0, "text": " a" * EVENT_TOKENS, "finish_reason": None}
    return event({"id": "c", "object": "text_completion", "choices": [choice], "usage": usage(PROMPT, made)})


class AheadProxy(Proxy):
    """A sidecar whose machine's clock is wrong."""

    ahead = 0.0

    def _command(self, word: str) -> list[str]:
        if word != "serve" or not self.ahead:
            return super()._command(word)
        script = Path(__file__).parent / "shifted_clock.py"
        return [sys.executable, str(script), str(self.ahead), *super()._command(word)[3:]]

    @staticmethod
    def _environment() -> dict[str, str]:
        return Proxy._environment() | {"PYTHONPATH": str(Path(__file__).parent.parent.parent)}


@dataclass
class Key:
    """`number` is what its prompts consist of, so that the engine knows whose they are."""

    number: int
    id: str
    secret: str
    truth: Truth

    def asks(self, max_tokens: int, **more: Any) -> dict[str, Any]:
        return {"model": "m", "prompt": [self.number] * PROMPT, "max_tokens": max_tokens, **more}


@dataclass
class Fleet:
    engine: Engine
    sidecars: list[AheadProxy]
    policy: Policy

    async def key(self) -> Key:
        """A new key of the tier, known to every sidecar."""
        number = len(self.engine.truths)
        asked = as_json({"name": f"key {number}", "tier": "faults"})
        headers = [bearer(ADMIN_TOKEN), ("Content-Type", "application/json")]
        reply = await ask(self.sidecars[0].admin_port, "POST", "/admin/v1/keys", headers, asked)
        assert reply.status == 201, reply.body
        made = reply.json()
        truth = self.engine.truths[f"{number}"] = Truth(self.policy)
        for proxy in self.sidecars:
            await eventually(partial(_status, proxy.port, made["secret"]), lambda status: status == 200)
        return Key(number, made["id"], made["secret"], truth)

    async def post(self, sidecar: int, key: Key, max_tokens: int) -> Reply:
        headers = [bearer(key.secret), ("Content-Type", "application/json")]
        return await ask(self.sidecars[sidecar].port, "POST", PATH, headers, as_json(key.asks(max_tokens)))

    @asynccontextmanager
    async def streaming(self, sidecar: int, key: Key, max_tokens: int) -> AsyncIterator[Connection]:
        """A stream that has begun."""
        headers = [bearer(key.secret), ("Content-Type", "application/json")]
        body = as_json(key.asks(max_tokens, stream=True))
        async with Connection.to(self.sidecars[sidecar].port) as connection:
            await connection.send(request("POST", PATH, headers, body))
            assert (await connection.start()).status == 200
            await connection.event()
            yield connection

    async def spend(self, key: Key, max_tokens: int, refusals: int) -> None:
        """Some callers on every sidecar, one request of each after the other, until each was refused so often in a row."""

        async def on(sidecar: int) -> None:
            refused = 0
            while refused < refusals:
                status = (await self.post(sidecar, key, max_tokens)).status
                assert status in (200, 429, 503), status
                refused = refused + 1 if status == 429 else 0

        living = [number for number, proxy in enumerate(self.sidecars) if proxy.alive]
        await asyncio.gather(*(on(number) for number in living * CALLERS))

    async def window(self, key: Key) -> dict[str, int]:
        """The key's hour as the first living sidecar shows it."""
        proxy = next(proxy for proxy in self.sidecars if proxy.alive)
        reply = await ask(proxy.admin_port, "GET", f"/admin/v1/keys/{key.id}/windows", [bearer(ADMIN_TOKEN)])
        assert reply.status == 200, reply.body
        found: dict[str, int] = next(window for window in reply.json()["windows"] if window["name"] == "hour")
        return found

    async def stores_are(self, *, up: bool) -> None:
        """Waits until every sidecar counts its store as there, or as away."""

        async def seen() -> list[bool]:
            pages = [await proxy.health("/metrics") for proxy in self.sidecars if proxy.alive]
            return [b"\nweir_quota_store_up 1.0" in page.body for page in pages]

        await eventually(seen, lambda found: all(each is up for each in found), 30.0)


async def _status(port: int, secret: str) -> int:
    return (await ask(port, "GET", "/v1/quota", [bearer(secret)])).status


@asynccontextmanager
async def fleet(
    directory: Path,
    redis: str,
    database: str,
    tier: dict[str, Any],
    *,
    ahead: Sequence[float] = (0.0, 0.0),
    **store: Any,
) -> AsyncIterator[Fleet]:
    """Sidecars, one for each clock in `ahead` (seconds before the right time), and a tier for their keys."""
    engine = Engine()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(engine.stub.serving())
        await migrate(database)
        share = {"local_share": 1 / len(ahead)}
        config = _config(engine.stub.port, redis, database, NO_LIMITS | tier, share | store)
        sidecars = []
        for number, seconds in enumerate(ahead):
            (directory / f"{number}").mkdir()
            proxy = AheadProxy(directory / f"{number}", config)
            proxy.ahead = seconds
            await stack.enter_async_context(proxy.running())
            sidecars.append(proxy)
        yield Fleet(engine, sidecars, Tier(**NO_LIMITS | tier).policy)
        assert not engine.stub.faults, engine.stub.faults
        for proxy in sidecars:
            assert "Traceback" not in proxy.log(), proxy.log()[-3000:]


def _config(
    worker: int,
    redis: str,
    database: str,
    tier: dict[str, Any],
    store: dict[str, Any],
) -> dict[str, Any]:
    return {
        "quota_store": {"url": redis, "timeout_ms": 2_000, "on_down": "local", **store},
        "ledger": {"url": database, "batch_ms": 50},
        "backends": {"gpu": {"url": f"http://127.0.0.1:{worker}", "kind": "vllm", "idle_seconds": 60}},
        "models": {"m": {"primary": [{"backend": "gpu", "model": "m"}]}},
        "tiers": {"faults": tier},
        "prices": {"m@gpu": {"prompt": 0.50, "completion": 1.50}},
    }
