"""How far back the windows of some policies reach, and how finely they count. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil, gcd

from quotas.policy import MAX_SECONDS, Policy

MOST_STEPS = 3_600
"""So many sums a key and reach are read at most, whatever slots the windows have."""

_Window = tuple[int, int]
"""Seconds, and the seconds of a slot."""


@dataclass(frozen=True, slots=True)
class Reach:
    """`far`: seconds back in which anything counts; `near`: in which the rate's windows still count. 0: nothing does.

    Sums are wanted by steps of `fine` seconds within `near`, of `coarse` beyond it. A step divides the slots it is for
    (where MOST_STEPS allows), so that a sum told as of the step's end lies in the slot in which it was charged.
    """

    far: int
    near: int
    fine: int
    coarse: int

    @classmethod
    def of(cls, policies: Iterable[Policy]) -> Reach:
        distinct = set(policies)
        rates = [window for policy in distinct for window in _rates(policy)]
        caps = [window for policy in distinct for window in _caps(policy)]
        near, far = _reach(rates), _reach(rates + caps)
        return cls(far, near, fine=_step(rates + caps, near), coarse=_step(caps or rates, far))


def _rates(policy: Policy) -> Iterator[_Window]:
    if policy.rate is not None:
        yield policy.rate.seconds, policy.rate.slot
    if policy.repay_seconds is not None and policy.repay_slot is not None:
        yield min(MAX_SECONDS, ceil(policy.repay_seconds)), min(MAX_SECONDS, policy.repay_slot)


def _caps(policy: Policy) -> Iterator[_Window]:
    if policy.cap is not None:
        yield policy.cap.seconds, policy.cap.slot


def _reach(windows: Iterable[_Window]) -> int:
    return max((seconds + slot for seconds, slot in windows), default=0)


def _step(windows: Iterable[_Window], reach: int) -> int:
    common = max(1, gcd(*(slot for _, slot in windows)))
    return common * max(1, ceil(reach / (MOST_STEPS * common)))
