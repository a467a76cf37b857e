"""An executable statement of the quota rule: it watches one scope of a store and says where the store broke the rule.

The monitor keeps the exact history (every charge with its moment, every hold) and no slots, so it is slow and
obviously right. Drive a store with any history; after each call tell the monitor what was asked and what the store
answered *for this scope* (one monitor for the key, one for its team). It raises `RuleBroken` when the store

* admitted what the exact sliding windows forbid (safety: never, not by one token), or
* refused what would have fitted even if every window were one slot longer (liveness: slots may only make a window
  up to one slot too long, never more).

It is the independent statement of what `quotas/decision.py` and the scripts in Redis do with slots and running sums.
Times are seconds, in order; amounts are tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field


class RuleBroken(AssertionError):
    """The store's answer contradicts the rule; the message says which part, and the numbers."""


@dataclass(frozen=True)
class Window:
    """At most `tokens` in any span of `seconds`; the store counts it in slots of `slot` seconds."""

    tokens: int
    seconds: float
    slot: float


@dataclass(frozen=True)
class Policy:
    """`rate` and `burst` meter the primary backend, `cap` meters every backend. None means unlimited, 0 blocks."""

    rate: Window | None = Window(2_000, 60, 1)
    burst: Window | None = Window(4_000, 5, 1)  # tokens of two minutes' rate, to be spent within `seconds`
    cap: Window | None = Window(50_000, 3_600, 10)
    max_parallel: int | None = None

    @property
    def repay(self) -> Window | None:
        """The span in which a burst is paid back: burst.tokens at the pace of the rate (4000 tokens = 120 s)."""
        if self.rate is None or self.burst is None or not self.rate.tokens:
            return None
        seconds = self.burst.tokens / self.rate.tokens * self.rate.seconds
        return Window(self.burst.tokens, seconds, max(self.burst.slot, math.ceil(seconds / 360)))


@dataclass
class _Charge:
    at: float
    tokens: int
    in_rate: bool  # what an expired lease is booked with counts in the cap alone
    in_cap: bool = True


@dataclass
class _Lease:
    rate_hold: int  # tokens still held against rate and burst (0 on an overflow backend)
    cap_hold: int  # tokens still held against the cap
    primary: bool
    expires: float
    consumed: int = 0
    booked: _Charge | None = None  # once expired: the rest of its cap hold, charged at the moment of expiry


