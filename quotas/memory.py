"""The quota store of one process: the rule over dictionaries. No call waits, so each is atomic on its event loop."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable

from quotas import decision
from quotas.books import Book, State
from quotas.store import Account, Ask, Progress, Verdict, View, Window
from quotas.windows import SECOND

Owner = tuple[str, str, str]
"""A scope: its account's slot, its kind, its name."""


class MemoryStore:
    """Quotas for the accounts of this process alone; they are gone when it ends.

    `clock` gives seconds that never run back by more than the store can bear: a step back stands still until the newest
    moment seen is reached again. What no longer matters to any answer is forgotten.
    """

    def __init__(self, clock: Callable[[], float], lease_seconds: float = 30.0) -> None:
        self._clock = clock
        self._lease_span = round(lease_seconds * SECOND)
        self._states: dict[Owner, State] = {}
        self._stale: list[tuple[int, Owner]] = []  # one entry a state, never later than the moment to forget it

    def __repr__(self) -> str:
        return f"<MemoryStore {len(self._states)} scopes, {sum(s.running for s in self._states.values())} leases>"

    async def admit(self, account: Account, ask: Ask) -> Verdict:
        books, now = self._open(account)
        decided = decision.admit(books, ask, now, self._lease_span)
        return decision.verdict(books, ask, decided, now, random.random())  # noqa: S311  spreads guesses, hides nothing

    async def progress(self, account: Account, lease: str, consumed: int, extend_to: int | None = None) -> Progress:
        books, now = self._open(account)
        return decision.progress(books, lease, consumed, extend_to, now, self._lease_span)

    async def settle(self, account: Account, lease: str, consumed: int) -> None:
        books, now = self._open(account)
        decision.settle(books, lease, consumed, now)

    async def renew(self, leases: list[tuple[Account, str]]) -> None:
        for account, lease in leases:
            books, now = self._open(account)
            decision.renew(books, [lease], now, self._lease_span)

    async def peek(self, account: Account) -> View:
        books, now = self._open(account)
        return decision.view(books, now)

    async def ping(self) -> float:
        return self._clock()

    async def close(self) -> None:
        """Nothing to let go of."""

    def seed(self, account: Account, windows: Iterable[Window]) -> None:
        """Starts the account from windows as another store showed them: what did not remain is charged at this moment."""
        books, now = self._open(account)
        for window in windows:
            for book in books:
                if book.scope.kind == window.scope:
                    book.state.seed(window, now)

    def _open(self, account: Account) -> tuple[list[Book], int]:
        now = round(self._clock() * SECOND)
        self._forget(now)
        books = [Book(scope, self._state((account.slot, scope.kind, scope.name), now)) for scope in account.scopes]
        return books, decision.bring_to(books, now)

    def _state(self, owner: Owner, now: int) -> State:
        state = self._states.get(owner)
        if state is None:
            state = self._states[owner] = State(seen=now)
            heapq.heappush(self._stale, (now, owner))
        return state

    def _forget(self, now: int) -> None:
        while self._stale and self._stale[0][0] < now:
            _, owner = heapq.heappop(self._stale)
            until = self._states[owner].keep_until(self._lease_span)
            if until < now:
                del self._states[owner]
            else:
                heapq.heappush(self._stale, (until, owner))
