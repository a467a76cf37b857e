"""What is remembered of one scope, and how it changes: windows, debt, holds, leases. Pure: no I/O, no clock.

The same state lives in Redis, where `rule.lua` changes it in the same way. Moments and spans are microseconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from quotas import store
from quotas.policy import MAX_TOKENS, Limit, Policy
from quotas.store import Answer, Past, Scope, ScopeKind, Seed, Target, VerdictKind
from quotas.windows import NEVER, SECOND, Debt, Window

REMEMBER = 600 * SECOND
"""How long an expired lease may still be settled with what was really used."""

MARK = 3_600 * SECOND
"""How long a slot's mark outlives the longest window, untouched."""


# ---- what a policy means, in microseconds -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """A limit with the layout of its window."""

    tokens: int
    span: int
    slot: int


@dataclass(frozen=True, slots=True)
class Terms:
    """A policy as the rule uses it. `repay` is where a burst is paid back; `room` is how much debt is borne."""

    rate: Span | None
    repay: Span | None
    cap: Span | None
    burst: int
    room: int
    parallel: int | None

    @property
    def most(self) -> int | None:
        """The most tokens that empty windows let onto the primary at once; None: any number."""
        if self.rate is None:
            return None
        return self.repay.tokens if self.repay is not None else self.rate.tokens


@lru_cache(maxsize=4096)
def terms(policy: Policy) -> Terms:
    rate, burst = policy.rate, policy.burst
    return Terms(
        rate=_span(rate),
        repay=_repay(rate, burst, policy.repay_slot),
        cap=_span(policy.cap),
        burst=burst.seconds * SECOND if burst else 0,
        room=(burst or rate or Limit(0, 1)).tokens,
        parallel=policy.max_parallel,
    )


def target_terms(rate: Limit) -> Terms:
    """An overflow target's own rate: a rate and nothing else."""
    return terms(Policy(rate=rate, burst=None, cap=None, max_parallel=None))


def _span(limit: Limit | None) -> Span | None:
    return None if limit is None else Span(limit.tokens, limit.seconds * SECOND, limit.slot * SECOND)


def _repay(rate: Limit | None, burst: Limit | None, slot: int | None) -> Span | None:
    """The repay span, to the next whole microsecond: never shorter than the fraction it stands for."""
    if rate is None or burst is None or slot is None:
        return None
    exact = burst.tokens * rate.seconds * SECOND // rate.tokens
    return Span(burst.tokens, min(exact + 1, NEVER), min(slot * SECOND, NEVER))


def burst_at(terms: Terms, opened: int, now: int) -> int:
    """The moment from which a burst is open or may be opened, after one at `opened` (or none: -1); NEVER if none is granted."""
    if terms.repay is None:
        return NEVER
    return 0 if opened < 0 or opened <= now < opened + terms.burst else opened + terms.repay.span


# ---- what is remembered -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Meter:
    """One route's books: charges in the rate's and the repay span's windows, debt, holds, and the burst's opening."""

    held: int = 0
    opened: int = -1
    rate: Window | None = None
    repay: Window | None = None
    debt: Debt = field(default_factory=Debt)

    def tick(self, terms: Terms, now: int) -> None:
        """Lays the windows out as the policy in force wants them, and lets go of what slid out."""
        self.rate = _laid_out(self.rate, terms.rate, now)
        self.repay = _laid_out(self.repay, terms.repay, now)
        if terms.rate is not None:
            self.debt.change_pace(terms.rate.tokens, terms.rate.span, now)

    def charge(self, now: int, tokens: int) -> None:
        for window in (self.rate, self.repay):
            if window is not None:
                window.add(now, tokens)
        if self.rate is not None:
            self.debt.charge(now, tokens)

    def answer(self, terms: Terms, now: int, expected: int, held: int) -> Answer:
        if terms.rate is None or self.rate is None:
            return "base"
        more = held + expected
        if self.debt.owed(now) + more > terms.room:
            return "no"
        if terms.repay is not None and self.repay is not None and self.repay.total + more > terms.repay.tokens:
            return "no"
        if self.rate.total + more <= terms.rate.tokens:
            return "base"
        return "burst" if self.burst_at(terms, now) <= now else "no"

    def burst_at(self, terms: Terms, now: int) -> int:
        return burst_at(terms, self.opened, now)

    def is_open(self, terms: Terms, now: int) -> bool:
        """Whether a burst is open."""
        return 0 <= self.opened <= now < self.opened + terms.burst


