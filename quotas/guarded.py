"""What happens while the quota store is away, or does not know what was used.

**Away.** A call that the store does not answer is decided here, as `on_down` says:

* `deny`: nothing is admitted (StoreUnavailable), and a running stream ends at what its lease already covers.
* `allow`: everything is admitted, and counted in `unguarded`.
* `local`: this sidecar spends at most its share of what was left of each window when it last saw it (`alone.py`).

After some failures in a row nothing is asked of the store until a probe gets through, so that a dead store does not cost
every request its deadline. A store whose clock was set counts as away too, until its new time has stood for a minute
(`store_clock.py`). When it answers again it is told everything before it is asked anything: settlements that it missed (an
admission of unclear outcome is settled with 0), leases that began here and still run (admitted by force, with what they
used), and what ended here (one forced booking an account and route, of what its windows would still count).

**Empty.** A slot that the store does not know is filled from what is on record (`OnRecord`), once at a time. Where that cannot
be had the slot, and no other, is decided here as if the store were away. No token is lost or counted twice: what had ended
when the record was looked at is in the record; what had not is left out of it, and told by its own settlement. So what this
sidecar still owed the slot before is dropped, and its running leases are admitted there by force with all they used. If
another sidecar filled the slot, it knew all that had reached the ledger: only what ended here from a second before then is
told.

**Moved.** Where a key changes its team, or windows get longer, the books that are asked now do not have all that counts in
them: what is missing of what is on record is charged there, each at its moment, once for all sidecars. Running leases go
along: each sidecar takes its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from quotas.alone import Alone
from quotas.concurrency import OnceAtATime, together
from quotas.homes import Homes, left_for
from quotas.moves import missing
from quotas.store import (
    Account,
    Ask,
    Progress,
    QuotaStore,
    Scope,
    Seed,
    StoreUnavailable,
    Unseeded,
    Verdict,
    View,
)
from quotas.store_clock import TOLERANCE, StoreClock
from quotas.untold import Debt, Owed, Spent, Untold
from quotas.windows import SECOND

FAILURES = 3
"""So many in a row, and the store counts as away."""

PROBE_SECONDS = 0.5
"""The pause between two probes of a store that does not answer."""

FILL_SECONDS = 2.0
"""How long a request waits for its slot to be filled; the filling goes on."""

REFILL_SECONDS = 1.0
"""The pause between two tries to fill a slot."""

SHIPPED_SECONDS = 1.0
"""What ended so long before another sidecar looked at the ledger was in it."""


class OnRecord(Protocol):
    """Says what is on record about an account's slot, over its longest window."""

    async def __call__(self, account: Account, store_time: float, unsettled: Callable[[], Collection[str]]) -> Seed:
        """`store_time`: the store's clock now, in seconds. `unsettled` is to be asked right before each look at the record:
        leases whose use must be left out, for it is still to be told. StoreUnavailable: the record cannot be had."""


class _Dry(StoreUnavailable):
    """The store does not know the slot, and what is on record cannot be had now. Nothing was booked."""


@dataclass(slots=True, eq=False)
class _Lease:
    """A running lease. All figures count from its admission; the store, or this sidecar's own books, may have learned of
    it later, and count from `base` or `local_base` on. `local_base` is None while the own books do not know it. `told`:
    when, by our clock, the store was last asked about it and knew it."""

    account: Account
    primary: bool
    covered: int
    at_inner: bool
    told: float
    consumed: int = 0
    base: int = 0
    local_base: int | None = None


