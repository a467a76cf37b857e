"""`weir serve` as a child process in front of the engine, its admin site, and what it booked."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import asyncpg
import yaml

from tests.vllm.engine import CONTEXT_TOKENS, MODEL
from tests.vllm.process import Process, fetch, free_port

ADMIN_TOKEN = "only-for-this-test"
PUBLIC_MODEL = "assistant"

# Nothing is refused or cut here; the windows, as long as the whole run, only count.
ROOM = {"tokens": 100_000_000, "seconds": 3600}
TIER = {
    "rate": ROOM,
    "burst": None,
    "cap": ROOM,
    "max_parallel": 64,
    "max_output_tokens": 1024,
    "max_n": 8,
    "on_overage": "reject",
}


class Weir:
    """Serves on free ports of 127.0.0.1 until the end of its `with`; `key` is a caller's."""

    def __init__(self, directory: Path, engine_url: str, redis_url: str, database_url: str) -> None:
        self.port, self._admin_port, self._health_port = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._admin = f"http://127.0.0.1:{self._admin_port}/admin/v1"
        self._dsn = database_url.replace("+asyncpg", "")
        self._log = directory / "weir.log"
        self._file = directory / "weir.yaml"
        self._file.write_text(yaml.safe_dump(self._config(directory, engine_url, redis_url, database_url)))

    def _config(self, directory: Path, engine_url: str, redis_url: str, database_url: str) -> dict[str, Any]:
        token = {"name": "test", "role": "admin", "token_env": "WEIR_ADMIN_TOKEN"}
        target = {"backend": "engine", "model": MODEL, "context_tokens": CONTEXT_TOKENS}
        return {
            "listen": {"host": "127.0.0.1", "port": self.port},
            "health": {"host": "127.0.0.1", "port": self._health_port},
            "admin": {"host": "127.0.0.1", "port": self._admin_port, "tokens": [token]},
            "quota_store": {"url": redis_url, "timeout_ms": 2000},
            "ledger": {"url": database_url, "journal_dir": str(directory / "journal")},
            "backends": {"engine": {"url": engine_url, "kind": "vllm"}},
            "models": {PUBLIC_MODEL: {"primary": [target], "tokenizer": "engine"}},
            "prices": {f"{PUBLIC_MODEL}@engine": {"prompt": 0.5, "completion": 1.5}},
            "tiers": {"measured": TIER},
        }

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "meter"]
        file = ["-c", str(self._file)]
        subprocess.run([*command, "migrate", *file], check=True, timeout=60)
        self._process = Process([*command, "serve", *file], self._log, {"WEIR_ADMIN_TOKEN": ADMIN_TOKEN})
        self._process.wait_for(f"http://127.0.0.1:{self._health_port}/readyz", seconds=60)
        created = self._call("/keys", {"name": "the client", "tier": "measured"})
        self.key, self._key_id = created["secret"], created["id"]
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop()

    def windows(self) -> dict[str, Any]:
        """What the key's windows and leases are now."""
        shown: dict[str, Any] = self._call(f"/keys/{self._key_id}/windows")
        return shown

    def _call(self, path: str, body: object = None) -> Any:
        answer = fetch(self._admin + path, body, ADMIN_TOKEN)
        if answer.status not in (200, 201):
            raise RuntimeError(f"the admin site said {answer.status} to {path}: {answer.text}")
        return answer.json()

    def records(self, request_ids: list[str], seconds: float = 30) -> dict[str, dict[str, Any]]:
        """The rows of these requests by their id, as soon as each has one; AssertionError after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            rows = asyncio.run(self._rows(request_ids))
            if len(rows) >= len(request_ids):
                break
            assert time.monotonic() < deadline, f"{len(request_ids) - len(rows)} requests were never booked"
            time.sleep(0.1)
        found = {str(row["request_id"]): row for row in rows}
        assert len(rows) == len(found) == len(request_ids), "a request was booked twice"
        return found

    async def _rows(self, request_ids: list[str]) -> list[dict[str, Any]]:
        database = await asyncpg.connect(self._dsn)
        try:
            query = "SELECT * FROM usage_record WHERE request_id = ANY($1::uuid[])"
            return [dict(row) for row in await database.fetch(query, request_ids)]
        finally:
            await database.close()
