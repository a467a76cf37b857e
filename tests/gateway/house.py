"""A whole sidecar in this process: two simulated workers, quotas in memory, a ledger in SQLite."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
from multidict import CIMultiDictProxy
from sqlalchemy import select
from yarl import URL

from engine_adapter.simulator import Simulator
from meter.app import Sidecar, now
from meter.callers.edits import KeyDraft
from meter.callers.registry import Registry
from meter.config import Config
from meter.ledger.database import open_engine
from meter.ledger.schema import usage_record

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "m1", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 16}
PATIENCE = 10.0

T = TypeVar("T")


async def until(read: Callable[[], Awaitable[T]], good: Callable[[T], bool]) -> T:
    """Reads until it is good; once patience ends, the last reading, for the assertion to show."""
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while not good(seen := await read()) and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.02)
    return seen


@dataclass(frozen=True)
class Answer:
    status: int
    headers: CIMultiDictProxy[str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        return [part.removeprefix("data: ") for part in self.body.decode().split("\n\n") if part]


def _laid_over(base: Any, fields: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(fields, dict):
        return fields
    return {**base, **{name: _laid_over(base.get(name), value) for name, value in fields.items()}}


class House:
    """`tier`: fields of the tier "test", which the key is on. `model`: fields of m1 beside its routes."""

    def __init__(self, directory: Path, *, tier: dict[str, Any] | None = None, **sections: Any) -> None:
        self._directory = directory
        self._tier = tier or {}
        self._sections = sections
        self.large = Simulator("m1")
        self.cheap = Simulator("m2")
        self.secret = ""
        self.key_id = ""

    async def __aenter__(self) -> Self:
        ports = await self.large.start(), await self.cheap.start()
        self.config = Config.model_validate(self._configuration(*ports))
        self.sidecar = await Sidecar(self.config).__aenter__()
        self.engine = open_engine(self.config.ledger.url)
        await self._make_key()
        self.base = f"http://127.0.0.1:{self.sidecar.ports.traffic}"
        self.session = aiohttp.ClientSession(auto_decompress=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.session.close()
        await self.sidecar.__aexit__(kind, error, trace)
        await self.engine.dispose()
        await self.large.stop()
        await self.cheap.stop()

    def _configuration(self, large: int, cheap: int) -> dict[str, Any]:
        sections: dict[str, Any] = {
            "listen": {"host": "127.0.0.1", "port": 0, "grace_seconds": 5},
            "admin": {"port": 0},
            "health": {"host": "127.0.0.1", "port": 0},
            "ledger": {
                "url": f"sqlite+aiosqlite:///{self._directory / 'weir.db'}",
                "journal_dir": str(self._directory / "journal"),
                "batch_ms": 20,
            },
            "backends": {
                "u1": {"url": f"http://127.0.0.1:{large}", "first_event_seconds": 5, "idle_seconds": 5},
                "u2": {"url": f"http://127.0.0.1:{cheap}", "first_event_seconds": 5, "idle_seconds": 5},
            },
            "models": {
                "m1": {
                    "primary": [{"backend": "u1", "model": "m1"}],
                    "overflow": [{"backend": "u2", "model": "m2"}],
                }
            },
            "tiers": {"test": self._tier},
            "prices": {"m1@u1": {"prompt": 1, "completion": 2}, "m1@u2": {"prompt": 0.1, "completion": 0.2}},
        }
        for name, fields in self._sections.items():
            sections[name] = _laid_over(sections.get(name, {}), fields)
        return sections

    async def _make_key(self) -> None:
        key, self.secret = await Registry(self.engine, now).create_key("tests", KeyDraft(name="k", tier="test"))
        self.key_id = key.id
        await self.sidecar.look_again()

    # ---- asking ------------------------------------------------------------------------------------------------------

    @property
    def auth(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secret}"}

    async def post(self, body: Any = HELLO, *, path: str = CHAT, headers: dict[str, str] | None = None) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.base + path, data=data, headers={**self.auth, **(headers or {})}) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    async def get(self, path: str, *, method: str = "GET", headers: dict[str, str] | None = None) -> Answer:
        sent = self.auth if headers is None else headers
        async with self.session.request(method, self.base + path, headers=sent) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    async def raw(
        self, method: str, path: str, *, headers: dict[str, str] | None = None, body: bytes | None = None
    ) -> Answer:
        """The path goes out byte for byte."""
        url = URL(self.base + path, encoded=True)
        sent = self.auth if headers is None else headers
        async with self.session.request(method, url, data=body, headers=sent) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    # ---- looking -----------------------------------------------------------------------------------------------------

    async def rows(self, count: int = 1) -> list[Any]:
        """The booked records, once there are `count`, oldest first."""
        rows = await until(self._rows, lambda rows: len(rows) >= count)
        assert len(rows) == count, rows
        return rows

    async def _rows(self) -> list[Any]:
        async with self.engine.connect() as connection:
            return list(await connection.execute(select(usage_record).order_by(usage_record.c.started_at)))

    async def windows(self) -> dict[str, Any]:
        """The key's windows by name, once no lease is left."""
        view = await until(self._quota, lambda view: not view["leases"])
        assert view["leases"] == []
        return {window["name"]: window for window in view["windows"]}

    async def _quota(self) -> Any:
        return (await self.get("/v1/quota")).json
