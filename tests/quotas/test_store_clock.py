"""A store's clock held against one that nobody sets, as a table of what was told when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quotas.store_clock import ACCEPT_SECONDS, TOLERANCE, Said, StoreClock

DAY = 86_400.0
Told = tuple[float, float, Said]
"""Seconds since the first answer by our clock, by how much the store's time is off, what is to come of it."""


@pytest.mark.parametrize(
    "story",
    [
        [(0, 0, "fine"), (1, 0, "fine"), (3_600, 0, "fine")],
        [(0, 0, "fine"), (1, -5, "fine"), (2, 4.9, "fine")],
        [(0, 0, "fine"), (1, -5.1, "astray"), (60, -5.1, "astray"), (61, -5.1, "accepted"), (62, -5.1, "fine")],
        [(0, 0, "fine"), (1, 3_600, "astray"), (61, 3_600, "accepted"), (62, 0, "astray"), (122, 0, "accepted")],
        [(0, 0, "fine"), (1, 3_600, "astray"), (30, 0, "fine"), (31, 3_600, "astray"), (90, 3_600, "astray")],
        [(0, 0, "fine"), (1, 3_600, "astray"), (50, 7_200, "astray"), (62, 7_200, "astray"), (110, 7_200, "accepted")],
        [(0, 0, "fine"), (DAY, 4.9, "fine"), (2 * DAY, 9.8, "fine"), (3 * DAY, 14.7, "fine")],
        [(0, 0, "fine"), (10, 4, "fine"), (20, 8, "astray")],
        [(0, 0, "fine"), (10, 4, "fine"), (20, 0, "fine"), (30, -4, "fine")],
    ],
    ids=[
        "in step", "a small step", "a step back", "a step forward and back", "one that is undone", "two steps",
        "a drift", "two small steps", "to and fro",
    ],
)  # fmt: skip
def test_what_the_store_tells(story: list[Told]) -> None:
    clock = StoreClock()
    assert [clock.hear(1e9 + at + off, 50 + at, 50 + at) for at, off, _ in story] == [said for _, _, said in story]


def test_a_step_is_told_in_seconds_until_it_is_accepted() -> None:
    clock = StoreClock()
    for told in (0, 1):
        clock.hear(1e9 + told, told, told)
    assert clock.step == 0
    clock.hear(1e9 - 3_598, 2, 2)
    assert clock.step == pytest.approx(-3_600)
    clock.hear(1e9 - 3_538, 62, 62)
    assert clock.step == 0


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100), st.floats(0, 1)), max_size=30))
def test_slow_answers_of_a_true_clock_are_never_astray(calls: list[tuple[float, float, float]]) -> None:
    """However long a call takes, the store told its time somewhere between question and answer."""
    clock, now = StoreClock(), 0.0
    for pause, took, when in calls:
        asked = now + pause
        now = asked + took
        assert clock.hear(1e9 + asked + took * when, asked, now) == "fine"


@given(st.floats(-1e6, 1e6), st.floats(0, 2))
def test_whatever_steps_further_than_is_borne_is_noticed_and_accepted_after_a_minute(step: float, took: float) -> None:
    clock = StoreClock()
    clock.hear(1e9, 0, 0)
    told = [clock.hear(1e9 + at + step, at - took, at) for at in (10.0, 10 + ACCEPT_SECONDS - 1, 10 + ACCEPT_SECONDS)]
    if step < -TOLERANCE - took - 0.1 or step > TOLERANCE + 0.1:
        assert told == ["astray", "astray", "accepted"]
    elif abs(step) < TOLERANCE - 0.1:
        assert told == ["fine", "fine", "fine"]
