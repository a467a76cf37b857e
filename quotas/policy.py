"""What may be spent: limits, policies, and which of them make sense. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

MAX_TOKENS = 10**15
"""The largest limit: sums of two of these are still exact in the doubles of a Lua script (2**53 ≈ 9.007 × 10¹⁵)."""

MAX_SECONDS = 31_622_400
"""The longest window: a leap year."""


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `tokens` in any span of `seconds`. 0 tokens block; an absent limit (`None` in a policy) is unlimited."""

    tokens: int
    seconds: int

    @property
    def slot(self) -> int:
        """The step, in seconds, in which the window is counted: 360 a window, never finer than a second."""
        return max(1, ceil(self.seconds / 360))


@dataclass(frozen=True, slots=True)
class Policy:
    """The limits of one scope (a key, a team).

    `rate` and `burst` meter the primary route, `cap` meters every route, `max_parallel` counts running requests.
    `None` is unlimited, but for `burst`: there it means that no burst is ever granted.
    """

    rate: Limit | None = Limit(2_000, 60)
    burst: Limit | None = Limit(4_000, 5)
    cap: Limit | None = Limit(50_000, 3_600)
    max_parallel: int | None = 8

    @property
    def repay_seconds(self) -> float | None:
        """The span in which a burst is paid back at the pace of the rate (4,000 at 2,000 a minute: 120 s).

        None where there is nothing to pay back: no burst, no rate, or a rate that blocks.
        """
        if self.rate is None or self.burst is None or not self.rate.tokens:
            return None
        return self.burst.tokens * self.rate.seconds / self.rate.tokens

    @property
    def repay_slot(self) -> int | None:
        """The step, in seconds, in which the repay span is counted."""
        if self.burst is None or (seconds := self.repay_seconds) is None:
            return None
        return max(self.burst.slot, ceil(seconds / 360))


UNLIMITED = Policy(rate=None, burst=None, cap=None, max_parallel=None)
"""What a team has where nothing is said."""


def problems(policy: Policy) -> list[tuple[str, str]]:
    """Everything about `policy` that makes no sense, as (field, what would be right). Empty: it is legal."""
    found = [issue for name in ("rate", "burst", "cap") for issue in _limit_problems(name, getattr(policy, name))]
    parallel = policy.max_parallel
    if parallel is not None and not _whole(parallel, 0, MAX_TOKENS):
        found.append(("max_parallel", "must be a whole number of requests, 0 or more, or null for unlimited"))
    return found or _relation_problems(policy)


def _limit_problems(name: str, limit: Limit | None) -> list[tuple[str, str]]:
    if limit is None:
        return []
    found = []
    if not _whole(limit.tokens, 0, MAX_TOKENS):
        found.append((f"{name}.tokens", f"must be a whole number of tokens from 0 to {MAX_TOKENS}"))
    if not _whole(limit.seconds, 1, MAX_SECONDS):
        found.append((f"{name}.seconds", f"must be a whole number of seconds from 1 to {MAX_SECONDS}"))
    return found


def _relation_problems(policy: Policy) -> list[tuple[str, str]]:
    rate, burst, cap = policy.rate, policy.burst, policy.cap
    found = []
    if burst is not None and burst.tokens == 0:
        found.append(("burst.tokens", "0 would never grant a burst; write burst: null"))
    elif burst is not None and rate is not None and burst.tokens < rate.tokens:
        found.append(("burst.tokens", f"must be at least rate.tokens ({rate.tokens}), or burst: null"))
    if cap is not None and rate is not None and 0 < cap.tokens < rate.tokens:
        found.append(("cap.tokens", f"must be at least rate.tokens ({rate.tokens}), or 0 to block, or cap: null"))
    return found


def _whole(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most
