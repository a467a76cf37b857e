"""What happens while the quota store is away.

A call that the store does not answer is decided here, as `on_down` says:

* `deny`: nothing is admitted (StoreUnavailable), and a running stream ends at what its lease already covers.
* `allow`: everything is admitted, and counted in `unguarded`.
* `local`: this sidecar spends at most its share of what was left of each window when it last saw it. An account it never
  saw is taken as unused.

After some failures in a row nothing is asked of the store until a probe gets through, so that a dead store does not cost
every request its deadline. When it answers again it is told everything before it is asked anything: settlements that it
missed (an admission of unclear outcome is settled with 0), leases that began here and still run (admitted by force, with
what they used), and what ended here (one forced booking an account and route, of what its windows would still count).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from math import ceil
from typing import Literal
from uuid import uuid4

from quotas import windows
from quotas.books import REMEMBER
from quotas.memory import MemoryStore
from quotas.policy import UNLIMITED, Limit, Policy
from quotas.store import Account, Ask, Progress, QuotaStore, Seed, StoreUnavailable, Unseeded, Verdict, View, Window
from quotas.windows import SECOND

FAILURES = 3
"""So many in a row, and the store counts as away."""

PROBE_SECONDS = 0.5
"""The pause between two probes of a store that does not answer."""

TOGETHER = 64
"""So many calls are under way at once while the returned store is told what it missed."""

ACCOUNTS_SEEN = 10_000
"""Of so many accounts, those last heard of, the windows are remembered."""


_Owner = tuple[str, str]
"""Whose windows: an account, whatever its policies."""


@dataclass(slots=True)
class _Lease:
    """A running lease. All figures count from its admission; the store, or this sidecar's own books, may have learned of
    it later, and count from `base` or `local_base` on. `local_base` is None while the own books do not know it."""

    account: Account
    primary: bool
    covered: int
    at_inner: bool
    consumed: int = 0
    base: int = 0
    local_base: int | None = None


@dataclass(slots=True)
class _Spent:
    """What ended here while the store was away, in windows as long as the account's longest."""

    account: Account
    rate: windows.Window | None
    cap: windows.Window | None

    def add(self, now: int, tokens: int, *, primary: bool) -> None:
        for window in (self.rate if primary else None, self.cap):
            if window is not None:
                window.slide(now)
                window.add(now, tokens)

    def bookings(self, now: int) -> list[_Booking]:
        totals = []
        for window in (self.rate, self.cap):
            if window is not None:
                window.slide(now)
            totals.append(window.total if window is not None else 0)
        rate, cap = totals
        return [_Booking(self.account, True, rate), _Booking(self.account, False, cap - rate)]


@dataclass(slots=True)
class _Booking:
    """Tokens to be charged at the store: on the primary, or in the cap alone."""

    account: Account
    primary: bool
    tokens: int
    lease: str = field(default_factory=lambda: f"away-{uuid4()}")


