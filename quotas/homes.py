"""Where scopes have their books, and how far back these reach: what moved, or is to reach further back than it did. Pure."""

from __future__ import annotations

from math import ceil

from quotas.policy import Policy
from quotas.store import Account, Scope

REMEMBERED = 10_000
"""Of so many scopes the place is remembered, those that were new last."""

_Place = tuple[str, int, int]
"""A slot, and the seconds that the windows reach back on the primary and in the cap."""


class Homes:
    """What is remembered of scopes. One that is new here has not moved: whoever knew it before sees to it."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str, str], _Place] = {}

    def changed(self, account: Account) -> list[Scope]:
        """The scopes whose books here may lack what they used before: they lay elsewhere, or were too short."""
        return [scope for scope in account.scopes if self._misses(account.slot, scope)]

    def recall(self, account: Account) -> None:
        """What was, of scopes of which nothing is remembered."""
        for scope in account.scopes:
            self._places.setdefault(_owner(account.slot, scope), _place(account.slot, scope.policy))
        self._forget()

    def note(self, account: Account) -> None:
        for scope in account.scopes:
            owner, place = _owner(account.slot, scope), _place(account.slot, scope.policy)
            if self._places.get(owner) != place:
                self._places.pop(owner, None)
                self._places[owner] = place
        self._forget()

    def _forget(self) -> None:
        while len(self._places) > REMEMBERED:
            del self._places[next(iter(self._places))]

    def _misses(self, slot: str, scope: Scope) -> bool:
        before, now = self._places.get(_owner(slot, scope)), _place(slot, scope.policy)
        return before is not None and before != now and (before[0] != slot or before[1] < now[1] or before[2] < now[2])


def left_for(before: Account, now: Account) -> bool:
    """Whether it is the same key, whose books lie in another slot now."""
    return before.slot != now.slot and _owner(before.slot, before.scopes[0]) == _owner(now.slot, now.scopes[0])


def _owner(slot: str, scope: Scope) -> tuple[str, str, str]:
    """A key's books lie in its own slot or in its team's; in a slot of any other sort they are others."""
    sort = slot.partition(":")[0]
    return "" if sort in ("key", "team") else sort, scope.kind, scope.name


def _place(slot: str, policy: Policy) -> _Place:
    rate = max(policy.rate.seconds if policy.rate else 0, ceil(policy.repay_seconds or 0))
    return slot, rate, policy.cap.seconds if policy.cap else 0
