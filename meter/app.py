"""Composition: builds everything once, starts it in order, stops it in reverse. The only place that names the clock."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, Self
from urllib.parse import urlsplit

from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncEngine

from engine_adapter.http1 import Workers
from meter.admin.deps import AdminDeps
from meter.admin.health import health_app
from meter.admin.site import admin_app
from meter.callers.directory import Directory
from meter.callers.registry import Registry
from meter.config import Config, QuotaStoreTerms
from meter.gateway.exchange import Gateway
from meter.gateway.fleet import Fleet
from meter.gateway.server import TrafficSite
from meter.gateway.shadow import Shadows
from meter.gateway.tokenizers import ExactPrompts, tokenizers_of
from meter.ledger.database import migrate, open_engine
from meter.ledger.journal import Journal
from meter.ledger.refusals import FLUSH_SECONDS, RefusalCounts
from meter.ledger.shipper import Shipper
from meter.listener import Listener
from meter.refill.refill import Refill
from meter.refill.succession import REMEMBERED_SECONDS, Succession
from meter.telemetry import log
from meter.telemetry.metrics import Metrics
from quotas.filling import OnRecord
from quotas.guarded import GuardedStore
from quotas.memory import MemoryStore
from quotas.redis import RedisStore
from quotas.store import Account, Seed

Sites = Literal["all", "admin", "traffic"]

MB = 1024 * 1024
ADOPT_SECONDS = 10.0
"""How often a living process looks for the journals of dead ones."""
NOTE_SECONDS = 1.0
"""How much of a stream a crash may take from the books, at most."""
OTHERS_COMMIT_SECONDS = 0.3
"""How long after its batch is full a record of another process is in the database, when all is well."""
WATCH_SECONDS = 5.0
"""How often the quota store is looked at where no request does."""
SHIP_SECONDS = 10.0
"""How long a stop waits for the last records to reach the database; what did not stays in the journal."""


def now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the sites really listen (a configured 0 is a free port); None: not started."""

    traffic: int | None
    admin: int | None
    health: int | None


