"""`weir demo` as a child process: what it prints, and the sites it opens."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.project.product import ROOT

START_SECONDS = 60.0


@dataclass(frozen=True)
class Answer:
    status: int
    body: str


@dataclass(frozen=True)
class Demo:
    """A running demo; `printed` is all it said until it was ready."""

    printed: str
    process: subprocess.Popen[str]

    @property
    def callers(self) -> str:
        return self._after(r"^\s+callers\s+(http://\S+)$")

    @property
    def admin(self) -> str:
        return self._after(r"^\s+admin\s+(http://[^/\s]+)")

    @property
    def health(self) -> str:
        return self._after(r"^\s+health\s+(http://[^/\s]+)")

    @property
    def key(self) -> str:
        return self._after(r"^export KEY=(\S+)$")

    @property
    def admin_token(self) -> str:
        return self._after(r"^export ADMIN=(\S+)$")

    @property
    def headings(self) -> list[str]:
        """The steps of the tour, in order."""
        return re.findall(r"^# (.+)$", self.printed, re.MULTILINE)

    def _after(self, pattern: str) -> str:
        found = re.search(pattern, self.printed, re.MULTILINE)
        assert found, f"the demo does not print {pattern}: {self.printed}"
        return found[1]

    def get(self, url: str, token: str | None = None) -> Answer:
        request = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"} if token else {})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return Answer(answer.status, answer.read().decode())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read().decode())

    def paste(self, heading: str) -> str:
        """Runs the lines under `# heading` in a shell of their own, as a reader would; what they print."""
        lines = self.printed.split(f"# {heading}\n", 1)[1].splitlines()
        block = "\n".join(lines[: lines.index("")] if "" in lines else lines)
        script = f"export KEY={self.key} ADMIN={self.admin_token}\n{block}"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=100, check=True)
        return done.stdout


@contextmanager
def running() -> Iterator[Demo]:
    """Ends with Ctrl-C, and has to end well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "meter", "demo", "--port", str(port)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # Ends the demo when these tests are gone, however they went: this shell's standard input closes then.
    orphan = ["/bin/sh", "-c", 'read -r _; kill -KILL "$1"', "sh", str(process.pid)]
    watch = subprocess.Popen(orphan, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield Demo(_until_it_waits(process), process)
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=30)
        assert (process.returncode, complaints) == (0, "")
    finally:
        process.kill()
        process.wait()
        watch.kill()
        watch.communicate()


def _until_it_waits(process: subprocess.Popen[str]) -> str:
    """The last thing it prints before it waits is the usage report's command."""
    assert process.stdout
    printed, deadline = "", time.monotonic() + START_SECONDS
    while "/admin/v1/usage" not in printed:
        line = process.stdout.readline()
        if not line or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"weir demo did not start: {printed}{process.communicate()[1]}")
        printed += line
    return printed
