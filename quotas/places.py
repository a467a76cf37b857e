"""The servers of a store, each lost and found as a whole: whether it answers, and what its clock says.

After some failures in a row nothing is asked of a server until a probe gets through, so that a dead one does not cost every
request its deadline. One whose clock was set counts as away too, until its new time has stood for a minute
(`store_clock.py`); books that were kept by the old time are void.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from quotas.store import QuotaStore, StoreUnavailable
from quotas.store_clock import StoreClock

FAILURES = 3
"""So many in a row, and a server counts as away."""


class PlacedStore(QuotaStore, Protocol):
    """A store on one server, or on several that are lost one by one."""

    def places(self) -> Collection[str]:
        """The names of its servers, as far as they are known."""

    def place_of(self, slot: str) -> str:
        """The name of the server that a slot lies on; it may change."""

    async def ping(self, place: str | None = None) -> float:
        """The time of a server, or of any after all were reached. StoreUnavailable, also for one that is none any more."""


@dataclass(slots=True, eq=False)
class Place:
    """One server. `ahead`: by how many seconds its clock is before ours, as last heard. `new_time`: when a time was accepted
    by which books from before are void, but for those of the slots that were `renewed`. `telling` is held while it is told
    what it missed."""

    name: str
    up: bool = True
    failures: int = 0
    ahead: float = 0.0
    clock: StoreClock = field(default_factory=StoreClock)
    new_time: float | None = None
    renewed: set[str] = field(default_factory=set)
    telling: asyncio.Lock = field(default_factory=asyncio.Lock)

    def is_void(self, slot: str) -> bool:
        return self.new_time is not None and slot not in self.renewed

    def hear(self, store_time: float, asked: float, answered: float) -> bool:
        """Whether its clock can be believed."""
        strange = self.clock.strange_since is not None
        if self.clock.hear(store_time, asked, answered) == "astray":
            return False
        if strange:  # a new time was accepted, or the old one is back
            self.new_time = store_time
            self.renewed.clear()
        return True


class Places:
    """The servers of `inner` that were asked so far. `clock` and `timer` as in GuardedStore; `on_change` is told False when
    the first of them is lost, True when all are there."""

    def __init__(
        self,
        inner: PlacedStore,
        clock: Callable[[], float],
        timer: Callable[[], float],
        on_change: Callable[[bool], None],
    ) -> None:
        self._inner = inner
        self._clock = clock
        self._timer = timer
        self._on_change = on_change
        self._known: dict[str, Place] = {}
        self._lost: dict[str, Place] = {}

    @property
    def up(self) -> bool:
        """Whether none of them is lost."""
        return not self._lost

    def of(self, slot: str) -> Place:
        return self._named(self._inner.place_of(slot))

    def all(self) -> list[Place]:
        return [self._named(name) for name in self._inner.places()]

    def serves(self, place: Place) -> bool:
        """False: nothing lies there any more."""
        return place.name in self._inner.places()

    def ahead(self, slot: str) -> float:
        return self.of(slot).ahead

    async def ping(self, place: Place) -> float:
        asked = self._timer()
        store_time = await self._inner.ping(place.name)
        self.hear(place, store_time, asked)
        return store_time

    def hear(self, place: Place, store_time: float, asked: float) -> None:
        """Raises StoreUnavailable when its clock was set. `asked`: when, by the timer."""
        place.ahead = store_time - self._clock()
        if not place.hear(store_time, asked, self._timer()):
            self.lose(place)
            raise StoreUnavailable(self.trouble)

    def failed(self, place: Place) -> None:
        place.failures += 1
        if place.failures >= FAILURES:
            self.lose(place)

    def lose(self, place: Place) -> None:
        was_up, place.up = self.up, False
        self._lost[place.name] = place
        if was_up:
            self._on_change(False)

    def found(self, place: Place) -> None:
        place.up, place.failures = True, 0
        if self._lost.pop(place.name, None) is not None and self.up:
            self._on_change(True)

    def forget(self, place: Place) -> None:
        """Nothing lies there any more."""
        self._known.pop(place.name, None)
        self.found(place)

    @property
    def trouble(self) -> str | None:
        """Why a server counts as away, in plain words."""
        for place in self._lost.values():
            if place.clock.strange_since is not None:
                return (
                    f"the quota store's clock was set by {place.clock.step:+.0f} s: it counts as away until that has stood"
                    " for a minute"
                )
        if not self._lost:
            return None
        if len(self._inner.places()) == 1:
            return "the quota store is away: it cannot be reached"
        return f"a part of the quota store is away: {', '.join(sorted(self._lost))} cannot be reached"

    def _named(self, name: str) -> Place:
        place = self._known.get(name)
        if place is None:
            place = self._known[name] = Place(name)
        return place
