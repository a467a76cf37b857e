"""Whether the time that a quota store tells can be that time: held against a clock of our own that nobody sets. Pure.

The store's clock may be set. A small step is borne; a larger one would empty every window, or freeze it. Then the store is
not believed until its new time has stood for a while; what it counted by the old time is void.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TOLERANCE = 5.0
"""Seconds that a step may have, back or forward."""

ACCEPT_SECONDS = 60.0
"""After so long a new time is taken as the right one."""

SLEW = 0.001
"""How much faster or slower the store's clock may run without counting as stepped: what NTP corrects, doubled.

https://www.ntp.org/documentation/4.2.8-series/clock/ (500 parts per million)
"""

Said = Literal["fine", "astray", "accepted"]


Lead = tuple[float, float]
"""Between how many seconds the store's clock is ahead of ours: exact but for the time that an answer took."""


@dataclass(slots=True)
class StoreClock:
    """How far the store's clock is `ahead` (None: never heard) since it was last `heard` and believed, and the `strange`
    lead that it tells since `strange_since`, if it does. Moments are seconds by our clock."""

    ahead: Lead | None = None
    heard: float = 0.0
    strange: Lead = (0.0, 0.0)
    strange_since: float | None = None

    @property
    def step(self) -> float:
        """Seconds by which the store's clock was set, as it tells now; 0 while it is believed."""
        return 0.0 if self.strange_since is None or self.ahead is None else self.strange[0] - self.ahead[0]

    def hear(self, told: float, asked: float, answered: float) -> Said:
        """Takes in what the store told in answer to a question; `asked` and `answered` are by our clock.

        fine: believed · astray: the clock was set · accepted: it was, and the new time is believed from now on.
        """
        lead = (told - answered, told - asked)
        if self.ahead is None or _is_near(self.ahead, lead):
            self.ahead = lead if self.ahead is None else _followed(self.ahead, lead, SLEW * (answered - self.heard))
            self.heard, self.strange_since = answered, None
            return "fine"
        if self.strange_since is None or not _is_near(self.strange, lead):
            self.strange, self.strange_since = lead, answered
        if answered - self.strange_since < ACCEPT_SECONDS:
            return "astray"
        self.ahead, self.heard, self.strange_since = lead, answered, None
        return "accepted"


def _is_near(known: Lead, told: Lead) -> bool:
    return told[0] - TOLERANCE <= known[1] and known[0] <= told[1] + TOLERANCE


def _followed(known: Lead, told: Lead, drift: float) -> Lead:
    """What is known now: clocks drift, and every answer says it anew; but none runs away faster than clocks do."""
    least, most = known[0] - drift, known[1] + drift
    if told[0] > most:
        return most, most
    if told[1] < least:
        return least, least
    return max(least, told[0]), min(most, told[1])
