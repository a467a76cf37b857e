"""The product as a child process: one `weir serve` with a configuration of its own, on free ports."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.cases.wire import Reply, ask, eventually

ADMIN_TOKEN = "admin-token-of-the-cases-7f3a"
U1_KEY = "sk-of-the-first-worker-51c9"
U2_KEY = "sk-of-the-cheaper-worker-88d2"

SECRETS = {"WEIR_ADMIN_TOKEN": ADMIN_TOKEN, "U1_KEY": U1_KEY, "U2_KEY": U2_KEY}

START_SECONDS = 60.0


def free_port() -> int:
    """Below the range from which outgoing connections take theirs, so that it stays free until it is used."""
    for port in random.sample(range(10_000, 20_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("there is no free port")


class Proxy:
    """One process; `config` are the sections of its file but for listen, health and admin, which are laid under them."""

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        self.port, self.health_port, self.admin_port = free_port(), free_port(), free_port()
        self.journal = directory / "journal"
        self._log = directory / "log"
        self._file = directory / "weir.yaml"
        sections = self._sites()
        for name, section in config.items():
            sections[name] = {**sections.get(name, {}), **section}
        self._file.write_text(yaml.safe_dump(sections))
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: subprocess.Popen[bytes] | None = None

    def _sites(self) -> dict[str, Any]:
        token = {"name": "cases", "role": "admin", "token_env": "WEIR_ADMIN_TOKEN"}
        return {
            "listen": {"host": "127.0.0.1", "port": self.port, "grace_seconds": 10},
            "health": {"host": "127.0.0.1", "port": self.health_port},
            "admin": {"host": "127.0.0.1", "port": self.admin_port, "tokens": [token]},
            "ledger": {"journal_dir": str(self.journal)},
            "log": {"level": "debug"},
        }

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        await self.start()
        try:
            yield self
        finally:
            self.kill()

    def migrate(self) -> None:
        """Makes the tables, as `weir migrate` does."""
        done = subprocess.run(
            self._command("migrate"), env=self._environment(), capture_output=True, timeout=START_SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr.decode()

    async def start(self) -> None:
        """Starts it, or starts it again after its end, and waits until it is ready."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command("serve"), env=self._environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._watch = _end_with_us(self._process.pid)
        await eventually(self._ready, lambda ready: ready is True, START_SECONDS)

    async def _ready(self) -> bool | str:
        if not self.alive:
            raise AssertionError(f"weir serve ended by itself: {self.log()[-3000:]}")
        try:
            reply = await ask(self.health_port, "GET", "/readyz")
        except (OSError, asyncio.IncompleteReadError) as error:
            return f"{error!r}"
        return reply.status == 200 or reply.body.decode()

    def _command(self, word: str) -> list[str]:
        return [sys.executable, "-m", "meter", word, "-c", str(self._file)]

    @staticmethod
    def _environment() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")} | SECRETS

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def sigterm(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._watch is not None:
            self._watch.kill()
            self._watch.communicate()
            self._watch = None

    async def ended(self, seconds: float = 30.0) -> int:
        """The exit code, once it has ended."""
        process = self._process
        assert process is not None

        async def code() -> int | None:
            return process.poll()

        found: int = await eventually(code, lambda code: code is not None, seconds)
        self.kill()
        return found

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    async def health(self, path: str) -> Reply:
        return await ask(self.health_port, "GET", path)


def _end_with_us(pid: int) -> subprocess.Popen[bytes]:
    """A shell that ends `pid` when this process is gone, however it went: its standard input closes then."""
    command = ["/bin/sh", "-c", 'read -r _; kill -KILL "$1"', "sh", str(pid)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
