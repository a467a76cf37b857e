"""What the store is told afterwards: settlements that it missed, leases that began here and still run, and what ended here.

An admission of unclear outcome is settled with 0. A lease is admitted by force, with what it used. What ended here is one
forced booking an account and route, of what its windows would still count; if another sidecar filled the slot meanwhile, it
knew all that had reached the ledger, so only what ended from a second before then is told.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from quotas.concurrency import together
from quotas.filling import Dry, Filling
from quotas.places import Place, PlacedStore, Places
from quotas.running import Running, RunningLeases
from quotas.store import Account, Ask, Progress, StoreUnavailable
from quotas.untold import Owed, Spent, Untold
from quotas.windows import SECOND

SHIPPED_SECONDS = 1.0
"""What ended so long before another sidecar looked at the ledger was in it."""


class Telling:
    """`wake` is called with a slot of which there is something to tell."""

    def __init__(
        self,
        inner: PlacedStore,
        places: Places,
        filling: Filling,
        running: RunningLeases,
        untold: Untold,
        clock: Callable[[], float],
        wake: Callable[[str], None],
    ) -> None:
        self._inner = inner
        self._places = places
        self._filling = filling
        self._running = running
        self._untold = untold
        self._clock = clock
        self._wake = wake

    # ---- what there is to tell -----------------------------------------------------------------------------------------

    def owe(self, account: Account, lease: str, consumed: int) -> None:
        """A settlement that the store may have missed."""
        self._untold.owe(account, lease, consumed, self._clock())
        self._wake(account.slot)

    def ended(self, known: Running, consumed: int) -> None:
        """The lease ended, and the store does not know what it used."""
        self._untold.spend(known.account, self._clock(), consumed - known.base, primary=known.primary)
        self._wake(known.account.slot)

    def moved(self, known: Running, account: Account) -> None:
        """A running lease goes where its key went, with what it holds and what it used; where it was it is settled."""
        if known.at_inner:
            self.owe(known.account, known.lease, max(0, known.consumed - known.base))
            known.leave()
        known.account, known.local_base = account, None
        self._wake(account.slot)

    def slots(self) -> set[str]:
        """Those of which there is something to tell."""
        return self._untold.slots | {known.account.slot for known in self._running if not known.at_inner}

    # ---- telling it ----------------------------------------------------------------------------------------------------

    async def tell(self, place: Place, *, everything: bool, slot: str | None = None) -> bool:
        """Tells a server what it missed, or what it missed of a slot; `everything`: also looks after every lease that it may
        have lost or given up.

        False: there were slots that it could not be told of.
        """

        def here(account: Account) -> bool:
            return self._places.of(account.slot) is place if slot is None else account.slot == slot

        async with place.telling:  # what is told twice at once is charged twice
            return await self._tell(here, everything=everything)

    async def _tell(self, here: Callable[[Account], bool], *, everything: bool) -> bool:
        await together(self._settle_owed(owed) for owed in self._untold.settlements if here(owed.account))
        untold = (known for known in self._running if everything or known.beyond or not known.at_inner)
        told = await together(_unless_dry(self.carry(known)) for known in untold if here(known.account))
        spendings = [spent for spent in self._untold.spendings if here(spent.account)]
        told += await together(_unless_dry(self._book(spent)) for spent in spendings)
        return all(told)

    async def _settle_owed(self, owed: Owed) -> None:
        if self._clock() <= owed.until:
            await self._inner.settle(owed.account, owed.lease, owed.consumed)
        self._untold.settled(owed)

    async def progress(self, known: Running, consumed: int, extend_to: int | None = None) -> Progress:
        """Tells the store of a lease that it knows, in figures that count from the lease's admission."""
        base, asked = known.base, self._clock()
        told = await self._inner.progress(
            known.account, known.lease, max(0, consumed - base), None if extend_to is None else max(0, extend_to - base)
        )
        if not told.expired:
            known.told = max(known.told, asked)
        return replace(told, covered=told.covered + base if told.covered else 0)

    async def carry(self, known: Running) -> None:
        """Sees to it that the store knows a running lease, whether it began here, expired there or was lost there."""
        if known.at_inner:
            told = await self.progress(known, known.consumed, known.covered if known.beyond else None)
            known.beyond = known.beyond and told.covered < known.covered
            if not told.expired or not self._running.still(known):
                return
            consumed = known.consumed
            found = await self._inner.settle(known.account, known.lease, max(0, consumed - known.base))
            known.base = consumed if found else 0
        if self._running.still(known):  # else it ended this moment, and its settlement is under way
            await self._force(known)

    async def _force(self, known: Running) -> None:
        """Admits a lease that runs here whatever the limits say, with what it may still use and what it used."""
        known.at_inner = False
        hold, asked = max(0, known.covered - known.base), self._clock()
        try:
            ask = Ask(known.lease, hold, hold, hold, 0, primary=known.primary, forced=True)
            await self._filling.admit(known.account, ask)
        except StoreUnavailable as away:
            if not isinstance(away, Dry):
                self.owe(known.account, known.lease, 0)
            raise
        if not self._running.still(known):  # it ended meanwhile, and what it used is told otherwise
            self.owe(known.account, known.lease, 0)
            return
        known.at_inner, known.told = True, asked
        known.beyond = max(0, known.covered - known.base) > hold
        await self._inner.progress(known.account, known.lease, max(0, known.consumed - known.base))

    async def _book(self, spent: Spent) -> None:
        """Charges what ended here: a lease a route that is admitted by force and settled at once."""
        account, place = spent.account, self._places.of(spent.account.slot)
        self._untold.close(spent)
        view = await self._inner.peek(account)
        if not view.seeded or place.is_void(account.slot):
            await self._filling.fill(account)
            if not self._untold.still(spent):
                return
            view = await self._inner.peek(account)
        since = 0.0 if spent.since_filled else view.since - SHIPPED_SECONDS - place.ahead
        tokens = spent.tokens(round(self._clock() * SECOND), round(since * SECOND))
        for primary, name in spent.names.items():
            if tokens[primary]:
                await self._filling.admit(account, Ask(name, 0, 0, 0, 0, primary=primary, forced=True))
                await self._inner.settle(account, name, tokens[primary])
        self._untold.told(spent)


async def _unless_dry(telling: Coroutine[Any, Any, None]) -> bool:
    try:
        await telling
    except Dry:
        return False
    return True
