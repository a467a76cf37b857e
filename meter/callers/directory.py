"""The callers in memory, brought up to date behind the scenes: an edit anywhere is in force here within a second.

Nothing on a request's path waits for the database. While it is away the last known state goes on; a process that starts
then takes it from a file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncEngine

from meter.callers import snapshot
from meter.callers.book import Binder, Book, Entry, bind, price_book
from meter.callers.caller import Caller
from meter.callers.errors import Invalid
from meter.callers.registry import Registry
from meter.callers.stored import Known
from meter.callers.tables import ROWS_AT_ONCE, current_revision, everything, reading
from meter.config import Config
from meter.ledger.database import DatabaseUnavailable
from meter.ledger.pricing import PriceBook
from meter.telemetry import log
from quotas.store import Account

POLL_SECONDS = 0.25
AWAY_SECONDS = 1.0
"""The longest pause between two tries while the database is away."""
LOOK_SECONDS = 2.0
LOAD_SECONDS = 15.0
"""After these a look at the revision, or a reading of everything, is given up and tried again."""


class Directory:
    """A CallerBook over the database, with a snapshot file beneath it. `on_edit` is told each account that was edited, as it
    was before."""

    def __init__(
        self,
        engine: AsyncEngine,
        config: Config,
        snapshot: Path,
        clock: Callable[[], datetime],
        on_edit: Callable[[Account], None] = lambda was: None,
    ) -> None:
        self._engine = engine
        self._config = config
        self._snapshot = snapshot
        self._clock = clock
        self._on_edit = on_edit
        self._book = bind(Known())
        self._loaded = self._seeded = self._stopping = False
        self._nudged = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.stale_since: datetime | None = clock()
        """Since when the database has not been heard of; None: it answered the last time."""
        self.trouble: str | None = None
        """Why, and what to do, in a sentence."""

    def __repr__(self) -> str:
        stale = f", stale since {self.stale_since:%H:%M:%S}" if self.stale_since else ""
        return f"<Directory of {len(self._book.entries)} keys, revision {self._book.known.revision}{stale}>"

    def identify(self, credential: str, now: datetime) -> Caller:
        """The caller of `wk-<public id>-<secret>`; raises UnknownKey."""
        return self._book.identify(credential, now)

    def by_key(self, key_id: str) -> Caller | None:
        """The caller of a key's id, be it disabled or expired; None when it is gone."""
        entry = self._book.entries.get(key_id)
        return None if entry is None else entry.caller

    @property
    def known(self) -> Known:
        """What is in force here, as it was stored."""
        return self._book.known

    @property
    def prices(self) -> PriceBook:
        """The prices in force here; ask again after a while: an edit makes a new book."""
        return self._book.prices

    @property
    def loaded(self) -> bool:
        """Whether callers are known at all, from the database or from the snapshot."""
        return self._loaded

    def nudge(self) -> None:
        """Something was edited here: look at once."""
        self._nudged.set()

    async def start(self) -> None:
        """Seeds and loads from the database, else from the snapshot. Raises Invalid if the file does not fit the database."""
        try:
            await self.refresh()
        except DatabaseUnavailable as away:
            self.trouble = str(away)
            log.warning("the database cannot be used at the start", reason=str(away))
            await self._load_snapshot()
        self._task = asyncio.create_task(self._keep_fresh(), name="directory")

    async def stop(self) -> None:
        """Lets a look that is under way come to its end, for a moment; a cut one would leave its connection in disorder."""
        self._stopping = True
        self._nudged.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=LOOK_SECONDS)
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _keep_fresh(self) -> None:
        pause = POLL_SECONDS
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._nudged.wait(), pause)
            if self._stopping:
                return
            self._nudged.clear()
            try:
                await self.refresh()
                pause = POLL_SECONDS
            except Invalid as wrong:
                self._seeded = True
                log.warning("the configuration does not fit the database", reason=str(wrong))
            except Exception as error:  # whatever it is, callers stay known, and the next look may go well
                self._mark_stale(error)
                pause = min(AWAY_SECONDS, pause * 2)

    async def refresh(self) -> None:
        """Looks now; afterwards every edit that was committed before is in force here. Raises DatabaseUnavailable."""
        if not self._seeded:
            await Registry(self._engine, self._clock).seed(self._config)
            self._seeded = True
        async with reading(self._engine, LOOK_SECONDS) as connection:
            revision = await current_revision(connection)
        if revision != self._book.known.revision or not self._loaded:
            await self._load()
        self.stale_since = self.trouble = None

    async def _load(self) -> None:
        async with reading(self._engine, LOAD_SECONDS) as connection:
            known = await everything(connection)
        await self._take(known)
        try:
            await asyncio.to_thread(snapshot.write, self._snapshot, known)
        except OSError as error:
            log.warning("the snapshot of keys and tiers cannot be written", path=str(self._snapshot), reason=str(error))

    async def _load_snapshot(self) -> None:
        try:
            await self._take(await asyncio.to_thread(snapshot.read, self._snapshot))
            log.warning("keys and tiers are those of the snapshot", path=str(self._snapshot))
        except snapshot.SnapshotUnusable as error:
            log.warning("no caller is known until the database is back", reason=str(error))

    async def _take(self, known: Known) -> None:
        """Makes the new book beside the old one, a part at a time, so that requests get their turn; then changes over."""
        binder = Binder(known)
        entries: dict[str, Entry] = {}
        for position, key in enumerate(known.keys.values()):
            entry = entries[key.id] = binder.entry(key)
            before = self._book.entries.get(key.id)
            if before is not None and before.caller.account != entry.caller.account:
                self._on_edit(before.caller.account)
            if position % ROWS_AT_ONCE == 0:
                await asyncio.sleep(0)
        for whose, reason in binder.unfit:
            log.warning("stored terms cannot be used", whose=whose, reason=reason)
        self._book = Book(known, entries, price_book(known.prices))
        self._loaded = True

    def _mark_stale(self, error: Exception) -> None:
        if self.stale_since is None:
            self.stale_since = self._clock()
            log.warning("the database cannot be used; keys and tiers are as they were last", reason=str(error))
        self.trouble = str(error)