@dataclass(slots=True)
class Lease:
    """One running request in one scope. `booked` is None while it runs; once expired, what its cap hold was booked with."""

    key: str
    kind: VerdictKind
    opened: int
    expires: int
    ceiling: int
    hold: int
    expected: int
    rate_hold: int
    cap_hold: int
    consumed: int = 0
    target: str | None = None
    booked: int | None = None


@dataclass(slots=True)
class State:
    """One scope's books. `seen` is the newest moment: time never runs back. `due` holds (moment, lease), at most one
    entry a lease and never later than the moment at which something is to be done with it."""

    seen: int = 0
    cap_held: int = 0
    running: int = 0
    cap: Window | None = None
    primary: Meter = field(default_factory=Meter)
    targets: dict[str, Meter] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    due: list[tuple[int, str]] = field(default_factory=list)
    recalled: int = -1
    """when it was last charged what it had used elsewhere"""

    def tick(self, terms: Terms, now: int) -> None:
        """Brings the books to `now`: windows slide, leases expire, the long expired are forgotten."""
        self.seen = now
        self.cap = _laid_out(self.cap, terms.cap, now)
        self.primary.tick(terms, now)
        while self.due and self.due[0][0] <= now:
            _, name = heapq.heappop(self.due)
            if name in self.leases:
                self._due(name, self.leases[name], now)

    def live(self, name: str) -> Lease | None:
        lease = self.leases.get(name)
        return lease if lease is not None and lease.booked is None else None

    def meter(self, lease: Lease) -> Meter | None:
        """The books of the lease's route; None for a target without a rate, and for any target in a team's scope."""
        return self.primary if lease.kind != "overflow" else self.targets.get(lease.target or "")

    def target(self, target: Target, now: int) -> Meter | None:
        """The books of a target's own rate, brought to `now`; None for one without."""
        if target.rate is None:
            return None
        meter = self.targets.setdefault(target.name, Meter())
        meter.tick(target_terms(target.rate), now)
        return meter

    def open(self, name: str, lease: Lease) -> None:
        self.leases[name] = lease
        self.running += 1
        self.cap_held += lease.cap_hold
        if (meter := self.meter(lease)) is not None:
            meter.held += lease.rate_hold
        heapq.heappush(self.due, (lease.expires, name))

    def charge(self, now: int, lease: Lease, consumed: int) -> None:
        """Charges what `consumed`, in all, adds to what was known, and lowers the holds by as much."""
        more = max(0, consumed - lease.consumed)
        lease.consumed += more
        if self.cap is not None:
            self.cap.add(now, more)
        if (meter := self.meter(lease)) is not None:
            meter.charge(now, more)
        self._release(lease, min(more, lease.rate_hold), min(more, lease.cap_hold))

    def close(self, name: str, now: int, consumed: int) -> bool:
        """The end of a lease, running or expired; an unknown one is passed over, and False."""
        lease = self.leases.pop(name, None)
        if lease is None:
            return False
        if lease.booked is not None:
            self._correct(now, lease, lease.booked, consumed)
            return True
        self.charge(now, lease, consumed)
        self._release(lease, lease.rate_hold, lease.cap_hold)
        self.running -= 1
        return True

    def resume(self, window: store.Window, now: int) -> None:
        """Charges what is gone of a window that another store showed; a burst that could not be had is taken as opened."""
        meter, gone = self.primary, window.limit - window.remaining
        if window.name == "hour" and self.cap is not None:
            self.cap.add(now, gone)
        elif window.name == "minute" and meter.rate is not None:
            meter.rate.add(now, gone)
            meter.debt.charge(now, gone)
        elif window.name == "burst" and meter.repay is not None:
            meter.repay.add(now, min(window.limit, window.used + window.held))
            if window.reset_seconds > 0:
                meter.opened = max(meter.opened, 0, now + round(window.reset_seconds * SECOND) - meter.repay.span)

    def recall(self, other: State, now: int) -> None:
        """Adds what other books of this scope, of the same layout, say was charged."""
        self.recalled = now
        mine, its = self.primary, other.primary
        for window, past in ((self.cap, other.cap), (mine.rate, its.rate), (mine.repay, its.repay)):
            if window is not None and past is not None:
                for index, tokens in past.slots.items():
                    window.add(index * past.slot, tokens)
        mine.debt.charge(now, its.debt.owed(now))
        mine.opened = max(mine.opened, its.opened)

    def keep_until(self, lease_span: int) -> int:
        """The moment from which nothing here can matter to any answer."""
        meters = (self.primary, *self.targets.values())
        kept = [self.cap, *(window for meter in meters for window in (meter.rate, meter.repay))]
        spans = [window.span + window.slot for window in kept if window is not None]
        debts = [meter.debt.paid_at(meter.debt.tokens) for meter in meters if meter.debt.pace]
        return max([self.seen + lease_span + max(REMEMBER, *spans, 0), *debts]) + SECOND

    def _due(self, name: str, lease: Lease, now: int) -> None:
        if lease.booked is not None:
            if lease.expires + REMEMBER < now:
                del self.leases[name]
            else:
                heapq.heappush(self.due, (lease.expires + REMEMBER + 1, name))
        elif lease.expires > now:
            heapq.heappush(self.due, (lease.expires, name))
        else:
            self._expire(name, lease)

    def _expire(self, name: str, lease: Lease) -> None:
        """A silent sidecar's lease ends: its cap hold becomes a charge at that moment, its rate hold is given back."""
        lease.booked = lease.cap_hold
        if self.cap is not None:
            self.cap.add(lease.expires, lease.booked)
        self._release(lease, lease.rate_hold, lease.cap_hold)
        self.running -= 1
        heapq.heappush(self.due, (lease.expires + REMEMBER + 1, name))

    def _correct(self, now: int, lease: Lease, booked: int, consumed: int) -> None:
        """What an expired lease was booked with becomes what was used, in its slot; the rate learns of it now."""
        more = max(0, consumed - lease.consumed)
        if self.cap is not None:
            self.cap.add(lease.expires, more - booked)
        if (meter := self.meter(lease)) is not None:
            meter.charge(now, more)

    def _release(self, lease: Lease, rate: int, cap: int) -> None:
        if (meter := self.meter(lease)) is not None:
            meter.held -= rate
        lease.rate_hold -= rate
        lease.cap_hold -= cap
        self.cap_held -= cap


