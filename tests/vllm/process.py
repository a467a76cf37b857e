"""Child processes that end with the test, however it ends, and plain calls to them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


def fetch(url: str, body: object = None, token: str | None = None) -> Answer:
    """GET, or POST of a JSON body. Raises OSError where nobody answers."""
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return Answer(reply.status, reply.read().decode())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read().decode())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """A command in a process group of its own, its output in a file; it ends with the test run, however that ends."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        with log.open("ab") as output:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._watch = _end_with_us(self._child.pid)

    def wait_for(self, url: str, seconds: float) -> None:
        """Returns when `url` says 200; ends the process and raises, with the end of its output, when it never does."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._child.poll() is None:
            with contextlib.suppress(OSError):
                if fetch(url).status == 200:
                    return
            time.sleep(0.1)
        code = self._child.poll()
        self.stop()
        end = "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])
        raise RuntimeError(
            f"{url} never said 200 within {seconds} s (exit code {code}). The end of {self._log}:\n{end}"
        )

    def stop(self) -> None:
        """Asks it to end, then kills what is left of its group: vLLM's engine can outlive its server."""
        self._child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self._watch.kill()
        self._watch.communicate()


def _end_with_us(group: int) -> subprocess.Popen[bytes]:
    """A shell that ends the group when this process is gone: its standard input closes then."""
    command = ["/bin/sh", "-c", 'read -r _; kill -KILL "-$1"', "sh", str(group)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
