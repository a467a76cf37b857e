"""A slot's usage over its longest window: the ledger's records, and those of this process that are on their way there.

`quotas/guarded.py` asks when the store says that it knows nothing of a slot. Every exchange is counted once, wherever it
is at that moment: a record that the journal still has is left out of what the ledger is asked for, and an exchange whose
lease is still to be settled is left out of both, since its settlement will charge it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncEngine

from meter.callers.tables import reading
from meter.ledger.database import DatabaseUnavailable
from meter.ledger.journal import Journal
from meter.ledger.record import UsageRecord
from meter.refill.reach import Reach
from meter.refill.sums import MOST_LEFT_OUT, Look, Slot, Sum, of_ledger, of_records
from meter.telemetry import log
from quotas.store import Account, Past, Scope, ScopeKind, Seed, StoreUnavailable

READ_SECONDS = 5.0
"""How long the ledger may take over one slot."""

AT_ONCE = 2
"""So many slots are looked up in the ledger at once: it has other work, and few connections."""

RECENT_MS = 60_000
"""A slot that was used so shortly before was lost, not forgotten for being idle. What other processes finished last may
not be in the ledger yet, so after a while the look is taken again."""

_Owner = tuple[ScopeKind, str]


class Refill:
    """Says what is on record about a slot. `accounts` gives a slot's accounts as they are known here; `clock` is UTC.

    `others_ship_within`: seconds after which what other processes finished is in the ledger; 0 where there are none.
    `adopted` is set once what ended processes left in the journal has been taken over: nothing is said before.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        journal: Journal,
        accounts: Callable[[str], Iterable[Account]],
        *,
        clock: Callable[[], datetime],
        adopted: asyncio.Event,
        others_ship_within: float = 0.0,
    ) -> None:
        self._engine = engine
        self._accounts = accounts
        self._clock = clock
        self._adopted = adopted
        self._others_ship_within = others_ship_within
        self._failing = False
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._backlog = _Backlog(journal)

    async def __call__(self, account: Account, store_time: float, unsettled: Callable[[], Collection[str]]) -> Seed:
        """The past of the account's slot. `store_time`: the store's clock at this moment, in seconds.

        `unsettled` is asked before each look: the leases that are still to be settled, and so not to be counted. Raises
        StoreUnavailable where the ledger does not answer.
        """
        slot = _slot(account)
        if slot is None:
            return Seed(account.scopes)
        ahead = store_time - self._clock().timestamp()
        scopes = {(scope.kind, scope.name): scope for scope in _scopes(account, self._accounts(account.slot))}
        reach = Reach.of(scope.policy for scope in scopes.values())
        if not reach.far:
            return Seed(account.scopes)
        await self._adopted.wait()
        look = Look(slot, reach, self._clock(), ahead)
        sums = await self._look(look, scopes, unsettled)
        if self._others_ship_within and any(each.at >= look.store_ms - RECENT_MS for each in sums):
            await asyncio.sleep(self._others_ship_within)
            look = Look(slot, reach, self._clock(), ahead)
            sums = await self._look(look, scopes, unsettled)
        return _seed(account, slot, scopes, sums)

    async def _look(
        self, look: Look, scopes: Collection[_Owner], unsettled: Callable[[], Collection[str]]
    ) -> list[Sum]:
        left_out = {exchange for lease in unsettled() if (exchange := _exchange(lease)) is not None}
        waiting, running = await self._backlog.read((look.now - timedelta(seconds=look.reach.far)).timestamp())

        def mine(record: UsageRecord) -> bool:
            return ("key", record.key_id) in scopes or look.slot.is_team_of(record)

        counted = [record for record in waiting if mine(record) and record.exchange_id not in left_out]
        sums = [*of_records(look, counted), *of_records(look, filter(mine, running), begun=True)]
        return sums + await self._booked(look, left_out | {record.exchange_id for record in counted})

    async def _booked(self, look: Look, left_out: Collection[UUID]) -> list[Sum]:
        if len(left_out) > MOST_LEFT_OUT:
            raise self._failed(f"{len(left_out)} records of one key or team still wait for the database")
        async with self._turns:
            try:
                async with reading(self._engine, READ_SECONDS) as connection:
                    sums = await of_ledger(connection, look, left_out)
            except DatabaseUnavailable as away:
                raise self._failed(str(away)) from away
        self._failing = False
        return sums

    def _failed(self, reason: str) -> StoreUnavailable:
        """Said in the log once, until it goes well again."""
        if not self._failing:
            self._failing = True
            log.warning("the quota store is empty, and the ledger cannot say what was used", reason=reason)
        return StoreUnavailable(f"The ledger cannot say what was used: {reason}")


class _Backlog:
    """What the journal has that the ledger may not. One look at a time; those who ask meanwhile share the next."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._turn = asyncio.Lock()
        self._next: _Scan | None = None

    async def read(self, since: float) -> tuple[list[UsageRecord], list[UsageRecord]]:
        """Records that are finished and ended after `since`, and those of exchanges that run, as they were now or later."""
        scan = self._next = self._next or _Scan(since)
        scan.since = min(scan.since, since)
        async with self._turn:
            if scan.found is None:
                self._next = None
                scan.found = await asyncio.to_thread(self._journal.waiting, scan.since), self._journal.running()
        return scan.found


class _Scan:
    def __init__(self, since: float) -> None:
        self.since = since
        self.found: tuple[list[UsageRecord], list[UsageRecord]] | None = None


# ---- from sums to a seed ---------------------------------------------------------------------------------------------


def _seed(account: Account, slot: Slot, scopes: dict[_Owner, Scope], sums: Iterable[Sum]) -> Seed:
    """The asking account's scopes, and of the others those that used anything."""
    tokens: Counter[tuple[int, _Owner, bool]] = Counter()
    opened: dict[_Owner, float] = {}
    for each in sums:
        for owner in _owners(slot, each):
            tokens[each.at, owner, each.primary] += each.tokens
            if each.burst is not None:
                opened[owner] = max(opened.get(owner, 0.0), each.burst / 1_000)
    past = tuple(
        Past(*owner, at=(at - 0.001) / 1_000, tokens=used, primary=primary)
        for (at, owner, primary), used in sorted(tokens.items())
        if used
    )
    owners = {(each.kind, each.name) for each in past} | opened.keys() | {_owner(scope) for scope in account.scopes}
    return Seed(tuple(scope for owner, scope in scopes.items() if owner in owners), past, opened)


def _owners(slot: Slot, each: Sum) -> Iterator[_Owner]:
    yield "key", each.key
    if each.in_team and slot.team is not None:
        yield "team", slot.team


def _owner(scope: Scope) -> _Owner:
    return scope.kind, scope.name


def _scopes(account: Account, others: Iterable[Account]) -> Iterator[Scope]:
    """The asking account's last, so that its policies stand."""
    for each in (*others, account):
        yield from each.scopes


def _slot(account: Account) -> Slot | None:
    """Whose usage the account's slot counts; None where that is in no record, as for limits that are only tried out."""
    match account.slot.partition(":"):
        case ("team", _, name):
            return Slot(team=name, key=None)
        case ("key", _, name):
            return Slot(team=None, key=name)
    return None


def _exchange(lease: str) -> UUID | None:
    try:
        return UUID(lease)
    except ValueError:
        return None
