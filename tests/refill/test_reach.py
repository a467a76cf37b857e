"""How far back windows reach, and in which steps what was used is summed for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meter.refill.reach import MOST_STEPS, Reach
from quotas.policy import UNLIMITED, Limit, Policy

HOUR = Limit(50_000, 3_600)


@pytest.mark.parametrize(
    ("policies", "reach"),
    [
        ([], Reach(far=0, near=0, fine=1, coarse=1)),
        ([UNLIMITED], Reach(far=0, near=0, fine=1, coarse=1)),
        ([Policy()], Reach(far=3_610, near=121, fine=1, coarse=10)),
        ([Policy(), UNLIMITED], Reach(far=3_610, near=121, fine=1, coarse=10)),
        ([Policy(None, None, HOUR, None)], Reach(far=3_610, near=0, fine=10, coarse=10)),
        ([Policy(Limit(9, 60), None, None, None)], Reach(far=61, near=61, fine=1, coarse=1)),
        ([Policy(Limit(9, 86_400), None, None, None)], Reach(far=86_640, near=86_640, fine=240, coarse=240)),
        ([Policy(None, None, Limit(9, 2_592_000), None)], Reach(far=2_599_200, near=0, fine=7_200, coarse=7_200)),
        ([Policy(), Policy(None, None, Limit(9, 86_400), None)], Reach(far=86_640, near=121, fine=1, coarse=30)),
    ],
)
def test_it_is_the_longest_window_and_a_common_step(policies: list[Policy], reach: Reach) -> None:
    assert Reach.of(policies) == reach


limits = st.builds(Limit, st.integers(1, 10**15), st.integers(1, 31_622_400))
rates = st.none() | limits


@given(st.lists(st.builds(Policy, rates, rates, rates, st.none()), max_size=5))
def test_steps_are_few_and_every_window_is_reached(policies: list[Policy]) -> None:
    reach = Reach.of(policies)
    assert reach.near <= reach.far
    assert reach.near <= MOST_STEPS * reach.fine
    assert reach.far <= MOST_STEPS * reach.coarse
    for policy in policies:
        for limit in (policy.rate, policy.cap):
            assert limit is None or limit.seconds + limit.slot <= reach.far
        assert policy.rate is None or policy.rate.seconds + policy.rate.slot <= reach.near
