"""A key that changes its team, and windows that get longer: the books that are asked now do not have all that counts in them.

What is missing of what is on record is charged there, each at its moment, once for all sidecars. Running leases go along:
each sidecar takes its own.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from quotas.filling import Filling
from quotas.homes import Homes, left_for
from quotas.moves import missing
from quotas.places import PlacedStore, Places
from quotas.running import Running, RunningLeases
from quotas.store import Account, Scope, StoreUnavailable, Unseeded
from quotas.telling import Telling


class Following:
    def __init__(
        self,
        inner: PlacedStore,
        places: Places,
        filling: Filling,
        telling: Telling,
        running: RunningLeases,
        homes: Homes,
    ) -> None:
        self._inner = inner
        self._places = places
        self._filling = filling
        self._telling = telling
        self._running = running
        self._homes = homes

    async def bring_up(self, account: Account) -> None:
        """Has what is on record charged where it is missing; where that cannot be had now, a later question tries again."""
        who = f"{account.slot} {account.scopes[0].name}"
        await self._filling.once(who, lambda: self._brought_up(account))

    async def _brought_up(self, account: Account) -> bool:
        """Charges what the scopes used elsewhere, or before the reach of shorter windows. False: that cannot be known now."""
        changed = self._homes.changed(account)
        try:
            followed = await self._follow_all(account)
            await self._recall(account, changed, followed)
        except (StoreUnavailable, Unseeded):
            return False
        self._homes.note(account)
        return True

    async def _follow_all(self, account: Account) -> set[str]:
        """The leases that went along."""
        moved = [known for known in self._running if left_for(known.account, account)]
        places = {self._places.of(slot) for known in moved for slot in (known.account.slot, account.slot)}
        for known in moved:
            self._telling.moved(known, account)
        for place in places:
            await self._telling.tell(place, everything=False)
        return {known.lease for known in moved}

    async def _recall(self, account: Account, changed: list[Scope], followed: set[str]) -> None:
        """The windows are looked at before the record: what ends between the two counts twice, rather than not at all."""
        view = await self._inner.peek(account)
        if self._filling.refill is None or not view.seeded:
            return
        now = await self._inner.ping(self._inner.place_of(account.slot))
        unsettled = self._running.unsettled
        seed = await self._filling.refill(account, now, lambda: followed | unsettled(account.slot).keys())
        for scope in changed:
            past = missing(scope, seed, now, view)
            if past:
                await self._inner.recall(Account(account.slot, (scope,)), replace(seed, past=past), view.now)

    async def followed(self, known: Running, account: Account) -> None:
        """Takes a running lease along whose key moved meanwhile."""
        self._telling.moved(known, account)
        with suppress(StoreUnavailable):  # the call itself will see
            await self._telling.carry(known)
