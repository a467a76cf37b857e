"""What the proxy costs: its CPU time per plain answer and per event of a stream, beside direct calls, in one run.

Starts a simulated worker and weir (key, quota in memory, usage, journal, SQLite) as child processes on the loopback
interface, sends both the same bounded work in turns, and reads the CPU time that each process used from the system. CPU
time says far more than latency here: it hardly minds what else the machine does.
"""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml

ROUNDS = 5
PLAIN_REQUESTS, PLAIN_AT_ONCE = 1_000, 8  # the system counts CPU time in steps of 10 ms
STREAMS, STREAMS_AT_ONCE = 40, 8
SHORT, LONG = 16, 512
"""Events of the two kinds of streams: what the longer ones cost more is the price of an event."""
WARM_UP = 50
SECRET = "only-for-this-bench"
PROMPT = "Say hello to the river. " * 40  # 1 KB
START_SECONDS = 60.0


@dataclass(frozen=True)
class Site:
    """A process under load: where it listens, and whose CPU time counts."""

    url: str
    process: psutil.Process

    def cpu_seconds(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


@dataclass(frozen=True)
class Cost:
    """Of one piece of work: CPU microseconds of a process and wall-clock milliseconds, each per request."""

    cpu_us: float
    wall_ms: float


# ---- the work --------------------------------------------------------------------------------------------------------


async def plain(session: aiohttp.ClientSession, site: Site) -> None:
    async with session.post(f"{site.url}/v1/chat/completions", json=_body(max_tokens=8)) as answer:
        await answer.read()
        answer.raise_for_status()


async def stream(session: aiohttp.ClientSession, site: Site, events: int) -> None:
    async with session.post(f"{site.url}/v1/chat/completions", json=_body(max_tokens=events, stream=True)) as answer:
        received = (await answer.read()).count(b"data: ")
        answer.raise_for_status()
    assert received >= events, f"{received} of {events} events came"


def _body(**fields: object) -> dict[str, object]:
    return {"model": "assistant", "messages": [{"role": "user", "content": PROMPT}], "ignore_eos": True, **fields}


async def measure(site: Site, work: Any, count: int, at_once: int) -> Cost:
    """Does `work` `count` times, `at_once` of them together, on connections of their own."""
    left = iter(range(count))

    async def lane(session: aiohttp.ClientSession) -> float:
        spent = 0.0
        for _ in left:
            started = time.perf_counter()
            await work(session, site)
            spent += time.perf_counter() - started
        return spent

    before = site.cpu_seconds()
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer wk-bench-{SECRET}"}) as session:
        spent = sum(await asyncio.gather(*(lane(session) for _ in range(at_once))))
    return Cost((site.cpu_seconds() - before) / count * 1e6, spent / count * 1e3)


async def rounds(direct: Site, proxied: Site) -> dict[tuple[str, str], list[Cost]]:
    """Every kind of work, on both sites in turn, ROUNDS times."""
    kinds: dict[str, tuple[Any, int, int]] = {
        "plain": (plain, PLAIN_REQUESTS, PLAIN_AT_ONCE),
        "short": (lambda session, site: stream(session, site, SHORT), STREAMS, STREAMS_AT_ONCE),
        "long": (lambda session, site: stream(session, site, LONG), STREAMS, STREAMS_AT_ONCE),
    }
    found: dict[tuple[str, str], list[Cost]] = {}
    for site in (direct, proxied):
        await measure(site, plain, WARM_UP, PLAIN_AT_ONCE)
    for _ in range(ROUNDS):
        for kind, (work, count, at_once) in kinds.items():
            for name, site in (("direct", direct), ("weir", proxied)):
                found.setdefault((kind, name), []).append(await measure(site, work, count, at_once))
    return found


# ---- the processes ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def sites() -> AsyncIterator[tuple[Site, Site]]:
    """The worker itself, and weir in front of it."""
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as directory:
        ports = [_free_port() for _ in range(4)]
        config = Path(directory) / "weir.yaml"
        config.write_text(yaml.safe_dump(_config(Path(directory), *ports)), encoding="utf-8")
        with (
            _process("simulate", "--port", str(ports[0]), "--model", "assistant") as worker,
            _process("serve", "-c", str(config)) as weir,
        ):
            await _until_it_answers(f"http://127.0.0.1:{ports[0]}/health")
            await _until_it_answers(f"http://127.0.0.1:{ports[3]}/readyz")
            yield (
                Site(f"http://127.0.0.1:{ports[0]}", psutil.Process(worker.pid)),
                Site(f"http://127.0.0.1:{ports[1]}", psutil.Process(weir.pid)),
            )


def _config(directory: Path, worker: int, traffic: int, admin: int, health: int) -> dict[str, Any]:
    """Limits that are asked and never reached, so that every request takes the whole way."""
    room = {"tokens": 10**12, "seconds": 3600}
    return {
        "listen": {"host": "127.0.0.1", "port": traffic},
        "admin": {"port": admin},
        "health": {"host": "127.0.0.1", "port": health},
        "ledger": {"url": f"sqlite+aiosqlite:///{directory}/weir.db", "journal_dir": str(directory / "journal")},
        "backends": {"gpu": {"url": f"http://127.0.0.1:{worker}"}},
        "models": {"assistant": {"primary": [{"backend": "gpu", "model": "assistant"}]}},
        "tiers": {"bench": {"rate": room, "burst": None, "cap": room, "max_parallel": None}},
        "prices": {"assistant@gpu": {"prompt": 0.5, "completion": 1.5}},
        "keys": [
            {
                "id": "bench",
                "name": "bench",
                "tier": "bench",
                "secret_sha256": sha256(SECRET.encode()).hexdigest(),
            }
        ],
    }


@contextmanager
def _process(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "meter", *words],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _until_it_answers(url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            if time.monotonic() > deadline:
                raise SystemExit(f"{url} did not answer within {START_SECONDS:.0f} s.")
            await asyncio.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# ---- the table -------------------------------------------------------------------------------------------------------


def table(found: dict[tuple[str, str], list[Cost]]) -> str:
    """Medians over the rounds, and weir's CPU beside what the worker itself used for a direct call."""

    def cpu(kind: str, name: str) -> float:
        return statistics.median(cost.cpu_us for cost in found[kind, name])

    def per_event(name: str) -> float:
        pairs = zip(found["short", name], found["long", name], strict=True)
        return statistics.median((long.cpu_us - short.cpu_us) / (LONG - SHORT) for short, long in pairs)

    def wall(kind: str, name: str) -> float:
        return statistics.median(cost.wall_ms for cost in found[kind, name])

    rows = [
        ("CPU of a plain answer, 1 KB prompt", cpu("plain", "direct"), cpu("plain", "weir"), "µs"),
        (f"CPU of a stream of {SHORT} events", cpu("short", "direct"), cpu("short", "weir"), "µs"),
        (f"CPU of a stream of {LONG} events", cpu("long", "direct"), cpu("long", "weir"), "µs"),
        ("CPU of one event more", per_event("direct"), per_event("weir"), "µs"),
        (f"time of a plain answer, {PLAIN_AT_ONCE} at once", wall("plain", "direct"), wall("plain", "weir"), "ms"),
    ]
    lines = [f"{'':40} {'worker, direct':>16} {'weir, in front':>16} {'ratio':>7}"]
    lines += [f"{what:40} {a:13.1f} {unit} {b:13.1f} {unit} {b / a:7.2f}" for what, a, b, unit in rows]
    return "\n".join(lines)


async def main() -> None:
    started = time.monotonic()
    async with sites() as (direct, proxied):
        found = await rounds(direct, proxied)
    print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"medians of {ROUNDS} rounds, {time.monotonic() - started:.0f} s\n")
    print(table(found))
    print(
        "\nThe direct column is the simulated worker's own CPU time. Shared cores: compare ratios of one run, not runs."
    )


if __name__ == "__main__":
    asyncio.run(main())
