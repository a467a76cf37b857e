"""In which order to try the backends of a route. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from engine_adapter.health import Fitness


def order(targets: Sequence[tuple[Fitness, int]], now: float) -> list[int]:
    """Positions of the targets to try, given each one's fitness and its outstanding tokens.

    A backend that is due for a probe comes first: no answer has been begun, so if it fails the next is tried unseen. Then the
    fit ones, least outstanding first, those listed first on a tie. If none is fit, all the others as listed: a last resort.
    """
    closed = [position for position, (fitness, _) in enumerate(targets) if fitness.closed]
    closed.sort(key=lambda position: targets[position][1])
    probe = _probe(targets, now)
    return probe + (closed or [position for position in range(len(targets)) if position not in probe])


def _probe(targets: Sequence[tuple[Fitness, int]], now: float) -> list[int]:
    """One at most: the others keep their probe for a request that reaches them."""
    for position, (fitness, _) in enumerate(targets):
        if not fitness.closed and fitness.may_try(now):
            return [position]
    return []