class Sidecar:
    """One process: the sites that were asked for, and what they stand on."""

    def __init__(self, config: Config, sites: Sites = "all") -> None:
        self._config = config
        self._sites = sites
        self._stack = AsyncExitStack()
        self._started = False
        self._gateway: Gateway | None = None
        self._traffic: TrafficSite | None = None
        self._journal: Journal
        self._shipper: Shipper
        self._refusals: RefusalCounts
        self._refill: Refill
        self._directory: Directory
        self._store: GuardedStore
        self._metrics = Metrics()
        self.ports = Ports(None, None, None)

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    # ---- starting, in order; each step leaves on the stack how it is undone ------------------------------------------

    async def _start(self) -> None:
        config, stack = self._config, self._stack
        engine = open_engine(config.ledger.url)
        stack.push_async_callback(engine.dispose)
        if urlsplit(config.ledger.url).scheme.startswith("sqlite"):
            await migrate(config.ledger.url)
        registry = Registry(engine, now)
        config.ledger.journal_dir.mkdir(parents=True, exist_ok=True)
        snapshot = config.ledger.journal_dir / "callers.snapshot"
        self._directory = Directory(engine, config, snapshot, now, on_edit=lambda was: self._store.was(was))
        await self._directory.start()
        stack.push_async_callback(self._directory.stop)
        refill = self._on_record if self._sites != "admin" else None
        self._store = quota_store(config.quota_store, self._store_changed, refill)
        stack.push_async_callback(self._store.close)
        health = await self._listen(health_app(self, self._metrics.registry), config.health.host, config.health.port)
        traffic = await self._start_traffic(engine) if self._sites != "admin" else None
        admin = await self._start_admin(engine, registry) if self._sites != "traffic" else None
        self.ports = Ports(traffic, admin, health)
        self._collect()
        self._started = True

    async def _start_traffic(self, engine: AsyncEngine) -> int:
        config, stack, ledger = self._config, self._stack, self._config.ledger
        self._journal = Journal(
            ledger.journal_dir,
            fsync_seconds=ledger.fsync_ms / 1000,
            max_bytes=int(ledger.journal_max_mb * MB),
            lately=config.quota_store.lease_seconds + REMEMBERED_SECONDS,
        )
        self._journal.start()
        stack.callback(self._journal.stop)
        succession = Succession(self._journal, self._store, self._directory)
        stack.push_async_callback(succession.leave)
        shared = not config.quota_store.url.startswith("memory:")
        self._refill = Refill(
            engine,
            self._journal,
            self._accounts,
            clock=now,
            adopted=succession.adopted,
            others_ship_within=ledger.batch_ms / 1000 + OTHERS_COMMIT_SECONDS if shared else 0.0,
        )
        self._shipper = Shipper(
            self._journal, engine, batch_rows=ledger.batch_rows, batch_seconds=ledger.batch_ms / 1000
        )
        self._shipper.start()
        stack.push_async_callback(self._shipper.stop, SHIP_SECONDS)
        self._refusals = RefusalCounts(engine, now)
        stack.push_async_callback(self._refusals.stop, SHIP_SECONDS)
        workers = Workers()
        stack.push_async_callback(workers.close)
        shadows = Shadows(self._store, self._directory, lambda: self._store.up)
        stack.push_async_callback(shadows.stop, SHIP_SECONDS)
        fleet = Fleet.of(config)
        gateway = self._gateway = Gateway(
            config=config,
            fleet=fleet,
            callers=self._directory,
            prices=lambda: self._directory.prices,
            store=self._store,
            journal=self._journal,
            workers=workers,
            metrics=self._metrics,
            refusals=self._refusals,
            shadows=shadows,
            exact=ExactPrompts(workers, tokenizers_of(fleet)),
            now=now,
        )
        stack.push_async_callback(gateway.settled, SHIP_SECONDS)
        self._repeat(succession.adopt, ADOPT_SECONDS)
        self._repeat(succession.leave, NOTE_SECONDS)
        self._repeat(self._store.watch, WATCH_SECONDS)
        self._repeat(gateway.note, NOTE_SECONDS)
        self._repeat(self._refusals.flush, FLUSH_SECONDS)
        self._repeat(gateway.renew, config.quota_store.lease_seconds / 3)
        traffic = self._traffic = TrafficSite(gateway)
        port = await traffic.start(config.listen)
        stack.push_async_callback(traffic.stop, config.listen.grace_seconds)
        return port

    async def _start_admin(self, engine: AsyncEngine, registry: Registry) -> int:
        deps = AdminDeps(
            config=self._config,
            registry=registry,
            engine=engine,
            directory=self._directory,
            store=self._store,
            metrics=self._metrics.registry,
            condition=self,
            state=self.state,
            clock=now,
        )
        return await self._listen(admin_app(deps), self._config.admin.host, self._config.admin.port)

    async def _listen(self, app: web.Application, host: str, port: int) -> int:
        of_app = web.AppRunner(app, handle_signals=False)
        runner = await Listener.beneath(of_app)
        self._stack.push_async_callback(of_app.cleanup)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, host, port).start()
        bound: int = runner.addresses[0][1]
        return bound

    def _repeat(self, work: Callable[[], Awaitable[None]], seconds: float) -> None:
        """Does `work` again and again until the stop; one failure does not end it."""

        async def again() -> None:
            while True:
                try:
                    await work()
                except Exception:
                    log.log.exception("a background task failed; it is tried again")
                await asyncio.sleep(seconds)

        task = asyncio.create_task(again())
        self._stack.push_async_callback(_ended, task)

    # ---- what was used, for a quota store that does not know it -------------------------------------------------------

    async def _on_record(self, account: Account, store_time: float, unsettled: Callable[[], Collection[str]]) -> Seed:
        return await self._refill(account, store_time, unsettled)

    def _accounts(self, slot: str) -> Iterator[Account]:
        """The accounts of a slot as they are known here."""
        kind, _, name = slot.partition(":")
        keys = self._directory.known.keys
        ids = [name] if kind == "key" else [key.id for key in keys.values() if key.team == name]
        for caller in map(self._directory.by_key, ids):
            if caller is not None and caller.account.slot == slot:
                yield caller.account

    # ---- what others may know ----------------------------------------------------------------------------------------

    def state(self) -> dict[str, object]:
        """Backends, store, journal, shipper in one line each."""
        lines: dict[str, object] = {"store": repr(self._store), "callers": repr(self._directory)}
        if self._gateway is not None:
            lines["backends"] = [repr(backend) for backend in self._gateway.fleet.backends.values()]
            lines["journal"] = repr(self._journal)
            lines["shipper"] = repr(self._shipper)
            lines["refusals"] = repr(self._refusals)
            lines["running"] = len(self._gateway.running)
        return lines

    def ready(self) -> tuple[bool, list[str], list[str]]:
        """(whether it takes requests, problems, warnings); with problems it may still serve: degraded."""
        hindrances = list(self._hindrances())
        return not hindrances, hindrances + list(self._problems()), list(self._warnings())

    def _hindrances(self) -> Iterator[str]:
        if not self._started:
            yield "starting"
        if self._traffic is not None and self._traffic.draining:
            yield "draining: new requests are refused"
        if not self._directory.loaded and self._directory.trouble:
            yield f"no key is known, and there is no snapshot from an earlier run: {self._directory.trouble}"

    def _problems(self) -> Iterator[str]:
        if (trouble := self._store.trouble) is not None:
            yield trouble
        if self._directory.stale_since is not None:
            yield f"keys and tiers are as they were last known: {self._directory.trouble}"
        if self._gateway is None:
            return
        if self._journal.full:
            yield f"the journal is full: on_journal_full is {self._config.ledger.on_journal_full}"
        if self._shipper.failing:
            yield f"usage records do not reach the database; {self._shipper.backlog_rows} wait in the journal"
        if self._refusals.failing:
            yield "refusal counts do not reach the database; they are kept and summed"
        moment = self._gateway.timer()
        for backend in self._gateway.fleet.backends.values():
            if not backend.fitness.fit(moment):
                yield f"backend {backend.name} does not answer"

    def _warnings(self) -> Iterator[str]:
        for model in self._gateway.fleet.models.values() if self._gateway else ():
            for target in (*model.primary, *model.overflow):
                if self._directory.prices.at(model.name, target.backend.name, now()) is None:
                    yield f"no price for {model.name}@{target.backend.name}: its records have no cost"

    async def look_again(self) -> None:
        """Keys or tiers were edited by this process: they are in force afterwards."""
        await self._directory.refresh()

    def drain(self) -> None:
        if self._traffic is not None:
            self._traffic.drain()

    async def drained(self) -> None:
        """Returns when no request runs any more, or when the grace has passed."""
        if self._traffic is not None:
            await self._traffic.drained(self._config.listen.grace_seconds)

    def _store_changed(self, up: bool) -> None:
        self._metrics.store_up.set(up)
        if up:
            log.warning("the quota store is back")
        else:
            log.warning("the quota store is away", reason=self._store.trouble)

    def _collect(self) -> None:
        """Figures that others keep, read when scraped."""
        metrics, gateway = self._metrics, self._gateway
        metrics.store_up.set(self._store.up)
        metrics.counter(
            "weir_unguarded", "Requests admitted unasked while the store was away.", lambda: self._store.unguarded
        )
        if gateway is None:
            return
        metrics.gauge("weir_journal_bytes", "Bytes in the journal.", lambda: self._journal.bytes)
        metrics.gauge(
            "weir_ledger_lag_seconds",
            "Age of the oldest record not yet in the database.",
            lambda: self._shipper.lag_seconds,
        )
        metrics.labelled_counter(
            "weir_ledger_rows", "Usage records by what became of them.", "result", self._shipper.results
        )
        metrics.counter(
            "weir_refusals_unrecorded",
            "Refusals that are in no row of the database, because too many rows waited for it.",
            lambda: self._refusals.lost,
        )
        metrics.labelled_gauge(
            "weir_backend_up",
            "1 while the backend is thought fit.",
            "backend",
            lambda: {b.name: float(b.fitness.fit(gateway.timer())) for b in gateway.fleet.backends.values()},
        )


