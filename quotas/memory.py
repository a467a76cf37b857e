"""The quota store of one process: the rule over dictionaries. No call waits, so each is atomic on its event loop."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from quotas import decision
from quotas.books import MARK, Book, State, longest, recalled, seeded
from quotas.store import Account, Ask, Progress, ScopeKind, Seed, Unseeded, Verdict, View, Window
from quotas.windows import SECOND

Owner = tuple[ScopeKind, str]
"""A scope within its slot: its kind, its name."""


@dataclass(slots=True)
class _Slot:
    """A slot marked at `since`, and its scopes' books. `until` is when the mark is due to go, if nothing is asked any more."""

    since: int
    until: int
    states: dict[Owner, State] = field(default_factory=dict)


class MemoryStore:
    """Quotas for the accounts of this process alone; they are gone when it ends.

    `clock` gives seconds that never run back by more than the store can bear: a step back stands still until the newest
    moment seen is reached again. What no longer matters to any answer is forgotten.
    """

    sidecars = 1
    """How many sidecars share this store: this one."""

    def __init__(self, clock: Callable[[], float], lease_seconds: float = 30.0) -> None:
        self._clock = clock
        self._lease_span = round(lease_seconds * SECOND)
        self._slots: dict[str, _Slot] = {}
        self._serial = itertools.count()
        # one entry a scope and one a slot (without an owner), never later than the moment to forget it
        self._stale: list[tuple[int, int, str, _Slot, Owner | None]] = []

    def __repr__(self) -> str:
        states = [state for slot in self._slots.values() for state in slot.states.values()]
        return f"<MemoryStore {len(states)} scopes, {sum(state.running for state in states)} leases>"

    async def admit(self, account: Account, ask: Ask) -> Verdict:
        books, now = self._open(account)
        if not books:
            raise Unseeded(f"nothing is known of {account.slot}; seed it from what is on record")
        decided = decision.admit(books, ask, now, self._lease_span)
        return decision.verdict(books, ask, decided, now, random.random())  # noqa: S311  spreads guesses, hides nothing

    async def progress(self, account: Account, lease: str, consumed: int, extend_to: int | None = None) -> Progress:
        books, now = self._open(account)
        if not books:
            return Progress(expired=True, extended=False, covered=0, left=0)
        return decision.progress(books, lease, consumed, extend_to, now, self._lease_span)

    async def settle(self, account: Account, lease: str, consumed: int) -> bool:
        books, now = self._open(account)
        return decision.settle(books, lease, consumed, now)

    async def renew(self, leases: list[tuple[Account, str]]) -> None:
        for account, lease in leases:
            books, now = self._open(account)
            decision.renew(books, [lease], now, self._lease_span)

    async def peek(self, account: Account) -> View:
        books, now = self._open(account)
        if books:
            return replace(decision.view(books, now), since=self._slots[account.slot].since / SECOND)
        empty = [Book(scope, State()) for scope in account.scopes]
        return replace(decision.view(empty, decision.bring_to(empty, now)), seeded=False)

    async def seed(self, slot: str, seed: Seed) -> bool:
        now = self._now()
        states = []
        for each in seeded(seed, now):
            states.append(each)
            await asyncio.sleep(0)  # a large team takes a while
        if slot in self._slots:
            return False
        marked = self._mark(slot)
        for scope, state in states:
            self._put(slot, marked, (scope.kind, scope.name), state)
        return True

    async def recall(self, account: Account, seed: Seed, since: float) -> bool:
        books, now = self._open(account)
        if not books or books[0].state.recalled >= round(since * SECOND):
            return False
        books[0].state.recall(recalled(account.scopes[0], seed, now), now)
        return True

    async def forget(self, slot: str) -> None:
        self._slots.pop(slot, None)

    def places(self) -> tuple[str]:
        return ("",)

    def place_of(self, slot: str) -> str:
        return ""

    async def ping(self, place: str | None = None) -> float:
        return self._clock()

    async def close(self) -> None:
        """Nothing to let go of."""

    def resume(self, account: Account, windows: Iterable[Window]) -> None:
        """Starts the account from windows as another store showed them: what did not remain is charged at this moment."""
        if account.slot not in self._slots:
            self._mark(account.slot)
        books, now = self._open(account)
        for window in windows:
            for book in books:
                if book.scope.kind == window.scope:
                    book.state.resume(window, now)

    def _now(self) -> int:
        return round(self._clock() * SECOND)

    def _open(self, account: Account) -> tuple[list[Book], int]:
        """The account's books, brought to now; none where its slot carries no mark."""
        now = self._now()
        self._forget(now)
        slot = self._slots.get(account.slot)
        if slot is None:
            return [], now
        books = [
            Book(scope, self._state(account.slot, slot, (scope.kind, scope.name), now)) for scope in account.scopes
        ]
        now = decision.bring_to(books, now)
        slot.until = max(slot.until, now + MARK + max(longest(book.terms) for book in books))
        return books, now

    def _state(self, name: str, slot: _Slot, owner: Owner, now: int) -> State:
        state = slot.states.get(owner)
        return state if state is not None else self._put(name, slot, owner, State(seen=now))

    def _put(self, name: str, slot: _Slot, owner: Owner, state: State) -> State:
        slot.states[owner] = state
        heapq.heappush(self._stale, (state.seen, next(self._serial), name, slot, owner))
        return state

    def _mark(self, name: str) -> _Slot:
        slot = self._slots[name] = _Slot(since=self._now(), until=self._now() + MARK)
        heapq.heappush(self._stale, (slot.until, next(self._serial), name, slot, None))
        return slot

    def _forget(self, now: int) -> None:
        while self._stale and self._stale[0][0] < now:
            _, _, name, slot, owner = heapq.heappop(self._stale)
            if self._slots.get(name) is not slot:
                continue
            until = slot.until if owner is None else slot.states[owner].keep_until(self._lease_span)
            slot.until = max(slot.until, until)
            if until >= now:
                heapq.heappush(self._stale, (until, next(self._serial), name, slot, owner))
            elif owner is None:
                del self._slots[name]
            else:
                del slot.states[owner]
