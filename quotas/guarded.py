"""A quota store that answers while the one behind it is away, or does not know what was used.

**Away.** A call that the store does not answer is decided here, as `on_down` says:

* `deny`: nothing is admitted (StoreUnavailable), and a running stream ends at what its lease already covers.
* `allow`: everything is admitted, and counted in `unguarded`.
* `local`: this sidecar spends at most its share of what was left of each window when it last saw it (`alone.py`).

A store on several servers is lost server by server (`places.py`): only what lies on a lost one is decided here. When it
answers again it is told everything before it is asked anything (`mending.py`, `telling.py`).

**Empty.** A slot that the store does not know is filled from what is on record (`filling.py`). Where that cannot be had the
slot, and no other, is decided here as if the store were away.

**Moved.** A key that changes its team takes along what it used, and what runs (`following.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from quotas.alone import Alone
from quotas.concurrency import together
from quotas.filling import Dry, Filling, OnRecord
from quotas.following import Following
from quotas.homes import Homes
from quotas.mending import Mending
from quotas.places import Place, PlacedStore, Places
from quotas.running import Running, RunningLeases
from quotas.store import Account, Ask, Progress, Seed, StoreUnavailable, Verdict, View
from quotas.telling import Telling
from quotas.untold import Debt, Untold


class GuardedStore:
    """A quota store over `inner` that answers while `inner` does not, as `on_down` says; see the module.

    `local_share` is this sidecar's part of what was left, 0 to 1; "auto" is 1 / `sidecars()`. `clock` gives seconds; `timer`
    too, of a clock that nobody sets (without one, `clock`). `on_change` is told False when the store, or a part of it, is
    lost, True when all of it is back. Without a `refill` a slot that the store does not know starts empty. `settle` never
    raises: it is remembered.
    """

    def __init__(
        self,
        inner: PlacedStore,
        *,
        on_down: Literal["local", "deny", "allow"],
        local_share: float | Literal["auto"] = "auto",
        lease_seconds: float = 30.0,
        clock: Callable[[], float],
        timer: Callable[[], float] | None = None,
        on_change: Callable[[bool], None] = lambda up: None,
        sidecars: Callable[[], int] = lambda: 1,
        refill: OnRecord | None = None,
    ) -> None:
        self.unguarded = 0
        self._inner = inner
        self._on_down = on_down
        self._local_share = local_share
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._timer = timer or clock
        self._sidecars = sidecars
        self._running = RunningLeases()
        self._untold = Untold(lease_seconds)
        self._homes = Homes()
        self._alone = Alone(clock, lease_seconds, self._share)
        places = self._places = Places(inner, clock, self._timer, on_change)
        self._filling = Filling(
            inner, places, self._running, self._untold, refill, clock, self._timer, self._filled, self._wake
        )
        self._telling = Telling(inner, places, self._filling, self._running, self._untold, clock, self._wake)
        self._following = Following(inner, places, self._filling, self._telling, self._running, self._homes)
        self._mending = Mending(inner, places, self._filling, self._telling, self._running, self._alone)

    def __repr__(self) -> str:
        state = self.trouble or "up"
        return f"<GuardedStore {state}, {len(self._untold)} settlements owed, over {self._inner!r}>"

    @property
    def up(self) -> bool:
        """Whether all of the store counts as there."""
        return self._places.up

    @property
    def trouble(self) -> str | None:
        """Why requests are decided here, in plain words; None: they are not."""
        if (lost := self._places.trouble) is not None:
            return f"{lost}, on_down is {self._on_down}"
        if dry := self._filling.dry:
            return (
                f"the quota store does not know all that {dry} keys or teams used, and the ledger cannot say it now:"
                f" where it knows nothing, on_down is {self._on_down}"
            )
        return None

    # ---- the protocol ------------------------------------------------------------------------------------------------

    async def admit(self, account: Account, ask: Ask) -> Verdict:
        place = self._places.of(account.slot)
        if place.up and (not self._alone.spends(account.slot) or await self._mending.catch_up(account.slot)):
            if self._homes.changed(account):
                await self._following.bring_up(account)
            try:
                verdict = await self._asked(account, ask)
            except Dry:
                self._mending.see_to(place)
            except StoreUnavailable:
                self._telling.owe(account, ask.lease, 0)
                self._mending.failed(place)
                if self._on_down == "deny":
                    raise
            else:
                place.failures = 0
                self._alone.saw(account, verdict.windows)
                if not self._homes.changed(account):
                    self._homes.note(account)
                return self._opened(account, ask, verdict, at_inner=True)
        return await self._admit_here(account, ask)

    async def progress(self, account: Account, lease: str, consumed: int, extend_to: int | None = None) -> Progress:
        known = self._running.get(lease)
        place = self._places.of(account.slot)
        if known is None:
            return await self._progress_of_others(place, account, lease, consumed, extend_to)
        if place.up and known.account.slot != account.slot:
            await self._following.followed(known, account)
        if self._alone.spends(account.slot) and place.up:
            await self._mending.catch_up(account.slot)
        if place.up and known.at_inner and not self._alone.spends(account.slot):
            try:
                return await self._progress_there(place, known, account, consumed, extend_to)
            except StoreUnavailable as away:
                if not isinstance(away, Dry):
                    self._mending.failed(place)
        return await self._progress_here(known, consumed, extend_to)

    async def settle(self, account: Account, lease: str, consumed: int) -> bool:
        """True unless the store knew no such lease."""
        known = self._running.take(lease)
        if known is not None:
            await self._settle_here(known, account, consumed)
            if not known.at_inner:
                self._telling.ended(known, consumed)
                return True
        place = self._places.of(account.slot)
        if place.up:
            try:
                return await self._settle_there(place, account, lease, known, consumed)
            except StoreUnavailable:
                self._mending.failed(place)
        if known is not None and not known.at_inner:  # its slot was filled meanwhile, without it
            self._telling.ended(known, consumed)
        else:
            self._telling.owe(account, lease, max(0, consumed - (known.base if known else 0)))
        return True

    async def renew(self, leases: list[tuple[Account, str]]) -> None:
        """Never raises: a lease that could not be renewed is looked after when the store is back."""
        mine = [known for _, lease in leases if (known := self._running.get(lease)) is not None]
        await self._alone.renew([(known.account, known.lease) for known in mine if known.local_base is not None])
        by_place: dict[Place, list[tuple[Account, str]]] = {}
        for account, lease in leases:
            by_place.setdefault(self._places.of(account.slot), []).append((account, lease))
        await together(self._renew_there(place, those) for place, those in by_place.items() if place.up)

    async def peek(self, account: Account) -> View:
        """The store's figures; while it is away there are none to show."""
        if not self._places.of(account.slot).up:
            raise self._away()
        if self._homes.changed(account):
            await self._following.bring_up(account)
        view = await self._inner.peek(account)
        if not view.seeded and self._filling.refill is not None:
            with suppress(Dry):
                await self._filling.fill(account)
                view = await self._inner.peek(account)
        self._alone.saw(account, view.windows)
        return view

    async def seed(self, slot: str, seed: Seed) -> bool:
        return await self._inner.seed(slot, seed)

    async def recall(self, account: Account, seed: Seed, since: float) -> bool:
        return await self._inner.recall(account, seed, since)

    async def forget(self, slot: str) -> None:
        """What was used is looked up anew at the next question."""
        await self._inner.forget(slot)

    async def ping(self) -> float:
        return await self._inner.ping()

    async def watch(self) -> None:
        """To be called every few seconds, so that a sidecar with nothing to do is counted too, and notices when the store is
        lost or its clock is set. Never raises."""
        await together(self._watch(place) for place in self._places.all() if place.up)

    async def close(self) -> None:
        await self._mending.close()
        await self._filling.close()
        await self._inner.close()

    def was(self, account: Account) -> None:
        """What an account was before an edit, so that this sidecar sees that it changed, even if it never asked for it."""
        self._homes.recall(account)

    # ---- at the store ------------------------------------------------------------------------------------------------

    async def _asked(self, account: Account, ask: Ask) -> Verdict:
        under_way = max(ask.expected, ask.first_hold)
        self._alone.asking(account.slot, under_way)
        try:
            return await self._filling.admit(account, ask)
        finally:
            self._alone.asking(account.slot, -under_way)

    async def _progress_of_others(
        self, place: Place, account: Account, lease: str, consumed: int, extend_to: int | None
    ) -> Progress:
        """Of a lease that this process did not begin."""
        if not place.up:
            raise self._away()
        try:
            told = await self._inner.progress(account, lease, consumed, extend_to)
        except StoreUnavailable:
            self._mending.failed(place)
            raise
        place.failures = 0
        return told

    async def _progress_there(
        self, place: Place, known: Running, account: Account, consumed: int, extend_to: int | None
    ) -> Progress:
        """`account` carries the policies in force now."""
        known.account = account
        under_way = max(0, (extend_to or 0) - known.covered)
        self._alone.asking(account.slot, under_way)
        try:
            told = await self._telling.progress(known, consumed, extend_to)
            if told.expired and self._cannot_have_expired(known):  # the store lost it
                known.consumed = max(known.consumed, consumed)
                await self._telling.carry(known)
                told = await self._telling.progress(known, consumed, extend_to)
        finally:
            self._alone.asking(account.slot, -under_way)
        place.failures = 0
        self._alone.extended(account, max(0, told.covered - known.covered))
        known.consumed, known.covered = max(known.consumed, consumed), told.covered
        return told

    async def _settle_there(
        self, place: Place, account: Account, lease: str, known: Running | None, consumed: int
    ) -> bool:
        if known is not None:
            self._running.settling(known)
        try:
            found = await self._inner.settle(account, lease, max(0, consumed - (known.base if known else 0)))
        finally:
            if known is not None:
                self._running.settled(known)
        place.failures = 0
        if not found and known is not None and (not known.at_inner or self._cannot_have_expired(known)):
            self._telling.ended(known, consumed)  # the store lost it
            return True
        return found

    async def _renew_there(self, place: Place, leases: list[tuple[Account, str]]) -> None:
        asked, there = self._clock(), list[tuple[Account, str]]()
        for account, lease in leases:
            known = self._running.get(lease)
            if known is not None and known.account.slot != account.slot:
                self._telling.moved(known, account)
            if known is None or known.at_inner:
                there.append((account, lease))
        try:
            await self._inner.renew(there)
        except StoreUnavailable:
            self._mending.failed(place)
            return
        for _, lease in there:
            if (known := self._running.get(lease)) is not None and self._cannot_have_expired(known):
                known.told = max(known.told, asked)

    async def _watch(self, place: Place) -> None:
        try:
            await self._places.ping(place)
            place.failures = 0
        except StoreUnavailable:
            self._mending.failed(place)

    def _cannot_have_expired(self, known: Running) -> bool:
        return self._clock() - known.told < self._lease_seconds

    # ---- here --------------------------------------------------------------------------------------------------------

    async def _admit_here(self, account: Account, ask: Ask) -> Verdict:
        self._wake(account.slot)
        if self._on_down == "deny":
            raise self._away()
        verdict = await self._alone.admit(account, ask)
        if verdict.admitted and self._on_down == "allow":
            self.unguarded += 1
        return self._opened(account, ask, verdict, at_inner=False)

    async def _progress_here(self, known: Running, consumed: int, extend_to: int | None) -> Progress:
        known.consumed = max(known.consumed, consumed)
        if self._on_down == "deny":
            return Progress(expired=False, extended=False, covered=known.covered, left=0)
        if known.local_base is None:  # only what goes beyond the store's hold is spent from the share
            await self._alone.adopt(known.account, known.lease, primary=known.primary)
            known.local_base = known.covered
        base = known.local_base
        wanted = None if extend_to is None else max(0, extend_to - base)
        told = await self._alone.progress(known.account, known.lease, max(0, consumed - base), wanted)
        if base + told.covered > known.covered:
            known.covered, known.beyond = base + told.covered, True
        return replace(told, expired=False, covered=known.covered)

    async def _settle_here(self, known: Running, account: Account, consumed: int) -> None:
        if known.local_base is not None:
            await self._alone.settle(known.account, known.lease, max(0, consumed - known.local_base))
        if known.beyond:
            self._wake(account.slot)
        if known.account.slot != account.slot:
            self._telling.moved(known, account)

    def _opened(self, account: Account, ask: Ask, verdict: Verdict, *, at_inner: bool) -> Verdict:
        if verdict.admitted:
            known = Running(account, ask.lease, verdict.kind != "overflow", verdict.hold, at_inner, self._clock())
            known.local_base = None if at_inner else 0
            self._running.add(known)
        return verdict

    def _share(self) -> float | None:
        if self._on_down == "allow":
            return None
        return 1 / max(1, self._sidecars()) if self._local_share == "auto" else self._local_share

    def _away(self) -> StoreUnavailable:
        return StoreUnavailable(self.trouble or f"the quota store is away (on_down is {self._on_down})")

    # ---- and when it is back -----------------------------------------------------------------------------------------

    def _wake(self, slot: str) -> None:
        self._mending.wake(slot)

    async def _filled(self, account: Account) -> None:
        """The slot was filled: what runs there is told to it anew."""
        await together(self._telling.carry(known) for known in self._running.of(account.slot))
        self._homes.note(account)

    # ---- and when this process ends before ---------------------------------------------------------------------------

    def debts(self) -> list[Debt]:
        """What the store was not told yet."""
        return list(self._untold.debts(self._clock(), self._places.ahead))

    def take_on(self, debts: Iterable[Debt]) -> None:
        """Sees to it that the store is told what an ended process could not tell it any more."""
        for debt in debts:
            self._untold.take_on(debt, self._clock(), self._places.ahead(debt.account.slot))
            self._wake(debt.account.slot)
