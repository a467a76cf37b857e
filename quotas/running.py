"""The leases that run in this process, and how much of each the store knows. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quotas.store import Account


@dataclass(slots=True, eq=False)
class Running:
    """One of them. All figures count from its admission; the store, or this sidecar's own books, may have learned of it
    later, and count from `base` or `local_base` on. `at_inner`: the store knows it. `told`: when, by our clock, the store was
    last asked about it and knew it. `local_base` is None while the own books do not know it. `beyond`: the own books let it
    have more than it holds at the store, so that it still lives on this sidecar's share."""

    account: Account
    lease: str
    primary: bool
    covered: int
    at_inner: bool
    told: float
    consumed: int = 0
    base: int = 0
    local_base: int | None = None
    beyond: bool = False

    def leave(self) -> None:
        """The store does not know it, or not any more."""
        self.base, self.at_inner = 0, False


class RunningLeases:
    """By name. Those whose settlement is under way are kept beside the others."""

    def __init__(self) -> None:
        self._running: dict[str, Running] = {}
        self._settling: dict[str, Running] = {}

    def __iter__(self) -> Iterator[Running]:
        return iter(list(self._running.values()))

    def get(self, lease: str) -> Running | None:
        return self._running.get(lease)

    def add(self, known: Running) -> None:
        """One that is known already goes on as it was."""
        self._running.setdefault(known.lease, known)

    def take(self, lease: str) -> Running | None:
        return self._running.pop(lease, None)

    def still(self, known: Running) -> bool:
        return self._running.get(known.lease) is known

    def settling(self, known: Running) -> None:
        self._settling[known.lease] = known

    def settled(self, known: Running) -> None:
        self._settling.pop(known.lease, None)

    def of(self, slot: str) -> list[Running]:
        return [known for known in self._running.values() if known.account.slot == slot]

    def unsettled(self, slot: str) -> dict[str, Running]:
        """Those of a slot whose end the store was not told, as far as is known."""
        running = {**self._settling, **self._running}
        return {lease: known for lease, known in running.items() if known.account.slot == slot}
