"""The terms of the cases: a proxy between scripted workers, keys with limits, and what must hold after every case."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import asyncpg
from prometheus_client.parser import text_string_to_metric_families

from tests.cases.proxy import ADMIN_TOKEN, U1_KEY, U2_KEY, Proxy
from tests.cases.stub import OK, Stub
from tests.cases.wire import Connection, Headers, Reply, as_json, ask, bearer, eventually, request

CHAT = "/v1/chat/completions"

BODY: dict[str, Any] = {"model": "m1", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 16}

NO_LIMITS: dict[str, Any] = {
    "rate": None,
    "burst": None,
    "cap": None,
    "max_parallel": None,
    "max_output_tokens": None,
    "max_n": None,
    "on_cap": "refuse",
    "on_overage": "reject",
    "on_outage": "reject",
}


def body(**changes: Any) -> dict[str, Any]:
    return {**BODY, **changes}


def streamed(**changes: Any) -> dict[str, Any]:
    return body(**{"stream": True, **changes})


@dataclass
class Key:
    """A caller's key. `window` is the one that limits it; `booked` the rows it must have in the end, if a test said so."""

    id: str
    secret: str
    name: str
    window: Literal["hour", "minute"]
    seconds: int
    booked: int | None = None
    open: bool = True
    """False: deleted, so its windows can no longer be asked for."""
    forgotten: bool = False
    """The quota store lost what was used."""


@dataclass(frozen=True)
class Standing:
    """A key's window as the admin site shows it; `reserved` is held, `leases` are the running requests."""

    limit: int
    used: int
    reserved: int
    remaining: int
    leases: int


@dataclass
class Places:
    """Ports at which the faulty backends of the configuration are: `hole` never answers a connect, `refusing` refuses it."""

    hole: int
    refusing: int

    @classmethod
    @asynccontextmanager
    async def held(cls) -> AsyncIterator[Places]:
        with closing(socket.socket()) as hole, closing(socket.socket()) as refusing, closing(socket.socket()) as filler:
            for place in (hole, refusing):
                place.bind(("127.0.0.1", 0))
            hole.listen(0)
            filler.setblocking(False)
            await asyncio.get_running_loop().sock_connect(filler, hole.getsockname())
            yield cls(hole.getsockname()[1], refusing.getsockname()[1])


def configuration(u1: Stub, u2: Stub, places: Places, redis: str, database: str) -> dict[str, Any]:
    """Model m1 on the first worker with m2 on the second as its cheaper one; and models whose backends are at fault."""
    first = {"url": f"http://127.0.0.1:{u1.port}", "kind": "vllm", "api_key_env": "U1_KEY"}
    patience = {"connect_seconds": 2, "first_event_seconds": 20, "idle_seconds": 20}
    short = {"connect_seconds": 1, "first_event_seconds": 3, "idle_seconds": 1}
    cheaper = {"backend": "u2", "model": "m2"}
    return {
        "quota_store": {"url": redis, "timeout_ms": 2000, "on_down": "deny"},
        "ledger": {"url": database, "batch_ms": 50},
        "backends": {
            "u1": first | patience,
            "u2": {"url": f"http://127.0.0.1:{u2.port}/cheap", "kind": "openai", "api_key_env": "U2_KEY"} | patience,
            "impatient": first | short,
            "hole": {"url": f"http://127.0.0.1:{places.hole}"} | short,
            "refusing": {"url": f"http://127.0.0.1:{places.refusing}"} | short,
        },
        "models": {
            "m1": {"primary": [{"backend": "u1", "model": "m1"}], "overflow": [cheaper]},
            "m2": {"primary": [cheaper]},
            "odd": {"primary": [{"backend": "u1", "model": "m1"}]},
            "impatient": {"primary": [{"backend": "impatient", "model": "m1"}]},
            "hole": {"primary": [{"backend": "hole", "model": "m1"}]},
            "refusing": {"primary": [{"backend": "refusing", "model": "m1"}]},
            "stranded": {
                "primary": [{"backend": "u1", "model": "m1"}],
                "overflow": [{"backend": "refusing", "model": "m2"}],
            },
            "narrow": {
                "primary": [{"backend": "u1", "model": "m1"}],
                "overflow": [cheaper | {"rate": {"tokens": 100, "seconds": 3600}}],
            },
        },
        "tiers": {"cases": NO_LIMITS},
        "prices": {
            "m1@u1": {"prompt": 0.50, "completion": 1.50},
            "m1@u2": {"prompt": 0.05, "completion": 0.15},
        },
    }


