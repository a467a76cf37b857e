"""One backend's fitness, as a table. Pure: `now` is any clock that never goes back.

| state   | asked `may_try`            | `ok`   | `failed`                                                      |
|---------|----------------------------|--------|---------------------------------------------------------------|
| closed  | yes                        | closed | open, if it is the third in a row                             |
| open    | no; when its time has come | closed | open: what was already running says nothing new               |
|         | yes, once: probing         |        |                                                               |
| probing | no                         | closed | open, for twice as long as before                             |

A probe is a caller's request. One that never reports (its caller left) is forgotten after 30 s.
"""

from __future__ import annotations

FAILURES = 3
"""In a row: one may be chance, and a worker that restarts fails more often than that within a second."""
FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0
PROBE_SECONDS = 30.0
FORGOTTEN_SECONDS = 600.0
"""After so long without a request to it, nobody knows whether it is still down."""


class Fitness:
    """Whether a backend is worth a request."""

    __slots__ = ("_failed_at", "_failures", "_probe_until", "_retry_at", "_wait")

    def __init__(self) -> None:
        self._failures = 0
        self._failed_at = 0.0
        self._wait = FIRST_WAIT
        self._retry_at = 0.0
        self._probe_until: float | None = None

    def fit(self, now: float) -> bool:
        """What to tell people: nothing speaks against it. Changes nothing."""
        return self.closed or now >= self._failed_at + FORGOTTEN_SECONDS

    def may_try(self, now: float) -> bool:
        """Whether a request may go there. A yes while it is open takes the one probe."""
        if self.closed:
            return True
        if now < self._retry_at or (self._probe_until is not None and now < self._probe_until):
            return False
        self._probe_until = now + PROBE_SECONDS
        return True

    def ok(self) -> None:
        """It answered: whatever was held against it is forgotten."""
        self._failures = 0
        self._wait = FIRST_WAIT
        self._probe_until = None

    def failed(self, now: float) -> None:
        """It refused, broke or kept silent."""
        self._failed_at = now
        if self.closed:
            self._failures += 1
            self._retry_at = now + self._wait
        elif self._probe_until is not None:
            self._probe_until = None
            self._wait = min(self._wait * 2, LONGEST_WAIT)
            self._retry_at = now + self._wait

    @property
    def closed(self) -> bool:
        return self._failures < FAILURES

    def __repr__(self) -> str:
        if self.closed:
            return "closed" if not self._failures else f"closed, failures in a row: {self._failures}"
        return f"{'open' if self._probe_until is None else 'probing'}, tried again after {self._wait:g} s"