class GuardedStore:
    """A quota store over `inner` that answers while `inner` does not, as `on_down` says; see the module.

    `local_share` is this sidecar's part of what was left, 0 to 1; "auto" is 1 / `sidecars()`. `clock` gives seconds; `timer`
    too, of a clock that nobody sets (without one, `clock`). `on_change` is told False when the store is lost, True when it
    is back. Without a `refill` a slot that the store does not know starts empty. `settle` never raises: it is remembered.
    """

    def __init__(
        self,
        inner: QuotaStore,
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
        self.up = True
        self.unguarded = 0
        self._inner = inner
        self._on_down = on_down
        self._local_share = local_share
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._timer = timer or clock
        self._on_change = on_change
        self._sidecars = sidecars
        self._refill = refill
        self._failures = 0
        self._time = StoreClock()
        self._ahead = 0.0  # the store's clock before ours, as last heard
        self._telling = asyncio.Lock()
        self._mender: asyncio.Task[None] | None = None
        self._leases: dict[str, _Lease] = {}
        self._settling: dict[str, _Lease] = {}
        self._untold = Untold(lease_seconds)
        self._fills = OnceAtATime()
        self._dry: dict[str, float] = {}  # slots that could not be filled -> when that is tried again
        self._new_time: float | None = None  # books from before are void, but for those of these slots
        self._renewed: set[str] = set()
        self._homes = Homes()
        self._alone = Alone(clock, lease_seconds, self._share)

    def __repr__(self) -> str:
        state = self.trouble or "up"
        return f"<GuardedStore {state}, {len(self._untold)} settlements owed, over {self._inner!r}>"

    @property
    def trouble(self) -> str | None:
        """Why requests are decided here, in plain words; None: they are not."""
        if self._time.strange_since is not None:
            return (
                f"the quota store's clock was set by {self._time.step:+.0f} s: it counts as away until that has stood for"
                f" a minute, on_down is {self._on_down}"
            )
        if not self.up:
            return f"the quota store is away: it cannot be reached, on_down is {self._on_down}"
        if dry := sum(until > self._clock() for until in self._dry.values()):
            return (
                f"the quota store does not know all that {dry} keys or teams used, and the ledger cannot say it now:"
                f" where it knows nothing, on_down is {self._on_down}"
            )
        return None

    # ---- the protocol ------------------------------------------------------------------------------------------------

    async def admit(self, account: Account, ask: Ask) -> Verdict:
        if self.up:
            if self._homes.changed(account):
                await self._bring_up(account)
            try:
                verdict = await self._asked(account, ask)
            except _Dry:
                self._ensure_mender()
            except StoreUnavailable:
                self._owe(account, ask.lease, 0)
                self._failed()
                if self._on_down == "deny":
                    raise
            else:
                self._failures = 0
                self._alone.saw(account, verdict.windows)
                if not self._homes.changed(account):
                    self._homes.note(account)
                return self._opened(account, ask, verdict, at_inner=True)
        return await self._admit_here(account, ask)

    async def progress(self, account: Account, lease: str, consumed: int, extend_to: int | None = None) -> Progress:
        known = self._leases.get(lease)
        if known is None and not self.up:
            raise self._away()
        if known is not None and known.account.slot != account.slot:
            account = await self._followed(account, lease, known)
        if self.up and (known is None or known.at_inner):
            try:
                return await self._progress_there(account, lease, known, consumed, extend_to)
            except StoreUnavailable as away:
                if not isinstance(away, _Dry):
                    self._failed()
                if known is None:
                    raise
        assert known is not None
        return await self._progress_here(account, lease, known, consumed, extend_to)

    async def settle(self, account: Account, lease: str, consumed: int) -> bool:
        """True unless the store knew no such lease."""
        known = self._leases.pop(lease, None)
        if known is not None and known.local_base is not None:
            await self._alone.settle(known.account, lease, max(0, consumed - known.local_base))
        if known is not None and known.account.slot != account.slot:
            self._follow(lease, known, account)
        if known is not None and not known.at_inner:
            self._tally(known, consumed)
            return True
        if self.up:
            try:
                return await self._settle_there(account, lease, known, consumed)
            except StoreUnavailable:
                self._failed()
        if known is not None and not known.at_inner:  # its slot was filled meanwhile, without it
            self._tally(known, consumed)
        else:
            self._owe(account, lease, max(0, consumed - (known.base if known else 0)))
        return True

    async def renew(self, leases: list[tuple[Account, str]]) -> None:
        """Never raises: a lease that could not be renewed is looked after when the store is back."""
        await self._alone.renew([(self._leases[lease].account, lease) for _, lease in leases if self._is_local(lease)])
        if self.up:
            asked = self._clock()
            for account, lease in leases:
                known = self._leases.get(lease)
                if known is not None and known.account.slot != account.slot:
                    self._follow(lease, known, account)
            there = [(account, lease) for account, lease in leases if self._is_at_inner(lease)]
            try:
                await self._inner.renew(there)
            except StoreUnavailable:
                self._failed()
            else:
                for _, lease in there:
                    if (known := self._leases.get(lease)) is not None and self._cannot_have_expired(known):
                        known.told = max(known.told, asked)

    async def peek(self, account: Account) -> View:
        """The store's figures; while it is away there are none to show."""
        if not self.up:
            raise self._away()
        if self._homes.changed(account):
            await self._bring_up(account)
        view = await self._inner.peek(account)
        if not view.seeded and self._refill is not None:
            with suppress(_Dry):
                await self._fill(account)
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
        if self.up:
            asked = self._timer()
            try:
                self._heard(await self._inner.ping(), asked)
                self._failures = 0
            except StoreUnavailable:
                self._failed()

    async def close(self) -> None:
        if self._mender is not None:
            self._mender.cancel()
            await asyncio.gather(self._mender, return_exceptions=True)
        await self._fills.close()
        await self._inner.close()

    # ---- asking the store --------------------------------------------------------------------------------------------

    async def _asked(self, account: Account, ask: Ask) -> Verdict:
        """Admits at the store; a slot that it does not know, or knows by a time that was wrong, is filled first."""
        if self._is_void(account.slot):
            await self._fill(account)
        for _ in range(2):
            asked = self._timer()
            try:
                verdict = await self._inner.admit(account, ask)
            except Unseeded:
                await self._fill(account)
            else:
                self._heard(verdict.now, asked)
                return verdict
        raise StoreUnavailable("the quota store lost what it was just told")

    async def _progress_there(
        self, account: Account, lease: str, known: _Lease | None, consumed: int, extend_to: int | None
    ) -> Progress:
        told = await self._tell_progress(account, lease, known, consumed, extend_to)
        if told.expired and known is not None and self._cannot_have_expired(known):  # the store lost it
            known.consumed = max(known.consumed, consumed)
            await self._carry(lease)
            told = await self._tell_progress(account, lease, known, consumed, extend_to)
        self._failures = 0
        if known is None:
            return told
        known.consumed, known.covered = max(known.consumed, consumed), told.covered
        return told

    async def _tell_progress(
        self, account: Account, lease: str, known: _Lease | None, consumed: int, extend_to: int | None = None
    ) -> Progress:
        base, asked = known.base if known else 0, self._clock()
        told = await self._inner.progress(account, lease, max(0, consumed - base), _less(extend_to, base))
        if known is not None and not told.expired:
            known.told = max(known.told, asked)
        return replace(told, covered=told.covered + base if told.covered else 0)

    async def _settle_there(self, account: Account, lease: str, known: _Lease | None, consumed: int) -> bool:
        if known is not None:
            self._settling[lease] = known
        try:
            found = await self._inner.settle(account, lease, max(0, consumed - (known.base if known else 0)))
        finally:
            self._settling.pop(lease, None)
        self._failures = 0
        if not found and known is not None and (not known.at_inner or self._cannot_have_expired(known)):
            self._tally(known, consumed)  # the store lost it
            return True
        return found

    def _cannot_have_expired(self, known: _Lease) -> bool:
        return self._clock() - known.told < self._lease_seconds

    def _heard(self, store_time: float, asked: float) -> None:
        """Raises StoreUnavailable when the store's clock was set."""
        self._ahead = store_time - self._clock()
        strange = self._time.strange_since is not None
        said = self._time.hear(store_time, asked, self._timer())
        if said == "astray":
            self._lose()
            raise StoreUnavailable(self.trouble)
        if strange:  # a new time was accepted, or the old one is back
            self._new_time = store_time
            self._renewed.clear()

    # ---- a slot that it does not know --------------------------------------------------------------------------------

    def _is_void(self, slot: str) -> bool:
        return self._new_time is not None and slot not in self._renewed

    async def _fill(self, account: Account) -> None:
        """Has the account's slot filled, once at a time. Raises _Dry where that cannot be had at the moment."""
        slot = account.slot
        if self._clock() >= self._dry.get(slot, 0.0):
            try:
                if await self._fills.do(slot, lambda: self._filled(account), FILL_SECONDS):
                    return
            except TimeoutError:
                self._dry[slot] = self._clock() + REFILL_SECONDS
        raise _Dry(
            f"the quota store does not know what {slot} used, and the ledger cannot say it now; try again shortly"
        )

    async def _filled(self, account: Account) -> bool:
        slot = account.slot
        try:
            await self._drop_void(account)
            await self._seed(account)
            leases = [lease for lease, known in self._leases.items() if known.account.slot == slot]
            await together(self._carry(lease) for lease in leases)
        except StoreUnavailable:
            self._dry[slot] = self._clock() + REFILL_SECONDS
            self._ensure_mender()
            return False
        self._dry.pop(slot, None)
        self._homes.note(account)
        await self._forget_alone(slot)
        return True

    async def _drop_void(self, account: Account) -> None:
        """Has books that were kept by another time forgotten."""
        if self._new_time is None or account.slot in self._renewed:
            return
        view = await self._inner.peek(account)
        now = self._clock() + self._ahead
        if view.seeded and not self._new_time - TOLERANCE <= view.since <= now + TOLERANCE:
            await self._inner.forget(account.slot)
        self._renewed.add(account.slot)

    async def _seed(self, account: Account) -> None:
        slot = account.slot
        unsettled: dict[str, _Lease] = {}
        ended: list[Spent] = []

        def look() -> Collection[str]:
            nonlocal unsettled, ended
            unsettled = self._unsettled(slot)
            ended = self._untold.spent_of(slot)
            return unsettled.keys()

        if self._refill is None:
            seed, _ = Seed(), look()
            ended = []  # nothing is on record
        else:
            seed = await self._refill(account, await self._inner.ping(), look)
        if await self._inner.seed(slot, seed):
            self._take_over(slot, unsettled, ended)

    def _unsettled(self, slot: str) -> dict[str, _Lease]:
        running = {**self._settling, **self._leases}
        return {lease: known for lease, known in running.items() if known.account.slot == slot}

    def _take_over(self, slot: str, unsettled: dict[str, _Lease], ended: list[Spent]) -> None:
        """The slot was filled from here: what had ended is in it, what had not is unknown to it."""
        for spent in ended:
            self._untold.told(spent)
        for spent in self._untold.spent_of(slot):
            spent.since_filled = True
        for lease, known in unsettled.items():
            owed = self._untold.take_settlement(slot, lease)
            consumed = owed.consumed + known.base if owed is not None else 0
            known.base, known.at_inner = 0, False
            if owed is not None:
                self._tally(known, consumed)

    # ---- a key that moved, a window that got longer ------------------------------------------------------------------

    def was(self, account: Account) -> None:
        """What an account was before an edit, so that this sidecar sees that it changed, even if it never asked for it."""
        self._homes.recall(account)

    async def _bring_up(self, account: Account) -> None:
        """Has what is on record charged where it is missing; where that cannot be had now, a later question tries again."""
        who = f"{account.slot} {account.scopes[0].name}"
        if self._clock() >= self._dry.get(who, 0.0):
            with suppress(TimeoutError):
                if await self._fills.do(who, lambda: self._brought_up(account), FILL_SECONDS):
                    return
            self._dry[who] = self._clock() + REFILL_SECONDS

    async def _brought_up(self, account: Account) -> bool:
        """Charges what the scopes used elsewhere, or before the reach of shorter windows. False: that cannot be known now."""
        changed = self._homes.changed(account)
        try:
            followed = self._follow_all(account)
            if followed:
                await self._tell(everything=False)
            await self._recall(account, changed, followed)
        except (StoreUnavailable, Unseeded):
            return False
        self._homes.note(account)
        return True

    async def _recall(self, account: Account, changed: list[Scope], followed: set[str]) -> None:
        """The windows are looked at before the record: what ends between the two counts twice, rather than not at all."""
        view = await self._inner.peek(account)
        if self._refill is None or not view.seeded:
            return
        now = await self._inner.ping()
        seed = await self._refill(account, now, lambda: followed | self._unsettled(account.slot).keys())
        for scope in changed:
            past = missing(scope, seed, now, view)
            if past:
                await self._inner.recall(Account(account.slot, (scope,)), replace(seed, past=past), view.now)

    async def _followed(self, account: Account, lease: str, known: _Lease) -> Account:
        """Where a running lease is to be told of, whose key moved meanwhile."""
        if not self.up:
            return known.account
        self._follow(lease, known, account)
        with suppress(StoreUnavailable):  # the call itself will see
            await self._carry(lease)
        return account

    def _follow_all(self, account: Account) -> set[str]:
        moved = {lease: known for lease, known in self._leases.items() if left_for(known.account, account)}
        for lease, known in moved.items():
            self._follow(lease, known, account)
        return set(moved)

    def _follow(self, lease: str, known: _Lease, account: Account) -> None:
        """A running lease goes where its key went, with what it holds and what it used; where it was it is settled."""
        if known.at_inner:
            self._owe(known.account, lease, max(0, known.consumed - known.base))
            known.base, known.at_inner = 0, False
        known.account, known.local_base = account, None
        self._ensure_mender()

    # ---- while it is away --------------------------------------------------------------------------------------------

    async def _admit_here(self, account: Account, ask: Ask) -> Verdict:
        self._ensure_mender()
        if self._on_down == "deny":
            raise self._away()
        verdict = await self._alone.admit(account, ask)
        if verdict.admitted and self._on_down == "allow":
            self.unguarded += 1
        return self._opened(account, ask, verdict, at_inner=False)

    async def _progress_here(
        self, account: Account, lease: str, known: _Lease, consumed: int, extend_to: int | None
    ) -> Progress:
        known.consumed = max(known.consumed, consumed)
        if self._on_down == "deny":
            return Progress(expired=False, extended=False, covered=known.covered, left=0)
        if known.local_base is None:  # only what goes beyond the store's hold is spent from the share
            await self._alone.adopt(account, lease, primary=known.primary)
            known.local_base = known.covered
        base = known.local_base
        told = await self._alone.progress(account, lease, max(0, consumed - base), _less(extend_to, base))
        known.covered = max(known.covered, base + told.covered)
        return replace(told, expired=False, covered=known.covered)

    def _opened(self, account: Account, ask: Ask, verdict: Verdict, *, at_inner: bool) -> Verdict:
        if verdict.admitted and ask.lease not in self._leases:
            primary, now = verdict.kind != "overflow", self._clock()
            local_base = None if at_inner else 0
            self._leases[ask.lease] = _Lease(account, primary, verdict.hold, at_inner, now, local_base=local_base)
        return verdict

    def _share(self) -> float | None:
        if self._on_down == "allow":
            return None
        return 1 / max(1, self._sidecars()) if self._local_share == "auto" else self._local_share

    def _tally(self, known: _Lease, consumed: int) -> None:
        """The lease ended, and the store does not know what it used."""
        self._untold.spend(known.account, self._clock(), consumed - known.base, primary=known.primary)
        self._ensure_mender()

    def _owe(self, account: Account, lease: str, consumed: int) -> None:
        self._untold.owe(account, lease, consumed, self._clock())
        self._ensure_mender()

    def _is_local(self, lease: str) -> bool:
        known = self._leases.get(lease)
        return known is not None and known.local_base is not None

    def _is_at_inner(self, lease: str) -> bool:
        known = self._leases.get(lease)
        return known is None or known.at_inner

    def _away(self) -> StoreUnavailable:
        return StoreUnavailable(self.trouble or f"the quota store is away (on_down is {self._on_down})")

    # ---- and when it is back -----------------------------------------------------------------------------------------

    def _failed(self) -> None:
        self._failures += 1
        if self._failures >= FAILURES:
            self._lose()
        self._ensure_mender()

    def _lose(self) -> None:
        if self.up:
            self.up = False
            self._on_change(False)
        self._ensure_mender()

    def _ensure_mender(self) -> None:
        if self._mender is None or self._mender.done():
            self._mender = asyncio.create_task(self._mend())

    async def _mend(self) -> None:
        """Probes until the store answers, tells it what it missed, and then lets the calls through again."""
        looked_after = False
        while True:
            try:
                asked = self._timer()
                self._heard(await self._inner.ping(), asked)
                told = await self._tell(everything=not (self.up and looked_after))
                looked_after = True
                if not self._has_untold():
                    await together(self._look_at(account) for account in self._alone.asked())
                self._came_back()
                if not self._has_untold():
                    return self._forget_outage()
            except StoreUnavailable:
                told = False
            if not told:
                await asyncio.sleep(PROBE_SECONDS)

    def _came_back(self) -> None:
        self._failures = 0
        if not self.up:
            self.up = True
            self._on_change(True)

    def _forget_outage(self) -> None:
        self._dry = {slot: until for slot, until in self._dry.items() if until > self._clock()}
        self._alone.forget_all()
        for known in self._leases.values():
            known.local_base = None

    async def _look_at(self, account: Account) -> None:
        """A share is spent once: if the store is lost again before it was asked again, it is a share of what is left now."""
        view = await self._inner.peek(account)
        if view.seeded:
            self._alone.saw(account, view.windows)

    async def _forget_alone(self, slot: str) -> None:
        await together(self._look_at(account) for account in self._alone.asked(slot))
        await self._alone.forget(slot)
        for known in self._leases.values():
            if known.account.slot == slot:
                known.local_base = None

    def _has_untold(self) -> bool:
        return bool(self._untold) or any(not known.at_inner for known in self._leases.values())

    async def _tell(self, *, everything: bool) -> bool:
        """Tells the store what it missed; `everything`: also looks after every lease that it may have lost or given up.

        False: there were slots that it could not be told of.
        """
        async with self._telling:  # what is told twice at once is charged twice
            return await self._tell_all(everything=everything)

    async def _tell_all(self, *, everything: bool) -> bool:
        await together(self._settle_owed(owed) for owed in self._untold.settlements)
        leases = [lease for lease, known in self._leases.items() if everything or not known.at_inner]
        told = await together(self._unless_dry(self._carry(lease)) for lease in leases)
        told += await together(self._unless_dry(self._book(spent)) for spent in self._untold.spendings)
        return all(told)

    async def _unless_dry(self, telling: Coroutine[Any, Any, None]) -> bool:
        try:
            await telling
        except _Dry:
            return False
        return True

    async def _settle_owed(self, owed: Owed) -> None:
        if self._clock() <= owed.until:
            await self._inner.settle(owed.account, owed.lease, owed.consumed)
        self._untold.settled(owed)

    async def _carry(self, lease: str) -> None:
        """Sees to it that the store knows a running lease, whether it began here, expired there or was lost there."""
        known = self._leases.get(lease)
        if known is None:
            return
        if known.at_inner:
            told = await self._tell_progress(known.account, lease, known, known.consumed)
            if not told.expired or self._leases.get(lease) is not known:
                return
            consumed = known.consumed
            expired = await self._inner.settle(known.account, lease, max(0, consumed - known.base))
            known.base = consumed if expired else 0
            if self._leases.get(lease) is not known:  # it ended this moment, and its settlement is under way
                return
        await self._force(lease, known)

    async def _force(self, lease: str, known: _Lease) -> None:
        """Admits a lease that runs here whatever the limits say, with what it may still use and what it used."""
        known.at_inner = False
        hold, asked = max(0, known.covered - known.base), self._clock()
        try:
            await self._asked(known.account, Ask(lease, hold, hold, hold, 0, primary=known.primary, forced=True))
        except StoreUnavailable as away:
            if not isinstance(away, _Dry):
                self._owe(known.account, lease, 0)
            raise
        if self._leases.get(lease) is not known:  # it ended meanwhile, and what it used is told otherwise
            self._owe(known.account, lease, 0)
            return
        known.at_inner, known.told = True, asked
        await self._inner.progress(known.account, lease, max(0, known.consumed - known.base))

    async def _book(self, spent: Spent) -> None:
        """Charges what ended here: a lease a route that is admitted by force and settled at once."""
        self._untold.close(spent)
        view = await self._inner.peek(spent.account)
        if not view.seeded or self._is_void(spent.account.slot):
            await self._fill(spent.account)
            if not self._untold.still(spent):
                return
            view = await self._inner.peek(spent.account)
        since = 0.0 if spent.since_filled else view.since - SHIPPED_SECONDS - self._ahead
        tokens = spent.tokens(round(self._clock() * SECOND), round(since * SECOND))
        for primary, name in spent.names.items():
            if tokens[primary]:
                ask = Ask(name, 0, 0, 0, 0, primary=primary, forced=True)
                await self._asked(spent.account, ask)
                await self._inner.settle(spent.account, name, tokens[primary])
        self._untold.told(spent)

    # ---- and when this process ends before ---------------------------------------------------------------------------

    def debts(self) -> list[Debt]:
        """What the store was not told yet."""
        return list(self._untold.debts(self._clock(), self._ahead))

    def take_on(self, debts: Iterable[Debt]) -> None:
        """Sees to it that the store is told what an ended process could not tell it any more."""
        for debt in debts:
            self._untold.take_on(debt, self._clock(), self._ahead)
            self._ensure_mender()


def _less(figure: int | None, base: int) -> int | None:
    return None if figure is None else max(0, figure - base)
