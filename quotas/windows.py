"""Sliding windows in slots, and debt: pure arithmetic in whole tokens and whole microseconds.

A `Window` keeps a running sum. What slides out is subtracted once, so that asking costs the same however much was spent.
A slot leaves when all of it is older than the window: the sum may be too high for up to one slot, and is never too low.

All moments and spans here are integers of microseconds; `now` is always an argument. `quotas/rule.lua` does the same
arithmetic in doubles, which are exact for these numbers (below 2**53).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

SECOND = 1_000_000
"""Microseconds in a second: the unit of every moment and span in the pure parts of this room."""

NEVER = 2**52
"""A moment that does not come (the year 2112), and the longest span: still exact in a double."""

HAIR = 1_000
"""A millisecond. What depends on a fraction (debt, a named moment) is taken this much later, so that rounding never errs
towards too early; it is far below the finest slot."""


@dataclass(slots=True)
class Window:
    """What was charged in the last `span`, counted in slots of `slot`.

    `slots` maps a slot's number (moment // slot) to its tokens; slots below `oldest` are gone; `newest` is the last one
    charged, or -1.
    """

    span: int
    slot: int
    total: int = 0
    oldest: int = 0
    newest: int = -1
    slots: dict[int, int] = field(default_factory=dict)

    def slide(self, now: int) -> None:
        """Forgets the slots of which all is older than the span."""
        horizon = (now - self.span) // self.slot
        if horizon <= self.oldest:
            return
        if self.newest < horizon:
            self.slots.clear()
            self.total = 0
        else:
            for index in range(self.oldest, horizon):
                self.total -= self.slots.pop(index, 0)
        self.oldest = horizon

    def add(self, at: int, tokens: int) -> None:
        """Charges `tokens` at a moment; one that slid out already counts no more. A correction may be negative."""
        index = at // self.slot
        if tokens == 0 or index < self.oldest:
            return
        self.slots[index] = self.slots.get(index, 0) + tokens
        self.total += tokens
        self.newest = max(self.newest, index)

    def leaves(self, at: int) -> int:
        """The moment at which what was charged at `at` slides out."""
        return (at // self.slot + 1) * self.slot + self.span

    def empty_at(self) -> int:
        """The moment by which all that is counted now has slid out; 0 if there is nothing."""
        return self.leaves(self.newest * self.slot) if self.total > 0 else 0

    def departures(self) -> Iterator[tuple[int, int]]:
        """(moment, tokens) of every slot that will slide out, in order of time."""
        return ((self.leaves(index * self.slot), tokens) for index, tokens in sorted(self.slots.items()))

    def resize(self, span: int, slot: int, now: int) -> None:
        """Counts the same charges in another layout, each at the latest moment it can have had."""
        if (span, slot) == (self.span, self.slot):
            return
        old = Window(self.span, self.slot, slots=self.slots)
        self.span, self.slot, self.total, self.newest, self.slots = span, slot, 0, -1, {}
        self.oldest = max(0, (now - span) // slot)
        for index, tokens in old.slots.items():
            self.add(min((index + 1) * old.slot - 1, now), tokens)


@dataclass(slots=True)
class Debt:
    """What was charged and not yet paid back, at `pace` tokens in `per` microseconds; never below 0.

    `tokens` were owed at `since`. Only whole tokens count as paid back, and a hair late, so that the debt is never taken
    as lower than it is.
    """

    tokens: int = 0
    since: int = 0
    pace: int = 0
    per: int = 1

    def owed(self, now: int) -> int:
        elapsed = max(0, now - self.since - HAIR)
        return max(0, self.tokens - int(float(elapsed) * float(self.pace) / float(self.per)))

    def charge(self, now: int, tokens: int) -> None:
        if tokens == 0:
            return
        if self.owed(now) == 0:
            self.tokens, self.since = tokens, now
            return
        periods = max(0, now - self.since - HAIR) // self.per  # whole periods are paid off exactly; no fraction is lost
        self.tokens += tokens - periods * self.pace
        self.since += periods * self.per

    def change_pace(self, pace: int, per: int, now: int) -> None:
        """What is owed now is paid back at another pace from now on."""
        if (pace, per) != (self.pace, self.per):
            self.tokens, self.since, self.pace, self.per = self.owed(now), now, pace, per

    def paid_at(self, tokens: int) -> int:
        """The moment by which `tokens` of what is owed are paid back."""
        if tokens <= 0:
            return 0
        if tokens > self.tokens or self.pace == 0:
            return NEVER
        return min(NEVER, self.since + HAIR - (-tokens * self.per // self.pace))
