"""What a call may cost: the rule's words as arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meter.callers.tiers import Tier
from meter.gateway.plan import SLICE, UNKNOWN_CONTEXT, Cover, Governor, Size, clamped, fits_context, generation, reading


def size(**fields: object) -> Size:
    known = {
        "prompt_bound": 40,
        "prompt_estimate": 10,
        "prompt_floor": 5,
        "choices": 1,
        "asked_output": 100,
        "learned_output": 512,
        "context": None,
    }
    return Size(**{**known, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "tier", "context", "limit", "lowered"),
    [
        (100, {}, None, 100, False),
        (None, {}, None, 512, False),
        (None, {"default_output_tokens": None}, None, 1024, False),
        (None, {"default_output_tokens": None, "max_output_tokens": None}, None, UNKNOWN_CONTEXT, False),
        (5000, {}, None, 1024, True),
        (100, {}, 90, 85, True),
        (100, {}, 105, 100, False),
        (100, {}, 5, 100, False),
    ],
)
def test_the_output_limit_is_the_smallest_of_what_is_asked_allowed_and_left_by_the_context(
    asked: int | None, tier: dict[str, object], context: int | None, limit: int, lowered: bool
) -> None:
    plan = generation(size(asked_output=asked, context=context), Tier.model_validate(tier), streamed=False)
    assert (plan.output_limit, plan.lowered) == (limit, lowered)


def test_a_plain_request_holds_its_ceiling_and_a_stream_a_slice() -> None:
    asked = size(asked_output=1000, learned_output=20, choices=2)
    plain, stream = (generation(asked, Tier(), streamed=streamed) for streamed in (False, True))
    assert plain.first_hold == plain.ceiling == 40 + 2 * 1000
    assert stream.first_hold == 40 + SLICE
    assert stream.expected == 10 + 2 * 20
    assert stream.least == 40 + 2 * 16


def test_a_call_that_only_reads_costs_its_prompt() -> None:
    plan = reading(size())
    assert (plan.ceiling, plan.expected, plan.output_limit) == (40, 10, None)


sizes = st.builds(
    Size,
    prompt_bound=st.integers(1, 10_000),
    prompt_estimate=st.integers(0, 10_000),
    choices=st.integers(1, 8),
    asked_output=st.none() | st.integers(1, 10_000),
    learned_output=st.integers(0, 10_000),
    context=st.none() | st.integers(1, 20_000),
)


@given(size=sizes, streamed=st.booleans())
def test_least_fits_into_the_first_hold_and_that_into_the_ceiling(size: Size, streamed: bool) -> None:
    plan = generation(size, Tier(), streamed=streamed)
    assert plan.least <= plan.first_hold <= plan.ceiling
    assert plan.expected <= plan.ceiling


@given(size=sizes, data=st.data())
def test_a_clamped_call_can_use_no_more_than_was_granted(size: Size, data: st.DataObject) -> None:
    plan = generation(size, Tier(), streamed=True)
    granted = data.draw(st.integers(plan.least, plan.ceiling))
    lowered = clamped(plan, granted, size)
    assert lowered.output_limit is not None
    assert size.prompt_bound + size.choices * lowered.output_limit <= granted
    assert max(lowered.expected, lowered.first_hold) <= granted


@pytest.mark.parametrize(
    ("context", "bound", "estimate", "exact", "fits"),
    [
        (None, 9999, 9999, False, True),
        (100, 84, 20, False, True),
        (100, 85, 20, False, True),
        (100, 85, 85, True, False),
    ],
)
def test_a_prompt_fits_a_context_by_its_bound_or_for_want_of_an_exact_size_by_its_estimate(
    context: int | None, bound: int, estimate: int, exact: bool, fits: bool
) -> None:
    asked = size(prompt_bound=bound, prompt_estimate=estimate, exact=exact)
    assert fits_context(context, asked, least_output=16) is fits


@given(hold=st.integers(1, 2000), room=st.integers(0, 5000), events=st.lists(st.integers(1, 30), max_size=300))
def test_a_stream_delivers_all_that_the_cap_leaves_and_overruns_by_one_event_at_most(
    hold: int, room: int, events: list[int]
) -> None:
    governor, used, held, asked_for = Governor(hold, 10**9), 0, hold, 0
    for tokens in events:
        used += tokens
        asked = governor.asks(used, used)
        while asked is not None:
            asked_for += 1
            left = hold + room - held
            extended = asked - held <= left
            held = max(held, asked) if extended else held
            asked = governor.hears(used, asked, Cover(extended, held, hold + room - held))
        if governor.spent(used):
            assert used >= hold + room
            assert used - (hold + room) < max(events)
            return
    assert used < hold + room or used == 0
    assert asked_for <= 3 + used // (SLICE // 2)


def test_a_store_that_does_not_answer_leaves_a_stream_what_it_holds() -> None:
    governor = Governor(300, 10**9)
    asked = governor.asks(200, 200)
    assert asked is not None
    assert governor.hears(200, asked, Cover(False, None, 0)) is None
    assert not governor.spent(299)
    assert governor.asks(299, 299) is None
    assert governor.spent(300)


def test_room_that_came_free_meanwhile_is_taken_before_the_stream_is_ended() -> None:
    governor = Governor(300, 10**9)
    asked = governor.asks(200, 200)
    assert asked is not None and governor.hears(200, asked, Cover(False, 300, 0)) is None
    asked = governor.asks(300, 300)
    assert asked == 300 + SLICE
    assert governor.hears(300, asked, Cover(True, asked, 5_000)) is None
    assert not governor.spent(300)


def test_what_may_have_been_used_is_kept_within_the_hold_and_only_what_surely_was_is_reported() -> None:
    governor = Governor(1000, 10**9)
    assert governor.asks(used=10, most=800) is None
    assert governor.asks(used=10, most=900) == 1000 + SLICE
    assert governor.hears(10, 1000 + SLICE, Cover(extended=False, covered=1000, left=0)) is None
    assert not governor.spent(999)
    assert governor.spent(1000)


def test_a_stream_holds_no_more_than_its_ceiling_and_asks_for_more_only_when_the_engine_passes_it() -> None:
    governor = Governor(38, 40)
    assert governor.asks(0, 10) == 40
    assert governor.hears(0, 40, Cover(True, 40, 0)) is None
    assert governor.asks(40, 40) is None
    assert not governor.spent(40)
    assert governor.asks(41, 41) == 41 + SLICE
    assert governor.hears(41, 41 + SLICE, Cover(False, 40, 0)) is None
    assert governor.spent(41)