def _laid_out(window: Window | None, span: Span | None, now: int) -> Window | None:
    """The window in the wanted layout, slid to now. One whose limit was taken away is still kept, for its return."""
    if window is None:
        return None if span is None else Window(span.span, span.slot, oldest=max(0, (now - span.span) // span.slot))
    if span is not None:
        window.resize(span.span, span.slot, now)
    window.slide(now)
    return window


# ---- what is on record ------------------------------------------------------------------------------------------------


def seeded(seed: Seed, now: int) -> Iterator[tuple[Scope, State]]:
    """The books of each scope as they would stand had its past been charged here."""
    charges: dict[tuple[ScopeKind, str], list[Past]] = {(scope.kind, scope.name): [] for scope in seed.scopes}
    for past in seed.past:
        charges.get((past.kind, past.name), []).append(past)
    for scope in seed.scopes:
        owner = (scope.kind, scope.name)
        state = _recalled(terms(scope.policy), charges[owner], now)
        if owner in seed.opened:
            state.primary.opened = min(now, round(seed.opened[owner] * SECOND))
        yield scope, state


def recalled(scope: Scope, seed: Seed, now: int) -> State:
    """The books of one scope, as `seeded` has them."""
    return next(state for _, state in seeded(replace(seed, scopes=(scope,)), now))


def _recalled(terms: Terms, charges: Iterable[Past], now: int) -> State:
    state = State()
    state.tick(terms, now)
    for past in charges:
        at = min(now, round(past.at * SECOND))
        if state.cap is not None and past.capped:
            state.cap.add(at, past.tokens)
        if past.primary:
            state.primary.charge(at, past.tokens)
    return state


def longest(terms: Terms) -> int:
    """The longest of a scope's windows; 0 if it has none."""
    return max((span.span for span in (terms.rate, terms.repay, terms.cap) if span is not None), default=0)


# ---- one scope of an account ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Book:
    """One scope of an account: who, what its policy says, and what is remembered of it."""

    scope: Scope
    state: State
    terms: Terms = field(init=False)

    def __post_init__(self) -> None:
        self.terms = terms(self.scope.policy)

    def cap_left(self, *, holds: bool = True) -> int:
        """What the cap still grants; below 0 when it was overrun or lowered. MAX_TOKENS when there is none."""
        if self.terms.cap is None or self.state.cap is None:
            return MAX_TOKENS
        return self.terms.cap.tokens - self.state.cap.total - (self.state.cap_held if holds else 0)

    def answer(self, now: int, expected: int, *, holds: bool = True) -> Answer:
        meter = self.state.primary
        return meter.answer(self.terms, now, expected, meter.held if holds else 0)

    def too_parallel(self) -> bool:
        return self.terms.parallel is not None and self.state.running >= self.terms.parallel
