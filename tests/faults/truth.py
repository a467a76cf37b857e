"""What was really admitted and used, whatever any store believed: the monitor's exact books, without its limits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from quotas.policy import Policy
from tests.quotas import monitor
from tests.quotas.histories import exact
from tests.quotas.monitor import Monitor

PLENTY = 1_000_000
"""The monitor's limits are raised by this factor, so that it only keeps the books and never protests."""


class Truth:
    """One scope. Told of every admission and of every token used; knows the most that ever stood above the limits.

    `over` counts used and held tokens: of the cap's window, and of the repay span, in which the burst bounds the rate.
    """

    def __init__(self, policy: Policy, clock: Callable[[], float] = time.time) -> None:
        self.most_over = {"hour": 0, "burst": 0}
        self._clock = clock
        self._limits = exact(policy)
        self._monitor = Monitor(_raised(self._limits), lease_seconds=math.inf)
        self._now = 0.0

    def admitted(self, lease: str, hold: int, expected: int, *, primary: bool) -> None:
        self._monitor.admitted(self._tick(), lease, "base" if primary else "overflow", expected, hold)
        self._look()

    def used_so_far(self, lease: str, tokens: int, covered: int | None = None) -> None:
        """`covered`: what it may use in all from now on."""
        self._monitor.progressed(self._tick(), lease, tokens, covered)
        self._look()

    def ended(self, lease: str, tokens: int) -> None:
        self._monitor.finished(self._tick(), lease, tokens)
        self._look()

    @property
    def used(self) -> int:
        """Tokens in the cap's window."""
        return self._monitor.counts(self._tick())["cap_used"]

    @property
    def held(self) -> int:
        """Tokens that running requests may still use."""
        return self._monitor.counts(self._tick())["cap_held"]

    @property
    def running(self) -> int:
        return len(self._monitor.leases)

    def _tick(self) -> float:
        self._now = max(self._now, self._clock())
        return self._now

    def _look(self) -> None:
        watched, limits = self._monitor, self._limits
        for name, window, total in (
            ("hour", limits.cap, watched._cap_used(self._now) + watched._cap_held()),
            ("burst", limits.repay, watched._rate_used(self._now, limits.repay) + watched._rate_held()),
        ):
            if window is not None:
                self.most_over[name] = max(self.most_over[name], total - window.tokens)


def _raised(limits: monitor.Policy) -> monitor.Policy:
    def raised(window: monitor.Window | None) -> monitor.Window | None:
        return window and replace(window, tokens=window.tokens * PLENTY)

    return monitor.Policy(raised(limits.rate), raised(limits.burst), raised(limits.cap), None)
