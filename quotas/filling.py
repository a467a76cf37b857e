"""Slots that the store does not know are filled from what is on record, each once at a time.

No token is lost or counted twice: what had ended when the record was looked at is in the record; what had not is left out of
it, and told by its own settlement. So what this sidecar still owed the slot before is dropped, and its running leases are
to be told to it anew.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, Protocol

from quotas.concurrency import OnceAtATime
from quotas.places import PlacedStore, Places
from quotas.running import Running, RunningLeases
from quotas.store import Account, Ask, Seed, StoreUnavailable, Unseeded, Verdict
from quotas.store_clock import TOLERANCE
from quotas.untold import Spent, Untold

FILL_SECONDS = 2.0
"""How long a request waits for its slot to be filled; the filling goes on."""

REFILL_SECONDS = 1.0
"""The pause between two tries to fill a slot."""


class OnRecord(Protocol):
    """Says what is on record about an account's slot, over its longest window."""

    async def __call__(self, account: Account, store_time: float, unsettled: Callable[[], Collection[str]]) -> Seed:
        """`store_time`: the store's clock now, in seconds. `unsettled` is to be asked right before each look at the record:
        leases whose use must be left out, for it is still to be told. StoreUnavailable: the record cannot be had."""


class Dry(StoreUnavailable):
    """The store does not know the slot, and what is on record cannot be had now. Nothing was booked."""


class Filling:
    """Asks `inner`, and fills what it does not know. Without a `refill` such a slot starts empty.

    `filled` is called after a slot was; StoreUnavailable there: it is to be filled again. `wake` is called with a slot of which
    there is something to tell.
    """

    def __init__(
        self,
        inner: PlacedStore,
        places: Places,
        running: RunningLeases,
        untold: Untold,
        refill: OnRecord | None,
        clock: Callable[[], float],
        timer: Callable[[], float],
        filled: Callable[[Account], Awaitable[None]],
        wake: Callable[[str], None],
    ) -> None:
        self.refill = refill
        self._inner = inner
        self._places = places
        self._running = running
        self._untold = untold
        self._clock = clock
        self._timer = timer
        self._after = filled
        self._wake = wake
        self._fills = OnceAtATime()
        self._dry: dict[str, float] = {}

    async def close(self) -> None:
        await self._fills.close()

    @property
    def dry(self) -> int:
        """How many slots could not be filled when that was tried last."""
        return sum(until > self._clock() for until in self._dry.values())

    def forget_dry(self) -> None:
        """Forgets those whose next try is due."""
        self._dry = {what: until for what, until in self._dry.items() if until > self._clock()}

    async def admit(self, account: Account, ask: Ask) -> Verdict:
        """Admits at the store; a slot that it does not know, or knows by a time that was wrong, is filled first. Raises Dry
        where that cannot be had."""
        if self._places.of(account.slot).is_void(account.slot):
            await self.fill(account)
        for _ in range(2):
            asked = self._timer()
            try:
                verdict = await self._inner.admit(account, ask)
            except Unseeded:
                await self.fill(account)
            else:
                self._places.hear(self._places.of(account.slot), verdict.now, asked)
                return verdict
        raise StoreUnavailable("the quota store lost what it was just told")

    async def fill(self, account: Account) -> None:
        """Raises Dry where the slot cannot be filled at the moment."""
        if not await self.once(account.slot, lambda: self._filled(account)):
            raise Dry(
                f"the quota store does not know what {account.slot} used, and the ledger cannot say it now;"
                " try again shortly"
            )

    async def once(self, what: str, work: Callable[[], Coroutine[Any, Any, bool]]) -> bool:
        """Has work that needs the record done, once at a time. False: it cannot be done now, and is not tried for a while."""
        if self._clock() < self._dry.get(what, 0.0):
            return False
        try:
            done = await self._fills.do(what, work, FILL_SECONDS)
        except TimeoutError:
            done = False
        if done:
            self._dry.pop(what, None)
        else:
            self._dry[what] = self._clock() + REFILL_SECONDS
        return done

    async def _filled(self, account: Account) -> bool:
        try:
            await self._drop_void(account)
            await self._seed(account)
            await self._after(account)
        except StoreUnavailable:
            self._wake(account.slot)
            return False
        return True

    async def _drop_void(self, account: Account) -> None:
        """Has books that were kept by another time forgotten."""
        place = self._places.of(account.slot)
        if place.new_time is None or not place.is_void(account.slot):
            return
        view = await self._inner.peek(account)
        now = self._clock() + place.ahead
        if view.seeded and not place.new_time - TOLERANCE <= view.since <= now + TOLERANCE:
            await self._inner.forget(account.slot)
        place.renewed.add(account.slot)

    async def _seed(self, account: Account) -> None:
        slot = account.slot
        unsettled: dict[str, Running] = {}
        ended: list[Spent] = []

        def look() -> Collection[str]:
            nonlocal unsettled, ended
            unsettled = self._running.unsettled(slot)
            ended = self._untold.spent_of(slot)
            return unsettled.keys()

        if self.refill is None:
            seed, _ = Seed(), look()
            ended = []  # nothing is on record
        else:
            seed = await self.refill(account, await self._inner.ping(self._inner.place_of(slot)), look)
        if await self._inner.seed(slot, seed):
            self._take_over(slot, unsettled, ended)

    def _take_over(self, slot: str, unsettled: dict[str, Running], ended: list[Spent]) -> None:
        """The slot was filled from here: what had ended is in it, what had not is unknown to it."""
        for spent in ended:
            self._untold.told(spent)
        for spent in self._untold.spent_of(slot):
            spent.since_filled = True
        for lease, known in unsettled.items():
            owed = self._untold.take_settlement(slot, lease)
            consumed = owed.consumed + known.base if owed is not None else 0
            known.leave()
            if owed is not None:
                self._untold.spend(known.account, self._clock(), consumed, primary=known.primary)
        self._wake(slot)