@dataclass
class Monitor:
    """Tell it everything the store was asked and answered, in order of time."""

    policy: Policy
    lease_seconds: float = 30.0
    remember_seconds: float = 600.0  # how long an expired lease may still be corrected
    charges: list[_Charge] = field(default_factory=list)
    leases: dict[str, _Lease] = field(default_factory=dict)
    expired: dict[str, _Lease] = field(default_factory=dict)
    burst_opened: float | None = None

    # ---- what was asked, and what the store answered -------------------------------------------------------------

    def admitted(
        self, now: float, lease: str, verdict: str, expected: int, first_hold: int, asked: int | None = None
    ) -> None:
        """The store said yes, with `verdict` "base", "burst" or "overflow", and held `first_hold` against the cap.

        `asked` is the hold before it was lowered to what the cap leaves; lowering more than needed breaks the rule.
        """
        self._expire(now)
        if lease in self.leases:  # asked again after an unclear answer: one lease, one hold
            return
        if self.policy.max_parallel is not None and len(self.leases) >= self.policy.max_parallel:
            raise RuleBroken(f"{len(self.leases)} requests already run; max_parallel={self.policy.max_parallel}")
        if not self._cap_fits(now, first_hold, slack=False):
            raise RuleBroken(f"cap: used {self._cap_used(now)} + held {self._cap_held()} + {first_hold}")
        if asked is not None and first_hold < asked and self._cap_fits(now, first_hold + 1, slack=True):
            raise RuleBroken(f"lowered to {first_hold} of {asked}, but more fits even with a longer slot")
        if verdict == "base" and not self._base_fits(now, expected, slack=False):
            raise RuleBroken(f"base: {expected} more tokens do not fit at {now}")
        if verdict == "burst":
            self._check_burst(now, expected)
        primary = verdict in ("base", "burst")
        self.leases[lease] = _Lease(expected if primary else 0, first_hold, primary, now + self.lease_seconds)

    def overage(self, now: float, expected: int) -> None:
        """The store said: not on the primary (base and burst are both full)."""
        self._expire(now)
        if self._base_fits(now, expected, slack=True):
            raise RuleBroken(f"overage at {now}, but {expected} tokens fit into the base rate even with longer slots")
        if self._burst_fits(now, expected, slack=True):
            raise RuleBroken(f"overage at {now}, but {expected} tokens fit into a burst even with longer slots")

    def refused_by_cap(self, now: float, least: int) -> None:
        """The store said the hour is spent: not even `least` tokens fit (under `on_cap: refuse`: not the ceiling)."""
        self._expire(now)
        if self._cap_fits(now, least, slack=True):
            raise RuleBroken(f"refused by the cap at {now}, but {least} tokens fit even with a longer slot")

    def refused_by_parallel(self, now: float) -> None:
        """The store said too many requests run at once."""
        self._expire(now)
        if self.policy.max_parallel is None or len(self.leases) < self.policy.max_parallel:
            raise RuleBroken(f"refused as too parallel with {len(self.leases)} running")

    def progressed(self, now: float, lease: str, consumed: int, extend_to: int | None = None) -> None:
        """`consumed` tokens in all so far; the cap hold now covers `extend_to` in all. On an expired lease: no effect."""
        self._expire(now)
        state = self.leases.get(lease)
        if state is None:
            if extend_to is not None:
                raise RuleBroken(f"{lease} had ended, yet it was extended to {extend_to}")
            return
        self._charge(now, state, consumed)
        state.expires = now + self.lease_seconds
        if extend_to is not None:
            more = max(0, extend_to - state.consumed - state.cap_hold)
            if not self._cap_fits(now, more, slack=False):
                raise RuleBroken(f"cap: extending {lease} by {more} tokens does not fit at {now}")
            state.cap_hold += more

    def extension_refused(self, now: float, lease: str, extend_to: int) -> None:
        """The store would not raise the cap hold so that `extend_to` tokens in all are covered."""
        self._expire(now)
        state = self.leases.get(lease)
        if state is None:
            return
        more = max(0, extend_to - state.consumed - state.cap_hold)
        if self._cap_fits(now, more, slack=True):
            raise RuleBroken(f"extension of {lease} to {extend_to} refused at {now}, but it fits with a longer slot")

    def finished(self, now: float, lease: str, consumed: int) -> None:
        """Settled with `consumed` tokens in all. Final: the lease is gone, a second settlement changes nothing."""
        self._expire(now)
        state = self.leases.pop(lease, None)
        if state is not None:
            self._charge(now, state, consumed)
            return
        state = self.expired.pop(lease, None)
        if state is None or state.booked is None or now > state.expires + self.remember_seconds:
            return
        more = max(0, consumed - state.consumed)
        state.booked.tokens = more  # the booking becomes what was really used, at the same moment ...
        if state.primary and more:  # ... and the rate learns of it now
            self.charges.append(_Charge(now, more, in_rate=True, in_cap=False))

    def retry_after(
        self, now: float, expected: int, least: int, seconds: float, slot: float = 1.0, *, overflow: bool = False
    ) -> None:
        """A refusal named `seconds`: the request fits then if nobody says anything more, and not a `slot` sooner.

        `overflow`: it may go to a cheaper backend, so only the cap has to have room.
        """
        if not self._would_fit(now + seconds, expected, least, slack=False, overflow=overflow):
            raise RuleBroken(f"retry after {seconds} at {now}: {expected} tokens will not fit then")
        if seconds > slot and self._would_fit(now + seconds - slot, expected, least, slack=True, overflow=overflow):
            raise RuleBroken(f"retry after {seconds} at {now}: {expected} tokens fit {slot} s sooner")

    def counts(self, now: float) -> dict[str, int]:
        """Exact figures to compare with the store's `peek`, which may be higher by what one slot holds, never lower."""
        self._expire(now)
        return {
            "rate_used": self._rate_used(now, self.policy.rate),
            "cap_used": self._cap_used(now),
            "rate_held": self._rate_held(),
            "cap_held": self._cap_held(),
            "running": len(self.leases),
        }

    # ---- the rule ------------------------------------------------------------------------------------------------

    def _base_fits(self, now: float, tokens: int, *, slack: bool) -> bool:
        if self.policy.rate is None:
            return True
        return self._debt_fits(now, tokens, slack=slack) and all(
            self._rate_used(now, window, slack) + self._rate_held() + tokens <= window.tokens
            for window in (self.policy.rate, self.policy.repay)
            if window is not None
        )

    def _burst_fits(self, now: float, tokens: int, *, slack: bool) -> bool:
        repay = self.policy.repay
        if repay is None or not (self._burst_is_open(now, slack) or self._burst_may_open(now, slack)):
            return False
        fits = self._rate_used(now, repay, slack) + self._rate_held() + tokens <= repay.tokens
        return fits and self._debt_fits(now, tokens, slack=slack)

    def _check_burst(self, now: float, expected: int) -> None:
        if self._base_fits(now, expected, slack=True):
            raise RuleBroken(f"burst at {now}, but {expected} tokens fit into the base rate even with longer slots")
        if not self._burst_fits(now, expected, slack=False):
            raise RuleBroken(f"burst: {expected} more tokens do not fit at {now} (opened {self.burst_opened})")
        if not self._burst_is_open(now):
            self.burst_opened = now

    def _debt_fits(self, now: float, tokens: int, *, slack: bool) -> bool:
        """Debt is paid back at the pace of the rate; it only bites after answers outgrew what was expected of them."""
        rate = self.policy.rate
        if rate is None:
            return True
        pace, owed, then = rate.tokens / rate.seconds, 0.0, now
        for charge in sorted((c for c in self.charges if c.in_rate), key=lambda c: c.at):
            owed, then = max(0.0, owed - max(0.0, charge.at - then) * pace) + charge.tokens, charge.at
        owed = max(0.0, owed - (now - then) * pace)
        room = (self.policy.burst or rate).tokens - (pace * rate.slot if slack else 0)
        return owed + self._rate_held() + tokens <= room

    def _burst_is_open(self, now: float, slack: bool = False) -> bool:
        burst = self.policy.burst
        if burst is None or self.burst_opened is None:
            return False
        return now - self.burst_opened < burst.seconds - (burst.slot if slack else 0)

    def _burst_may_open(self, now: float, slack: bool) -> bool:
        repay = self.policy.repay
        if repay is None or self.burst_opened is None:
            return True
        return now - self.burst_opened >= repay.seconds + (repay.slot if slack else 0)

    def _cap_fits(self, now: float, tokens: int, *, slack: bool) -> bool:
        cap = self.policy.cap
        return cap is None or self._cap_used(now, slack) + self._cap_held() + tokens <= cap.tokens

    def _would_fit(self, then: float, expected: int, least: int, *, slack: bool, overflow: bool) -> bool:
        later = copy.deepcopy(self)
        later._expire(then)
        room = later.policy.max_parallel is None or len(later.leases) < later.policy.max_parallel
        base, burst = (fits(then, expected, slack=slack) for fits in (later._base_fits, later._burst_fits))
        fits = overflow or base or burst
        return room and fits and later._cap_fits(then, least, slack=slack)

    # ---- the books -----------------------------------------------------------------------------------------------

    def _rate_used(self, now: float, window: Window | None, slack: bool = False) -> int:
        return self._sum(now, window, slack, lambda charge: charge.in_rate)

    def _cap_used(self, now: float, slack: bool = False) -> int:
        return self._sum(now, self.policy.cap, slack, lambda charge: charge.in_cap)

    def _sum(self, now: float, window: Window | None, slack: bool, counts: Callable[[_Charge], bool]) -> int:
        if window is None:
            return 0
        since = now - window.seconds - (window.slot if slack else 0)
        return sum(charge.tokens for charge in self.charges if charge.at > since and counts(charge))

    def _rate_held(self) -> int:
        return sum(lease.rate_hold for lease in self.leases.values())

    def _cap_held(self) -> int:
        return sum(lease.cap_hold for lease in self.leases.values())

    def _charge(self, now: float, lease: _Lease, consumed: int) -> None:
        more = max(0, consumed - lease.consumed)  # a smaller figure than before is a late repeat, not a refund
        if more:
            self.charges.append(_Charge(now, more, in_rate=lease.primary))
        lease.consumed += more
        lease.rate_hold = max(0, lease.rate_hold - more)
        lease.cap_hold = max(0, lease.cap_hold - more)

    def _expire(self, now: float) -> None:
        """A silent sidecar's leases end by themselves: the cap hold is booked, the rate hold is given back."""
        for name in [name for name, lease in self.leases.items() if lease.expires <= now]:
            lease = self.expired[name] = self.leases.pop(name)
            lease.booked = _Charge(lease.expires, lease.cap_hold, in_rate=False)
            self.charges.append(lease.booked)
