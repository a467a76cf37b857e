"""A server that missed something is asked until it answers, told what it missed, and only then takes calls again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from quotas.places import Place, Places
from quotas.running import RunningLeases
from quotas.store import StoreUnavailable
from quotas.telling import Telling

PROBE_SECONDS = 0.5
"""The pause between two probes of a server that does not answer."""


class Mending:
    """One task a server, while there is something to do. `refresh` is called when a server was told what it missed, before it
    takes calls again."""

    def __init__(
        self,
        places: Places,
        telling: Telling,
        running: RunningLeases,
        refresh: Callable[[Place], Awaitable[None]],
    ) -> None:
        self._places = places
        self._telling = telling
        self._running = running
        self._refresh = refresh
        self._tasks: dict[Place, asyncio.Task[None]] = {}

    def wake(self, slot: str) -> None:
        """There is something to do for the server of a slot."""
        self.see_to(self._places.of(slot))

    def see_to(self, place: Place) -> None:
        task = self._tasks.get(place)
        if task is None or task.done():
            self._tasks[place] = asyncio.create_task(self._mend(place))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _mend(self, place: Place) -> None:
        looked_after = False
        while self._places.serves(place):
            try:
                await self._places.ping(place)
                told = await self._telling.tell(place, everything=not (place.up and looked_after))
                looked_after = True
                await self._refresh(place)
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