@dataclass
class House:
    proxy: Proxy
    u1: Stub
    u2: Stub
    database: str
    keys: list[Key] = field(default_factory=list)
    stopped: bool = False
    """The test ended the proxy itself."""
    logged: int = 0
    """Characters of the log that earlier cases wrote."""

    @classmethod
    @asynccontextmanager
    async def built(
        cls, directory: Path, config: Mapping[str, Any], u1: Stub, u2: Stub, *, migrate: bool
    ) -> AsyncIterator[Self]:
        """A house around a proxy of its own; what must hold after a case is checked where the test passed.

        `migrate`: its database is new.
        """
        proxy = Proxy(directory, dict(config))
        if migrate:
            await asyncio.to_thread(proxy.migrate)
        async with proxy.running():
            house = cls(proxy, u1, u2, config["ledger"]["url"])
            yield house
            await house.after()

    # --- keys and the admin site

    async def admin(self, method: str, path: str, body: Any = None, headers: Headers = ()) -> Reply:
        sent = [bearer(ADMIN_TOKEN), ("Content-Type", "application/json"), *headers]
        data = None if body is None else as_json(body)
        return await ask(self.proxy.admin_port, method, f"/admin/v1{path}", sent, data)

    async def key(
        self,
        limit: int | None = 1_000_000,
        window: int = 3600,
        overage: Literal["reject", "fallback"] = "reject",
        models: list[str] | None = None,
        **policy: Any,
    ) -> Key:
        """K(limit, window, overage) of the cases, with further terms of its policy; it is in force on return."""
        bound = None if limit is None else {"tokens": limit, "seconds": window}
        kind = {"rate": bound, "on_overage": "overflow"} if overage == "fallback" else {"cap": bound}
        name = f"case-{secrets.token_hex(6)}"
        asked = {"name": name, "tier": "cases", "policy": {**NO_LIMITS, **kind, **policy}}
        reply = await self.admin("POST", "/keys", asked if models is None else {**asked, "models": models})
        assert reply.status == 201, reply.body
        made = reply.json()
        key = Key(made["id"], made["secret"], name, "minute" if overage == "fallback" else "hour", window)
        self.keys.append(key)
        await self.known(key)
        return key

    async def known(self, key: Key, status: int = 200) -> None:
        """Waits until the traffic site answers this key with `status`."""

        async def tried() -> int:
            return (await ask(self.proxy.port, "GET", "/v1/quota", [bearer(key.secret)])).status

        await eventually(tried, lambda found: found == status)

    async def standing(self, key: Key, window: str | None = None) -> Standing:
        reply = await self.admin("GET", f"/keys/{key.id}/windows")
        assert reply.status == 200, reply.body
        view = reply.json()
        found = next(w for w in view["windows"] if (w["name"], w["scope"]) == (window or key.window, "key"))
        return Standing(found["limit"], found["used"], found["held"], found["remaining"], len(view["leases"]))

    async def reserved(self, key: Key, leases: int) -> int:
        """What is held once `leases` requests are running."""

        async def standing() -> Standing:
            return await self.standing(key)

        found: Standing = await eventually(standing, lambda standing: standing.leases == leases)
        return found.reserved

    async def used(self, key: Key, window: str | None = None) -> int:
        """What is used once nothing runs any more."""

        async def standing() -> Standing:
            return await self.standing(key, window)

        found: Standing = await eventually(standing, lambda standing: (standing.leases, standing.reserved) == (0, 0))
        return found.used

    # --- traffic

    async def post(
        self, key: Key | None, body: Mapping[str, Any] | bytes, path: str = CHAT, headers: Headers = ()
    ) -> Reply:
        """One request on a connection of its own, and the whole answer."""
        return await ask(self.proxy.port, "POST", path, _headers(key, headers), _bytes(body))

    async def get(self, key: Key | None, path: str) -> Reply:
        return await ask(self.proxy.port, "GET", path, _headers(key))

    @asynccontextmanager
    async def posted(
        self, key: Key | None, body: Mapping[str, Any] | bytes, path: str = CHAT, headers: Headers = ()
    ) -> AsyncIterator[Connection]:
        """A request that is on its way; the answer is read by the test."""
        async with Connection.to(self.proxy.port) as connection:
            await connection.send(request("POST", path, _headers(key, headers), _bytes(body)))
            yield connection

    async def spent(self, key: Key, prompt: int, completion: int) -> None:
        """One plain request that uses exactly this."""
        self.u1.does(OK(prompt, completion))
        reply = await self.post(key, body())
        assert reply.status == 200, reply.body

    # --- books, figures, log

    async def rows(self, key: Key, count: int, seconds: float = 20.0) -> list[Mapping[str, Any]]:
        """The key's usage records, oldest first, once there are `count`; that there are no more is seen after the case."""

        async def stored() -> list[Mapping[str, Any]]:
            return await self._select(key)

        found: list[Mapping[str, Any]] = await eventually(stored, lambda rows: len(rows) >= count, seconds)
        key.booked = count
        return found

    async def row(self, key: Key) -> Mapping[str, Any]:
        (found,) = await self.rows(key, 1)
        return found

    async def query(self, statement: str, *arguments: Any) -> list[Any]:
        connection = await asyncpg.connect(self.database.replace("+asyncpg", ""))
        try:
            return list(await connection.fetch(statement, *arguments))
        finally:
            await connection.close()

    async def _select(self, key: Key) -> list[Mapping[str, Any]]:
        return await self.query("SELECT * FROM usage_record WHERE key_id = $1 ORDER BY started_at, exchange_id", key.id)

    async def metrics(self) -> str:
        return (await self.proxy.health("/metrics")).body.decode()

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name that have these labels."""
        families = text_string_to_metric_families(await self.metrics())
        samples = (sample for family in families for sample in family.samples if sample.name == name)
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    # --- what must hold after every case

    async def after(self) -> None:
        if not self.stopped:
            assert self.proxy.alive, self.proxy.log()[-3000:]
            for key in self.keys:
                await self._balanced(key)

            async def inflight() -> float:
                return await self.metric("weir_inflight")

            await eventually(inflight, lambda running: running == 0)
        self._logs_well()

    async def _balanced(self, key: Key) -> None:
        """Nothing held, nothing negative, and the window's use is the sum of the rows, while all are inside it."""
        if key.open:
            used = await self.used(key)
            standing = await self.standing(key)
            assert used >= 0
            assert standing.remaining <= standing.limit

        async def rows() -> list[Mapping[str, Any]]:
            return await self._select(key)

        def total(rows: list[Mapping[str, Any]]) -> int:
            counted = rows if key.window == "hour" else [row for row in rows if row["route"] == "primary"]
            return sum(row["prompt_tokens"] + row["completion_tokens"] for row in counted)

        if key.open and key.seconds >= 600 and not key.forgotten:
            found = await eventually(rows, lambda rows: total(rows) == used, 15.0)
        else:
            found = await rows()
        assert key.booked in (None, len(found)), found
        assert len({row["exchange_id"] for row in found}) == len(found)

    def _logs_well(self) -> None:
        """No key, and nothing that went wrong in a way that nobody foresaw."""
        log = self.proxy.log()
        assert "Traceback" not in log[self.logged :], log[self.logged :][-3000:]
        for secret in (ADMIN_TOKEN, U1_KEY, U2_KEY, *(key.secret for key in self.keys)):
            assert secret.rpartition("-")[2] not in log if secret.startswith("wk-") else secret not in log

    async def clear(self) -> None:
        self.keys.clear()
        self.logged = len(self.proxy.log())
        await self.u1.reset()
        await self.u2.reset()


def _headers(key: Key | None, more: Headers = ()) -> list[tuple[str, str]]:
    return [*([] if key is None else [bearer(key.secret)]), ("Content-Type", "application/json"), *more]


def _bytes(body: Mapping[str, Any] | bytes) -> bytes:
    return body if isinstance(body, bytes) else as_json(body)
