"""A backend's fitness, as the table in engine_adapter/health.py says it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.health import FAILURES, FIRST_WAIT, FORGOTTEN_SECONDS, LONGEST_WAIT, PROBE_SECONDS, Fitness

untimed = settings(deadline=None)


def open_at(now: float) -> Fitness:
    fitness = Fitness()
    for _ in range(FAILURES):
        fitness.failed(now)
    return fitness


def test_failures_in_a_row_open_it() -> None:
    fitness = Fitness()
    for _ in range(FAILURES - 1):
        fitness.failed(0)
    assert fitness.closed and fitness.may_try(0)
    fitness.failed(0)
    assert not fitness.closed and not fitness.may_try(0) and not fitness.fit(0)


def test_an_answer_between_failures_starts_the_count_anew() -> None:
    fitness = Fitness()
    for _ in range(10 * FAILURES):
        fitness.failed(0)
        fitness.ok()
    assert fitness.closed


def test_one_probe_at_a_time() -> None:
    fitness = open_at(100)
    assert not fitness.may_try(100 + FIRST_WAIT - 0.01)
    assert fitness.may_try(100 + FIRST_WAIT)
    assert not fitness.may_try(100 + FIRST_WAIT + 0.01)


def test_a_probe_that_succeeds_closes_it() -> None:
    fitness = open_at(0)
    assert fitness.may_try(FIRST_WAIT)
    fitness.ok()
    assert fitness.closed and fitness.fit(FIRST_WAIT) and repr(fitness) == "closed"


def test_each_failed_probe_doubles_the_wait_up_to_the_longest() -> None:
    fitness, now, waits = open_at(0), 0.0, []
    for _ in range(8):
        wait = next(tenths / 10 for tenths in range(1, 400) if fitness.may_try(now + tenths / 10))
        waits.append(wait)
        now += wait
        fitness.failed(now)
    assert waits == [1, 2, 4, 8, 16, LONGEST_WAIT, LONGEST_WAIT, LONGEST_WAIT]


def test_requests_that_were_already_running_do_not_lengthen_the_wait() -> None:
    fitness = open_at(0)
    for _ in range(50):
        fitness.failed(0.5)
    assert fitness.may_try(FIRST_WAIT)


def test_a_probe_that_never_reports_is_forgotten() -> None:
    fitness = open_at(0)
    assert fitness.may_try(FIRST_WAIT)
    assert not fitness.may_try(FIRST_WAIT + PROBE_SECONDS - 1)
    assert fitness.may_try(FIRST_WAIT + PROBE_SECONDS)


def test_what_failed_long_ago_says_nothing_any_more() -> None:
    fitness = open_at(0)
    assert not fitness.fit(FORGOTTEN_SECONDS - 1)
    assert fitness.fit(FORGOTTEN_SECONDS)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([], "closed"),
        (["failed"], "closed, failures in a row: 1"),
        (["failed"] * 3, "open, tried again after 1 s"),
        (["failed"] * 3 + ["may_try"], "probing, tried again after 1 s"),
        (["failed"] * 3 + ["may_try", "failed"], "open, tried again after 2 s"),
    ],
)
def test_says_its_state_in_one_line(steps: list[str], said: str) -> None:
    fitness = Fitness()
    for second, step in enumerate(steps):
        getattr(fitness, step)(second)
    assert repr(fitness) == said


@untimed
@given(st.lists(st.tuples(st.sampled_from(["ok", "failed", "may_try"]), st.floats(0, 40)), max_size=60))
def test_whatever_happens_a_probe_comes_in_time(history: list[tuple[str, float]]) -> None:
    """It never stays shut: after the longest wait and a forgotten probe the next request may go there."""
    fitness, now = Fitness(), 0.0
    for step, later in history:
        now += later
        if step == "ok":
            fitness.ok()
        else:
            getattr(fitness, step)(now)
    assert fitness.may_try(now + max(LONGEST_WAIT, PROBE_SECONDS))