def quota_store(
    terms: QuotaStoreTerms, changed: Callable[[bool], None], refill: OnRecord | None = None
) -> GuardedStore:
    """The configured store, guarded against its absence; `refill` says what was used where the store does not know."""
    inner: MemoryStore | RedisStore
    if terms.url.startswith("memory:"):
        inner = MemoryStore(time.time, lease_seconds=terms.lease_seconds)
    else:
        inner = RedisStore(terms.url, timeout=terms.timeout_ms / 1000, lease_seconds=terms.lease_seconds)
    return GuardedStore(
        inner,
        on_down=terms.on_down,
        local_share=terms.local_share,
        lease_seconds=terms.lease_seconds,
        clock=time.time,
        timer=time.monotonic,
        on_change=changed,
        refill=refill,
        sidecars=lambda: inner.sidecars,
    )


async def serve(config: Config, sites: Sites, started: Callable[[Sidecar], None] = lambda _: None) -> None:
    """Runs until SIGTERM or SIGINT; a second signal ends at once what the grace still allows."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with Sidecar(config, sites) as sidecar:
        log.info("started", **{name: port for name, port in dataclasses.asdict(sidecar.ports).items() if port})
        started(sidecar)
        await stop.wait()
        log.info("stopping", grace_seconds=config.listen.grace_seconds)
    log.info("stopped")


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