class GuardedStore:
    """A quota store over `inner` that answers while `inner` does not, as `on_down` says; see the module.

    `local_share` is this sidecar's part of what was left, 0 to 1; "auto" is 1 / `sidecars()`. `clock` gives seconds.
    `on_change` is told False when the store is lost, True when it is back. `settle` never raises: it is remembered.
    `refill` says what is on record of an account whose slot the store does not know; without it, such a slot starts empty.
    """

    def __init__(
        self,
        inner: QuotaStore,
        *,
        on_down: Literal["local", "deny", "allow"],
        local_share: float | Literal["auto"] = "auto",
        lease_seconds: float = 30.0,
        clock: Callable[[], float],
        on_change: Callable[[bool], None] = lambda up: None,
        sidecars: Callable[[], int] = lambda: 1,
        refill: Callable[[Account], Awaitable[Seed]] | None = None,
    ) -> None:
        self.up = True
        self.unguarded = 0
        self._inner = inner
        self._on_down = on_down
        self._local_share = local_share
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._on_change = on_change
        self._sidecars = sidecars
        self._refill = refill
        self._failures = 0
        self._mender: asyncio.Task[None] | None = None
        self._leases: dict[str, _Lease] = {}
        self._owed: dict[str, tuple[Account, int, float]] = {}  # lease -> account, tokens in all, worth telling until
        self._spent: dict[Account, _Spent] = {}
        self._bookings: list[_Booking] = []
        self._seen: dict[_Owner, tuple[float, tuple[Window, ...]]] = {}
        self._local = MemoryStore(clock, lease_seconds)
        self._seeded: set[_Owner] = set()

    def __repr__(self) -> str:
        state = "up" if self.up else f"away, on_down={self._on_down}"
        return f"<GuardedStore {state}, {len(self._owed)} settlements owed, over {self._inner!r}>"

    # ---- the protocol ------------------------------------------------------------------------------------------------

    async def admit(self, account: Account, ask: Ask) -> Verdict:
        if self.up:
            try:
                verdict = await self._ask(account, ask)
            except StoreUnavailable:
                self._owe(account, ask.lease, 0)
                self._failed()
                if self._on_down == "deny":
                    raise
            else:
                self._failures = 0
                self._saw(account, verdict.windows)
                return self._opened(account, ask, verdict, at_inner=True)
        return await self._admit_here(account, ask)

    async def progress(self, account: Account, lease: str, consumed: int, extend_to: int | None = None) -> Progress:
        known = self._leases.get(lease)
        base = known.base if known else 0
        if self.up and (known is None or known.at_inner):
            try:
                told = await self._inner.progress(account, lease, max(0, consumed - base), _less(extend_to, base))
            except StoreUnavailable:
                self._failed()
                if known is None:
                    raise
            else:
                self._failures = 0
                return self._progressed(known, told, consumed, base)
        if known is None:
            raise self._away()
        return await self._progress_here(account, lease, known, consumed, extend_to)

    async def settle(self, account: Account, lease: str, consumed: int) -> bool:
        known = self._leases.pop(lease, None)
        if known is not None and known.local_base is not None:
            await self._local.settle(self._stand_in(account), lease, max(0, consumed - known.local_base))
        if known is not None and not known.at_inner:
            self._tally(known, consumed)
            return True
        figure = max(0, consumed - (known.base if known else 0))
        if self.up:
            try:
                found = await self._inner.settle(account, lease, figure)
            except StoreUnavailable:
                self._failed()
            else:
                self._failures = 0
                return found
        self._owe(account, lease, figure)
        return True

    async def renew(self, leases: list[tuple[Account, str]]) -> None:
        """Never raises: a lease that could not be renewed is looked after when the store is back."""
        here = [(self._stand_in(account), lease) for account, lease in leases if self._is_local(lease)]
        await self._local.renew(here)
        if self.up:
            try:
                await self._inner.renew([(account, lease) for account, lease in leases if self._is_at_inner(lease)])
            except StoreUnavailable:
                self._failed()

    async def peek(self, account: Account) -> View:
        """The store's figures; while it is away there are none to show."""
        if not self.up:
            raise self._away()
        view = await self._inner.peek(account)
        self._saw(account, view.windows)
        return view

    async def seed(self, slot: str, seed: Seed) -> bool:
        return await self._inner.seed(slot, seed)

    async def forget(self, slot: str) -> None:
        await self._inner.forget(slot)

    async def ping(self) -> float:
        return await self._inner.ping()

    async def close(self) -> None:
        if self._mender is not None:
            self._mender.cancel()
            await asyncio.gather(self._mender, return_exceptions=True)
        await self._inner.close()

    async def _ask(self, account: Account, ask: Ask) -> Verdict:
        """Admits at the store; a slot that it does not know is seeded first."""
        try:
            return await self._inner.admit(account, ask)
        except Unseeded:
            await self._inner.seed(account.slot, await self._refill(account) if self._refill else Seed())
        try:
            return await self._inner.admit(account, ask)
        except Unseeded as lost:
            raise StoreUnavailable("the quota store lost what it was just told") from lost

    # ---- while it is away --------------------------------------------------------------------------------------------

    async def _admit_here(self, account: Account, ask: Ask) -> Verdict:
        self._ensure_mender()
        if self._on_down == "deny":
            raise self._away()
        verdict = await self._local.admit(self._seeded_stand_in(account), ask)
        if verdict.admitted and self._on_down == "allow":
            self.unguarded += 1
        return self._opened(account, ask, verdict, at_inner=False)

    async def _progress_here(
        self, account: Account, lease: str, known: _Lease, consumed: int, extend_to: int | None
    ) -> Progress:
        known.consumed = max(known.consumed, consumed)
        if self._on_down == "deny":
            return Progress(expired=False, extended=False, covered=known.covered, left=0)
        stand_in = self._seeded_stand_in(account)
        if known.local_base is None:
            known.local_base = await self._adopt(stand_in, lease, known)
        base = known.local_base
        told = await self._local.progress(stand_in, lease, max(0, consumed - base), _less(extend_to, base))
        known.covered = max(known.covered, base + told.covered)
        return replace(told, expired=False, covered=known.covered)

    async def _adopt(self, stand_in: Account, lease: str, known: _Lease) -> int:
        """Opens an empty lease in the own books: only what goes beyond the store's hold is spent from the share."""
        await self._local.admit(stand_in, Ask(lease, 0, 0, 0, 0, primary=known.primary, forced=True))
        return known.covered

    def _opened(self, account: Account, ask: Ask, verdict: Verdict, *, at_inner: bool) -> Verdict:
        if verdict.admitted and ask.lease not in self._leases:
            local_base = None if at_inner else 0
            primary = verdict.kind != "overflow"
            self._leases[ask.lease] = _Lease(account, primary, verdict.hold, at_inner, local_base=local_base)
        return verdict

    def _progressed(self, known: _Lease | None, told: Progress, consumed: int, base: int) -> Progress:
        covered = told.covered + base if told.covered else 0
        if known is not None:
            known.consumed, known.covered = max(known.consumed, consumed), covered
        return replace(told, covered=covered)

    def _stand_in(self, account: Account) -> Account:
        """The account with the limits that hold here while the store is away."""
        if self._on_down == "allow":
            return replace(account, scopes=tuple(replace(scope, policy=UNLIMITED) for scope in account.scopes))
        share = self._share()
        scopes = (replace(scope, policy=_share_of(scope.policy, share)) for scope in account.scopes)
        return replace(account, scopes=tuple(scopes))

    def _seeded_stand_in(self, account: Account) -> Account:
        stand_in = self._stand_in(account)
        owner = _owner(account)
        if owner not in self._seeded:
            self._seeded.add(owner)
            moment, shown = self._seen.get(owner, (0.0, ()))
            age = self._clock() - moment
            lasting = (w for w in shown if w.name == "burst" or max(w.reset_seconds, self._lease_seconds) > age)
            self._local.resume(stand_in, (_scaled(window, self._share()) for window in lasting))
        return stand_in

    def _share(self) -> float:
        return 1 / max(1, self._sidecars()) if self._local_share == "auto" else self._local_share

    def _saw(self, account: Account, shown: tuple[Window, ...]) -> None:
        owner = _owner(account)
        self._seen.pop(owner, None)  # so that the last heard of stands last
        self._seen[owner] = (self._clock(), shown)
        if len(self._seen) > ACCOUNTS_SEEN:
            del self._seen[next(iter(self._seen))]

    def _tally(self, known: _Lease, consumed: int) -> None:
        spent = self._spent.get(known.account)
        if spent is None:
            spent = self._spent[known.account] = _Spent(
                known.account,
                _longest(scope.policy.rate for scope in known.account.scopes),
                _longest(scope.policy.cap for scope in known.account.scopes),
            )
        spent.add(round(self._clock() * SECOND), consumed, primary=known.primary)

    def _owe(self, account: Account, lease: str, consumed: int) -> None:
        self._owed[lease] = (account, consumed, self._clock() + self._lease_seconds + REMEMBER / SECOND)

    def _is_local(self, lease: str) -> bool:
        known = self._leases.get(lease)
        return known is not None and known.local_base is not None

    def _is_at_inner(self, lease: str) -> bool:
        known = self._leases.get(lease)
        return known is None or known.at_inner

    def _away(self) -> StoreUnavailable:
        return StoreUnavailable(f"the quota store is away (on_down is {self._on_down}); it is tried every half second")

    # ---- and when it is back -----------------------------------------------------------------------------------------

    def _failed(self) -> None:
        self._failures += 1
        if self.up and self._failures >= FAILURES:
            self.up = False
            self._on_change(False)
        self._ensure_mender()

    def _ensure_mender(self) -> None:
        if self._mender is None or self._mender.done():
            self._mender = asyncio.create_task(self._mend())

    async def _mend(self) -> None:
        """Probes until the store answers, tells it what it missed, and then lets the calls through again."""
        while True:
            try:
                await self._inner.ping()
                await self._tell()
                self._failures = 0
                self._came_back()
                while self._untold():
                    await self._tell()
                return self._forget_outage()
            except StoreUnavailable:
                await asyncio.sleep(PROBE_SECONDS)

    def _came_back(self) -> None:
        if not self.up:
            self.up = True
            self._on_change(True)

    def _forget_outage(self) -> None:
        self._local = MemoryStore(self._clock, self._lease_seconds)
        self._seeded.clear()
        for known in self._leases.values():
            known.local_base = None

    def _untold(self) -> bool:
        begun_here = any(not known.at_inner for known in self._leases.values())
        return begun_here or bool(self._owed or self._spent or self._bookings)

    async def _tell(self) -> None:
        """Tells the store what it missed; after an outage also looks after every lease that it may have given up."""
        self._collect_spent()
        await _together(self._settle_owed(lease) for lease in list(self._owed))
        leases = [lease for lease, known in self._leases.items() if not (self.up and known.at_inner)]
        await _together(self._carry(lease) for lease in leases)
        await _together(self._book(booking) for booking in list(self._bookings))

    def _collect_spent(self) -> None:
        now = round(self._clock() * SECOND)
        for spent in self._spent.values():
            self._bookings += [booking for booking in spent.bookings(now) if booking.tokens > 0]
        self._spent.clear()

    async def _settle_owed(self, lease: str) -> None:
        account, consumed, until = self._owed[lease]
        if self._clock() <= until:
            await self._inner.settle(account, lease, consumed)
        if self._owed.get(lease) == (account, consumed, until):
            del self._owed[lease]

    async def _carry(self, lease: str) -> None:
        """Sees to it that the store knows a running lease, whether it began here or expired there meanwhile."""
        known = self._leases.get(lease)
        if known is None:
            return
        if not known.at_inner:
            await self._force(lease, known)
            return
        told = await self._inner.progress(known.account, lease, max(0, known.consumed - known.base))
        if not told.expired or self._leases.get(lease) is not known:
            return
        consumed = known.consumed
        await self._inner.settle(known.account, lease, max(0, consumed - known.base))
        if self._leases.get(lease) is known:  # else it ended this moment, and its settlement is owed
            known.base = consumed
            await self._force(lease, known)

    async def _force(self, lease: str, known: _Lease) -> None:
        """Admits a lease that runs here whatever the limits say, with what it may still use and what it used."""
        known.at_inner = True  # from here on its end is told to the store
        hold = max(0, known.covered - known.base)
        try:
            ask = Ask(lease, hold, hold, hold, 0, primary=known.primary, forced=True)
            await self._ask(known.account, ask)
            await self._inner.progress(known.account, lease, max(0, known.consumed - known.base))
        except StoreUnavailable:
            known.at_inner = False
            ended = self._owed.pop(lease, None) if lease not in self._leases else None
            if ended is not None:
                self._tally(known, ended[1])
                self._owe(known.account, lease, 0)
            raise

    async def _book(self, booking: _Booking) -> None:
        """Charges what ended here: a lease that is admitted by force and settled at once."""
        ask = Ask(booking.lease, 0, 0, 0, 0, primary=booking.primary, forced=True)
        await self._ask(booking.account, ask)
        await self._inner.settle(booking.account, booking.lease, booking.tokens)
        self._bookings.remove(booking)


