"""When a refused ask will fit: what becomes of the books if no running request says anything more. Pure.

Charges slide out of their windows, debt is paid back, leases expire (their rate hold is given back, their cap hold becomes
a charge and slides out in its turn). Moments are microseconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from quotas.books import Book, Lease, Meter, Terms, target_terms
from quotas.store import Ask, Target
from quotas.windows import HAIR, NEVER, SECOND, Debt, Window

FORESEEN = 256
"""This many running leases are looked at, the first to expire. They end by themselves only when their sidecar fell
silent, so more would cost much and tell little."""


def retry_after(books: Sequence[Book], ask: Ask, now: int) -> float | None:
    """Seconds until the same ask fits if nobody says anything more: charges slide, debt is paid back, leases expire.

    A lowered ceiling may rise again as the cap's window slides, and what is expected with it: so the moment is sought
    again with what is expected then, until both agree.
    """
    moment, expected = now, -1
    forecasts = [Forecast(book, now) for book in books]
    while moment < NEVER and expected != (then := _expected_at(forecasts, ask, moment)):
        expected = then
        moment = _first_fit(forecasts, ask, moment, expected)
    return None if moment >= NEVER else (moment - now + HAIR) / SECOND


def _expected_at(forecasts: Sequence[Forecast], ask: Ask, moment: int) -> int:
    left = min(forecast.cap_left_at(moment) for forecast in forecasts)
    return min(ask.expected, ask.ceiling, max(left, ask.least))


def _first_fit(forecasts: Sequence[Forecast], ask: Ask, since: int, expected: int) -> int:
    floor = max(since, *(forecast.room_at(ask.cap_need) for forecast in forecasts))
    spells = [forecast.primary_spells(expected) for forecast in forecasts] if ask.primary else []
    overflow = min((forecasts[0].target_at(target, expected) for target in ask.targets), default=NEVER)
    starts = {start for ranges in spells for start, _ in ranges if start > floor} | {floor, max(floor, overflow)}
    fits = (at for at in sorted(starts) if at >= overflow or (spells and all(_within(at, each) for each in spells)))
    return next(fits, NEVER)


def _within(at: int, spells: list[tuple[int, int]]) -> bool:
    return any(start <= at < end for start, end in spells)


@dataclass(slots=True)
class Forecast:
    """What becomes of one scope if nobody says anything more: its running leases expire, its charges slide out."""

    book: Book
    now: int
    ending: list[Lease] = field(init=False)

    def __post_init__(self) -> None:
        running = (lease for lease in self.book.state.leases.values() if lease.booked is None)
        self.ending = heapq.nsmallest(FORESEEN, running, key=lambda lease: lease.expires)

    def room_at(self, need: int) -> int:
        """From when the cap has `need` left and another request may run."""
        state, rule = self.book.state, self.book.terms
        capped = _freed_at(need - self.book.cap_left(), self._cap_departures())
        over = 0 if rule.parallel is None else state.running + 1 - rule.parallel
        return max(capped, _freed_at(over, ((lease.expires, 1) for lease in self.ending)))

    def cap_left_at(self, moment: int) -> int:
        return self.book.cap_left() + sum(tokens for at, tokens in self._cap_departures() if at <= moment)

    def primary_spells(self, expected: int) -> list[tuple[int, int]]:
        """The spells of time, (from, until), in which the primary takes `expected` more."""
        return self._spells(self.book.state.primary, self.book.terms, expected)

    def target_at(self, target: Target, expected: int) -> int:
        """From when the target takes `expected` more."""
        meter = self.book.state.target(target, self.now)
        if meter is None or target.rate is None:
            return 0
        return self._spells(meter, target_terms(target.rate), expected)[0][0]

    def _spells(self, meter: Meter, rule: Terms, expected: int) -> list[tuple[int, int]]:
        if rule.rate is None or meter.rate is None:
            return [(0, NEVER)]
        releases = [(lease.expires, lease.rate_hold) for lease in self.ending if self.book.state.meter(lease) is meter]
        more = meter.held + expected
        easy = _freed_at(meter.rate.total + more - rule.rate.tokens, _merged(meter.rate, releases))
        hard = _paid_at(meter.debt, more - rule.room, releases)
        if rule.repay is not None and meter.repay is not None:
            hard = max(hard, _freed_at(meter.repay.total + more - rule.repay.tokens, _merged(meter.repay, releases)))
        return [*_bursts(meter, rule, hard), (max(easy, hard), NEVER)]

    def _cap_departures(self) -> list[tuple[int, int]]:
        """A running lease's hold becomes a charge when it expires, and slides out like one."""
        cap = self.book.state.cap
        if cap is None:
            return []
        holds = [(cap.leaves(lease.expires), lease.cap_hold) for lease in self.ending]
        return sorted([*cap.departures(), *holds])


def _merged(window: Window, releases: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return sorted([*window.departures(), *releases])


def _freed_at(over: int, frees: Iterable[tuple[int, int]]) -> int:
    """The moment by which `over` tokens are free; 0 if they are now. `frees`: (moment, tokens), in order of time."""
    if over <= 0:
        return 0
    for moment, tokens in frees:
        over -= tokens
        if over <= 0:
            return moment
    return NEVER


def _paid_at(debt: Debt, over: int, releases: list[tuple[int, int]]) -> int:
    """The moment by which debt was paid back, and holds released, so far that it is no longer `over` the room."""
    first, need = NEVER, debt.tokens + over
    for moment, tokens in [(0, 0), *releases]:
        need -= tokens
        first = min(first, max(moment, debt.paid_at(need)))
    return first


def _bursts(meter: Meter, rule: Terms, hard: int) -> list[tuple[int, int]]:
    """When a burst is open, and from when one may be opened, not before `hard` (the repay span and the debt allow)."""
    if rule.repay is None:
        return []
    if meter.opened < 0:
        return [(hard, NEVER)]
    return [(hard, meter.opened + rule.burst - HAIR), (max(hard, meter.opened + rule.repay.span), NEVER)]
