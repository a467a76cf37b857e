"""A server that missed something is asked until it answers, told what it missed, and only then takes calls again.

A share is spent once: what was decided here in a slot goes on being decided here until the store was told all of it and was
seen again. Then there is another share, of what is left by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from quotas.alone import Alone
from quotas.concurrency import OnceAtATime, together
from quotas.filling import Dry, Filling
from quotas.places import Place, PlacedStore, Places
from quotas.running import RunningLeases
from quotas.store import Account, StoreUnavailable
from quotas.telling import Telling

PROBE_SECONDS = 0.5
"""The pause between two probes of a server that does not answer."""

CATCH_UP_SECONDS = 2.0
"""How long a request waits until the store was told what it does not know of its slot."""


class Mending:
    """One task a server, while there is something to do for it."""

    def __init__(
        self,
        inner: PlacedStore,
        places: Places,
        filling: Filling,
        telling: Telling,
        running: RunningLeases,
        alone: Alone,
    ) -> None:
        self._inner = inner
        self._places = places
        self._filling = filling
        self._telling = telling
        self._running = running
        self._alone = alone
        self._tasks: dict[Place, asyncio.Task[None]] = {}
        self._catching_up = OnceAtATime()

    def wake(self, slot: str) -> None:
        """There is something to do for the server of a slot."""
        self.see_to(self._places.of(slot))

    def see_to(self, place: Place) -> None:
        task = self._tasks.get(place)
        if task is None or task.done():
            self._tasks[place] = asyncio.create_task(self._mend(place))

    def failed(self, place: Place) -> None:
        """It did not answer a call."""
        self._places.failed(place)
        self.see_to(place)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._catching_up.close()

    # ---- a server ----------------------------------------------------------------------------------------------------

    async def _mend(self, place: Place) -> None:
        looked_after = False
        while self._places.serves(place):
            try:
                await self._places.ping(place)
                told = await self._telling.tell(place, everything=not (place.up and looked_after))
                looked_after = True
                self._filling.forget_dry()
                await self._look_at(slot for slot in self._alone.slots if self._places.of(slot) is place)
                self._places.found(place)
                if not self._owes(place):
                    return
            except StoreUnavailable:
                told = False
            if not told:
                await asyncio.sleep(PROBE_SECONDS)
        self._hand_over(place)

    def _owes(self, place: Place) -> bool:
        return any(self._places.of(slot) is place for slot in self._telling.slots())

    def _hand_over(self, place: Place) -> None:
        """Its slots lie on other servers now, which may not have heard all."""
        self._places.forget(place)
        del self._tasks[place]
        for slot in self._telling.slots() | {known.account.slot for known in self._running}:
            self.wake(slot)

    # ---- a slot ------------------------------------------------------------------------------------------------------

    async def catch_up(self, slot: str) -> bool:
        """Whether the store can be asked about a slot: it knows all that was spent there, after it was told the rest. All who
        ask meanwhile wait for the same, so that nothing is added."""
        try:
            return await self._catching_up.do(slot, lambda: self._caught_up(slot), CATCH_UP_SECONDS)
        except TimeoutError:
            return False

    async def _caught_up(self, slot: str) -> bool:
        place = self._places.of(slot)
        try:
            await self._telling.tell(place, everything=False, slot=slot)
            await self._look_at([slot])
        except StoreUnavailable:
            self.failed(place)
            return False
        return not self._alone.spends(slot)

    async def _look_at(self, slots: Iterable[str]) -> None:
        owing = self._owing()
        told = [slot for slot in slots if slot not in owing]
        seen = await together(self._sees(slot) for slot in told)
        owing = self._owing()
        fresh = {slot for slot, whole in zip(told, seen, strict=True) if whole and slot not in owing}
        for slot in fresh:
            await self._alone.forget(slot)
        for known in self._running:
            if known.account.slot in fresh:
                known.local_base = None

    def _owing(self) -> set[str]:
        """The slots of which the store does not know all that this sidecar spends."""
        return self._telling.slots() | {known.account.slot for known in self._running if known.beyond}

    async def _sees(self, slot: str) -> bool:
        """Whether the store could say what was used in a slot."""
        try:
            for account in self._alone.spenders(slot):
                await self._see(account)
        except Dry:
            return False
        return True

    async def _see(self, account: Account) -> None:
        view = await self._inner.peek(account)
        if not view.seeded or self._places.of(account.slot).is_void(account.slot):
            await self._filling.fill(account)
            view = await self._inner.peek(account)
        self._alone.saw(account, view.windows)