def _owner(account: Account) -> _Owner:
    return account.slot, account.scopes[0].name


async def _together(calls: Iterable[Awaitable[None]]) -> None:
    """Runs them all, some at a time; raises the first trouble after its companions have ended."""
    waiting = iter(calls)
    while batch := list(islice(waiting, TOGETHER)):
        for outcome in await asyncio.gather(*batch, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome


def _less(figure: int | None, base: int) -> int | None:
    return None if figure is None else max(0, figure - base)


def _longest(limits: Iterable[Limit | None]) -> windows.Window | None:
    longest = max((limit for limit in limits if limit is not None), key=lambda limit: limit.seconds, default=None)
    return None if longest is None else windows.Window(longest.seconds * SECOND, longest.slot * SECOND)


def _share_of(policy: Policy, share: float) -> Policy:
    """A sidecar's share of every limit; of a burst at least the rate's, of a parallel limit at least one."""

    def part(limit: Limit | None) -> Limit | None:
        return None if limit is None else Limit(int(limit.tokens * share), limit.seconds)

    burst, parallel = part(policy.burst), policy.max_parallel
    return Policy(
        rate=part(policy.rate),
        burst=burst if burst is not None and burst.tokens else None,
        cap=part(policy.cap),
        max_parallel=max(1, int(parallel * share)) if parallel else parallel,
    )


def _scaled(window: Window, share: float) -> Window:
    limit = int(window.limit * share)
    used = min(limit, ceil((window.used + window.held) * share))
    return replace(window, limit=limit, used=used, held=0, remaining=int(window.remaining * share))
