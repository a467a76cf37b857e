"""What a scope's books lack of what is on record: it moved here, or its windows reach further back than they did. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import ceil

from quotas.policy import Policy
from quotas.store import Past, Scope, Seed, View, WindowName


def missing(scope: Scope, seed: Seed, now: float, shown: View) -> tuple[Past, ...]:
    """Of what is on record, what the books do not count, in order of time: the oldest, since what is new was used where they
    are. What running leases were charged is not on record. `now`: seconds of the store's time."""
    used = _recorded(scope, shown)
    past = [each for each in seed.past if (each.kind, each.name) == (scope.kind, scope.name)]
    span, name = _rate(scope.policy)
    on_primary = (each for each in past if each.primary and each.at > now - span)
    in_all = (each for each in past if each.at > now - (scope.policy.cap.seconds if scope.policy.cap else 0))
    lacking = [
        *(replace(each, capped=False) for each in _oldest(on_primary, used.get(name, 0))),
        *(replace(each, primary=False) for each in _oldest(in_all, used.get("hour", 0))),
    ]
    return tuple(sorted(lacking, key=lambda each: each.at))


def _recorded(scope: Scope, shown: View) -> dict[WindowName, int]:
    leases = [lease for lease in shown.leases if scope.kind == "team" or lease.key == scope.name]
    on_primary = sum(lease.charged for lease in leases if lease.route == "primary")
    in_all = sum(lease.charged for lease in leases)
    windows = (window for window in shown.windows if window.scope == scope.kind)
    return {each.name: max(0, each.used - (in_all if each.name == "hour" else on_primary)) for each in windows}


def _rate(policy: Policy) -> tuple[int, WindowName]:
    """How many seconds a charge on the primary counts, and which window shows them all."""
    if policy.rate is None:
        return 0, "minute"
    return (ceil(policy.repay_seconds), "burst") if policy.repay_seconds else (policy.rate.seconds, "minute")


def _oldest(past: Iterable[Past], counted: int) -> Iterator[Past]:
    """All but the newest `counted` tokens."""
    past = list(past)
    lacking = sum(each.tokens for each in past) - counted
    for each in past:
        tokens = min(each.tokens, lacking)
        if tokens <= 0:
            return
        lacking -= tokens
        yield replace(each, tokens=tokens)
