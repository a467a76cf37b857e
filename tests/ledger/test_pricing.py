"""Tokens times price, in whole nano-dollars."""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meter.ledger.pricing import Price, PriceBook, cost_nanousd, from_usd_per_million, usd
from tests.ledger.samples import NOON

TOKENS = st.integers(0, 10**13)
NANOS = st.integers(0, 10**14)


def price(prompt: int, cached: int | None, completion: int, *, number: int = 1, since: datetime = NOON) -> Price:
    return Price(number, "assistant", "gpu", since, prompt, cached, completion)


@pytest.mark.parametrize(
    ("tokens", "at", "nanos"),
    [
        ((0, 0, 0), (500_000_000, None, 1_500_000_000), 0),
        ((9, 0, 4), (500_000_000, None, 1_500_000_000), 9 * 500 + 4 * 1500),
        ((9, 8, 0), (500_000_000, 50_000_000, 0), 500 + 8 * 50),
        ((9, 8, 0), (500_000_000, None, 0), 9 * 500),
        ((9, 20, 0), (500_000_000, 50_000_000, 0), 9 * 50),
        ((1, 0, 0), (499_999, None, 0), 0),
        ((1, 0, 0), (500_000, None, 0), 0),
        ((1, 0, 0), (500_001, None, 0), 1),
        ((3, 0, 0), (500_000, None, 0), 2),
        ((1, 0, 1), (500_000, None, 500_000), 1),
    ],
)
def test_a_cost_is_rounded_once_half_to_even(
    tokens: tuple[int, int, int], at: tuple[int, int | None, int], nanos: int
) -> None:
    assert cost_nanousd(*tokens, price(*at)) == nanos


@given(TOKENS, TOKENS, TOKENS, st.tuples(NANOS, NANOS, NANOS))
def test_a_cost_is_within_half_a_nano_dollar_of_the_exact_one(
    prompt: int, cached: int, completion: int, nanos: tuple[int, int, int]
) -> None:
    cached = min(cached, prompt)
    exact = Fraction((prompt - cached) * nanos[0] + cached * nanos[1] + completion * nanos[2], 10**6)
    assert abs(cost_nanousd(prompt, cached, completion, price(*nanos)) - exact) <= Fraction(1, 2)


@pytest.mark.parametrize(
    ("written", "nanos"),
    [
        (0.5, 500_000_000),
        (0.1, 100_000_000),
        ("0.05", 50_000_000),
        (Decimal("1.5"), 1_500_000_000),
        (0, 0),
        (1e-9, 1),
        ("2.5e-9", 2),
        ("3.5e-9", 4),
        (1_000_000, 10**15),
    ],
)
def test_a_price_is_what_is_written(written: Decimal | float | str, nanos: int) -> None:
    assert from_usd_per_million(written) == nanos


@pytest.mark.parametrize("written", ["", "free", "NaN", "Infinity", "-1", -0.01, float("nan"), float("inf"), "1e300"])
def test_what_is_no_price_is_said_plainly(written: float | str) -> None:
    with pytest.raises(ValueError, match="is no price: write dollars per million tokens"):
        from_usd_per_million(written)


@pytest.mark.parametrize(
    ("nanos", "text"),
    [
        (0, "0"),
        (1, "0.000000001"),
        (1_500_000_000, "1.5"),
        (10**12, "1000"),
        (-250_000_000, "-0.25"),
        (9_223_372_036_854_775_807, "9223372036.854775807"),
    ],
)
def test_nano_dollars_print_as_dollars(nanos: int, text: str) -> None:
    assert usd(nanos) == text


@given(st.integers(-(10**25), 10**25))
def test_printed_dollars_are_exact(nanos: int) -> None:
    assert Fraction(usd(nanos)) == Fraction(nanos, 10**9)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(-3601, None), (-3600, 1), (-1, 1), (0, 2), (3599, 2), (3600, 3), (10**9, 3)]
)
def test_the_price_in_force_is_the_latest_that_has_begun(seconds: int, expected: int | None) -> None:
    hour = timedelta(hours=1)
    book = PriceBook(
        [price(3, None, 3, number=3, since=NOON + hour), price(1, None, 1, since=NOON - hour), price(2, 2, 2, number=2)]
    )
    found = book.at("assistant", "gpu", NOON + timedelta(seconds=seconds))
    assert (found.id if found else None) == expected


def test_prices_are_each_models_and_backends_own() -> None:
    book = PriceBook([price(1, None, 1)])
    assert book.at("assistant", "cheap", NOON) is None
    assert book.at("other", "gpu", NOON) is None
    assert PriceBook().at("assistant", "gpu", NOON) is None
