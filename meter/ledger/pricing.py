"""What tokens cost: usage × price, in whole nano-dollars, rounded once. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from decimal import ROUND_HALF_EVEN, Context, Decimal, InvalidOperation

NANOS = 10**9
"""Nano-dollars in a dollar."""
PER = 10**6
"""Prices are for a million tokens."""
MAX_PRICE = 2**63 - 1
_EXACT = Context(prec=60)


@dataclass(frozen=True, slots=True)
class Price:
    """Nano-dollars per million tokens of a model on a backend, from `effective_from` on.

    `cached_prompt` None: cached prompt tokens cost what the others do.
    """

    id: int
    model: str
    backend: str
    effective_from: datetime
    prompt: int
    cached_prompt: int | None
    completion: int


def cost_nanousd(prompt: int, cached: int, completion: int, price: Price) -> int:
    """What these tokens cost in nano-dollars. `cached` is a part of `prompt`; reasoning is a part of `completion`.

    The sum is rounded once, half to even, so that many small amounts do not drift.
    """
    cached = min(cached, prompt)
    cached_price = price.prompt if price.cached_prompt is None else price.cached_prompt
    scaled = (prompt - cached) * price.prompt + cached * cached_price + completion * price.completion
    whole, rest = divmod(scaled, PER)
    return whole + (2 * rest > PER or (2 * rest == PER and whole % 2 == 1))


def from_usd_per_million(usd: Decimal | float | str) -> int:
    """Dollars per million tokens as they are written in a file, in nano-dollars; half a nano-dollar goes to even.

    A float is taken as it prints (0.1 is 0.1). ValueError: no amount, negative, or above 9.2 × 10⁹ dollars.
    """
    try:
        nanos = _EXACT.multiply(Decimal(str(usd)), Decimal(NANOS)).to_integral_value(ROUND_HALF_EVEN)
    except InvalidOperation:
        nanos = Decimal("NaN")
    if not nanos.is_finite() or not 0 <= nanos <= MAX_PRICE:
        raise ValueError(f"{usd!r} is no price: write dollars per million tokens, 0 or more, such as 0.50.")
    return int(nanos)


def usd(nanos: int) -> str:
    """Nano-dollars as a decimal number of dollars: 1500000000 is 1.5."""
    return format(_EXACT.normalize(_EXACT.scaleb(Decimal(nanos), -9)), "f")


class PriceBook:
    """All prices, to be asked for the one in force."""

    def __init__(self, prices: Iterable[Price] = ()) -> None:
        self._prices: defaultdict[tuple[str, str], list[Price]] = defaultdict(list)
        for price in sorted(prices, key=lambda price: price.effective_from):
            self._prices[price.model, price.backend].append(price)

    def at(self, model: str, backend: str, moment: datetime) -> Price | None:
        """The price with the latest `effective_from` that is not after `moment`; None where there is none yet."""
        prices = self._prices.get((model, backend), [])
        position = bisect_right(prices, moment, key=lambda price: price.effective_from)
        return prices[position - 1] if position else None
