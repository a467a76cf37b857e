"""Somebody with an admin token (or without), who asks over HTTP; and the condition of a process, as a test says."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient
from multidict import CIMultiDictProxy

Client = TestClient[web.Request, web.Application]
SECRETS = {"admin": "adm-6f1d", "operator": "ope-92ab", "finance": "fin-77c0"}


@dataclass
class Answer:
    status: int
    headers: CIMultiDictProxy[str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def etag(self) -> str:
        return self.headers["ETag"]

    @property
    def error(self) -> dict[str, Any]:
        """The error, which has every field of the shape."""
        error: dict[str, Any] = self.json["error"]
        assert {"message", "type", "param", "code"} <= error.keys()
        assert error["message"]
        return error

    @property
    def fields(self) -> list[str]:
        """The fields of all mistakes."""
        return [detail["field"] for detail in self.error["details"]]


@dataclass
class Person:
    client: Client
    token: str | None

    async def ask(
        self, method: str, path: str, body: object = None, *, raw: str | bytes | None = None, **headers: str
    ) -> Answer:
        """`headers`: `If_Match="…"` and the like. Paths are under /admin/v1."""
        said = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.token is not None:
            said.setdefault("Authorization", f"Bearer {self.token}")
        data = raw if raw is not None else None if body is None else json.dumps(body)
        async with self.client.request(method, f"/admin/v1{path}", data=data, headers=said) as response:
            answer = Answer(response.status, response.headers.copy(), await response.text())  # type: ignore[arg-type]
        assert answer.headers["x-weir-request-id"]
        return answer

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.ask("GET", path, **headers)

    async def make_key(self, **fields: Any) -> dict[str, Any]:
        answer = await self.ask("POST", "/keys", {"name": "bot", **fields})
        assert answer.status == 201, answer.text
        made: dict[str, Any] = answer.json
        return made


@dataclass
class Doctor:
    """A Condition that a test sets."""

    takes: bool = True
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    drains: int = 0
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    def ready(self) -> tuple[bool, list[str], list[str]]:
        return self.takes, self.problems, self.warnings

    def drain(self) -> None:
        self.drains += 1
        self.takes = False

    async def drained(self) -> None:
        await self.finished.wait()
