"""The order in which a route's backends are tried."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.health import FAILURES, FIRST_WAIT, Fitness
from engine_adapter.routing import order

untimed = settings(deadline=None)

DUE = 100 + FIRST_WAIT
"""When a backend that broke at 100 may be probed."""


def fitness(state: str) -> Fitness:
    made = Fitness()
    if state != "closed":
        for _ in range(FAILURES):
            made.failed(100)
    if state == "probing":
        assert made.may_try(DUE)
    return made


@pytest.mark.parametrize(
    ("targets", "now", "expected"),
    [
        ([("closed", 0)], 100, [0]),
        ([("closed", 500), ("closed", 20), ("closed", 90)], 100, [1, 2, 0]),
        ([("closed", 7), ("closed", 7)], 100, [0, 1]),
        ([("open", 0), ("closed", 900)], 100, [1]),
        ([("closed", 900), ("open", 0)], DUE, [1, 0]),
        ([("probing", 0), ("closed", 900)], DUE, [1]),
        ([("open", 0), ("open", 0), ("closed", 1)], DUE, [0, 2]),
        ([("open", 5), ("open", 0)], 100, [0, 1]),
        ([("probing", 0), ("open", 0)], DUE, [1, 0]),
        ([], 100, []),
    ],
)
def test_order(targets: list[tuple[str, int]], now: float, expected: list[int]) -> None:
    assert order([(fitness(state), outstanding) for state, outstanding in targets], now) == expected


def test_one_request_takes_the_probe_and_the_next_does_not() -> None:
    targets = [(fitness("open"), 0), (fitness("closed"), 10)]
    assert order(targets, DUE) == [0, 1]
    assert order(targets, DUE) == [1]


@untimed
@given(
    st.lists(st.tuples(st.sampled_from(["closed", "open", "probing"]), st.integers(0, 1000)), min_size=1, max_size=6)
)
def test_there_is_always_somebody_to_try_and_nobody_twice(targets: list[tuple[str, int]]) -> None:
    found = order([(fitness(state), outstanding) for state, outstanding in targets], DUE)
    assert found
    assert len(set(found)) == len(found)
    assert set(found) <= set(range(len(targets)))
