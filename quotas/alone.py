"""What one sidecar decides by itself while nobody else knows: its share of what was left when it last saw.

Of each window it spends at most its share of what was left of it; an account that it never saw is taken as unused. What it
spends counts against that share until the store was told of it and was seen again, however often it answers meanwhile; what
the store shows meanwhile counts besides. Where the share is None there are no limits at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from quotas.books import Book, State
from quotas.decision import view
from quotas.memory import MemoryStore
from quotas.policy import UNLIMITED, Limit, Policy
from quotas.store import Account, Ask, Progress, Scope, ScopeKind, Unseeded, Verdict, Window, WindowName
from quotas.windows import SECOND

SCOPES_SEEN = 10_000
"""Of so many keys and teams, those last heard of, the windows are remembered."""

_Owner = tuple[str, ScopeKind, str]
"""Whose windows were seen: a slot, and a key or team there, whatever its policies."""


@dataclass(slots=True)
class _Seen:
    """Windows as the store showed them at a moment, and what was held there by running leases since."""

    at: float
    windows: Sequence[Window]
    held_since: int = 0


@dataclass(slots=True)
class _Counted:
    """Of what was seen of a window so many tokens are charged in the own books, the first at a moment."""

    at: float
    tokens: int = 0


@dataclass(slots=True)
class _Slot:
    """Who spends from here in a slot, by key; and what is counted of what was seen of each."""

    spenders: dict[str, Account] = field(default_factory=dict)
    counted: dict[_Owner, dict[WindowName, _Counted]] = field(default_factory=dict)


class Alone:
    """`share`: this sidecar's part of every limit, 0 to 1, or None for no limits. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float], lease_seconds: float, share: Callable[[], float | None]) -> None:
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._share = share
        self._seen: dict[_Owner, _Seen] = {}
        self._asked: dict[str, int] = {}  # what the store is being asked for, by slot
        self._slots: dict[str, _Slot] = {}
        self._books = MemoryStore(clock, lease_seconds)

    @property
    def slots(self) -> list[str]:
        """In which something was decided here, of which the store may not know all."""
        return list(self._slots)

    def spends(self, slot: str) -> bool:
        return slot in self._slots

    def spenders(self, slot: str) -> list[Account]:
        """Who was decided here, in a slot."""
        return list(self._slots[slot].spenders.values()) if slot in self._slots else []

    def saw(self, account: Account, shown: Sequence[Window]) -> None:
        """Remembers an account's windows as the store showed them."""
        for scope in account.scopes:
            owner = _owner(account, scope)
            self._seen.pop(owner, None)  # so that the last heard of stands last
            self._seen[owner] = _Seen(self._clock(), shown)
        if (slot := self._slots.get(account.slot)) is not None:
            self._count(account, [scope for scope in account.scopes if _owner(account, scope) in slot.counted])
        while len(self._seen) > SCOPES_SEEN:
            del self._seen[next(iter(self._seen))]

    def asking(self, slot: str, tokens: int) -> None:
        """The store is asked to let so many more be held in a slot (below 0: it answered, or did not)."""
        self._asked[slot] = self._asked.get(slot, 0) + tokens
        if not self._asked[slot]:
            del self._asked[slot]

    def extended(self, account: Account, tokens: int) -> None:
        """A running lease holds so much more at the store since its windows were seen."""
        for scope in account.scopes:
            if (seen := self._seen.get(_owner(account, scope))) is not None:
                seen.held_since += tokens

    async def admit(self, account: Account, ask: Ask) -> Verdict:
        try:
            return await self._books.admit(self._begun(account), ask)
        except Unseeded:  # idle for so long that all of it was forgotten
            await self.forget(account.slot)
            return await self._books.admit(self._begun(account), ask)

    async def adopt(self, account: Account, lease: str, *, primary: bool) -> None:
        """Opens an empty lease for what began elsewhere: only what goes beyond its hold there is spent from the share."""
        await self.admit(account, Ask(lease, 0, 0, 0, 0, primary=primary, forced=True))

    async def progress(self, account: Account, lease: str, consumed: int, extend_to: int | None) -> Progress:
        return await self._books.progress(self._begun(account), lease, consumed, extend_to)

    async def settle(self, account: Account, lease: str, consumed: int) -> None:
        await self._books.settle(self._stand_in(account), lease, consumed)

    async def renew(self, leases: list[tuple[Account, str]]) -> None:
        await self._books.renew([(self._stand_in(account), lease) for account, lease in leases])

    async def forget(self, slot: str) -> None:
        """The store was told of all that was spent in this slot, and was seen since."""
        await self._books.forget(slot)
        self._slots.pop(slot, None)

    def _stand_in(self, account: Account) -> Account:
        """The account with the limits that hold here."""
        share = self._share()
        scopes = (replace(scope, policy=_share_of(scope.policy, share)) for scope in account.scopes)
        return replace(account, scopes=tuple(scopes))

    def _begun(self, account: Account) -> Account:
        """The account's stand-in, whose books start from what was seen of it; a team's, once for all its keys."""
        slot = self._slots.setdefault(account.slot, _Slot())
        if fresh := [scope for scope in account.scopes if _owner(account, scope) not in slot.counted]:
            slot.spenders[account.scopes[0].name] = account
            self._count(account, fresh)
        return self._stand_in(account)

    def _count(self, account: Account, scopes: Sequence[Scope]) -> None:
        """Charges this sidecar's share of what was seen, as far as it is not charged yet."""
        more = [window for scope in scopes for window in self._uncounted(account, scope)]
        self._books.resume(self._stand_in(account), more)

    def _uncounted(self, account: Account, scope: Scope) -> Iterator[Window]:
        owner, share = _owner(account, scope), self._share()
        counted = self._slots[account.slot].counted.setdefault(owner, {})
        if share is None:
            return
        for window in self._lasting(owner, scope):
            charged = counted.get(window.name)
            if charged is None or charged.at + _seconds(scope.policy, window) < self._clock():
                charged = counted[window.name] = _Counted(self._clock())
            more = max(0, ceil((window.used + window.held) * share) - charged.tokens)
            charged.tokens += more
            yield replace(window, limit=more, used=more, held=0, remaining=0)

    def _lasting(self, owner: _Owner, scope: Scope) -> Iterator[Window]:
        """What was seen, last by any of a team's keys, and has not slid out meanwhile. What was held then was used since."""
        seen = self._seen.get(owner) or self._unused(scope)
        age, asked = self._clock() - seen.at, self._asked.get(owner[0], 0)
        for window in seen.windows:
            if window.scope == scope.kind:
                held = window.held + asked + (seen.held_since if window.name == "hour" else 0)
                lasts = _seconds(scope.policy, window) if held or window.name == "burst" else window.reset_seconds
                wait = max(0.0, window.reset_seconds - age)
                if lasts > age:
                    yield replace(window, held=held, reset_seconds=wait)
                elif wait:
                    yield replace(window, used=0, held=0, reset_seconds=wait)

    def _unused(self, scope: Scope) -> _Seen:
        now = self._clock()
        return _Seen(now, view([Book(scope, State())], round(now * SECOND)).windows)


def _owner(account: Account, scope: Scope) -> _Owner:
    return account.slot, scope.kind, scope.name


def _seconds(policy: Policy, window: Window) -> float:
    """How long what is charged in a window counts."""
    return (policy.repay_seconds or 0.0) if window.name == "burst" else window.seconds


def _share_of(policy: Policy, share: float | None) -> Policy:
    """A sidecar's share of every limit; of a burst at least the rate's, of a parallel limit at least one."""
    if share is None:
        return UNLIMITED

    def part(limit: Limit | None) -> Limit | None:
        return None if limit is None else Limit(int(limit.tokens * share), limit.seconds)

    burst, parallel = part(policy.burst), policy.max_parallel
    return Policy(
        rate=part(policy.rate),
        burst=burst if burst is not None and burst.tokens else None,
        cap=part(policy.cap),
        max_parallel=max(1, int(parallel * share)) if parallel else parallel,
    )
