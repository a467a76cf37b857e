"""What one sidecar decides by itself while nobody else knows: its share of what was left when it last saw.

Of each window it spends at most its share of what was left of it; an account that it never saw is taken as unused. Where
the share is None there are no limits at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil

from quotas.memory import MemoryStore
from quotas.policy import UNLIMITED, Limit, Policy
from quotas.store import Account, Ask, Progress, Scope, ScopeKind, Unseeded, Verdict, Window

SCOPES_SEEN = 10_000
"""Of so many keys and teams, those last heard of, the windows are remembered."""

_Owner = tuple[str, ScopeKind, str]
"""Whose windows were seen: a slot, and a key or team there, whatever its policies."""


class Alone:
    """`share`: this sidecar's part of every limit, 0 to 1, or None for no limits. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float], lease_seconds: float, share: Callable[[], float | None]) -> None:
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._share = share
        self._seen: dict[_Owner, tuple[float, Sequence[Window]]] = {}
        self._resumed: set[_Owner] = set()  # a team's windows are resumed once for all its keys
        self._asked: dict[str, dict[str, Account]] = {}  # slot -> key -> who spends from here
        self._books = MemoryStore(clock, lease_seconds)

    def asked(self, slot: str | None = None) -> list[Account]:
        """Who was decided here since the store answered last."""
        slots = self._asked.values() if slot is None else [self._asked.get(slot, {})]
        return [account for accounts in slots for account in accounts.values()]

    def saw(self, account: Account, shown: Sequence[Window]) -> None:
        """Remembers an account's windows as the store showed them."""
        for scope in account.scopes:
            owner = _owner(account, scope)
            self._seen.pop(owner, None)  # so that the last heard of stands last
            self._seen[owner] = (self._clock(), shown)
        while len(self._seen) > SCOPES_SEEN:
            del self._seen[next(iter(self._seen))]

    async def admit(self, account: Account, ask: Ask) -> Verdict:
        try:
            return await self._books.admit(self._resume(account), ask)
        except Unseeded:  # idle for so long that all of it was forgotten
            await self.forget(account.slot)
            return await self._books.admit(self._resume(account), ask)

    async def adopt(self, account: Account, lease: str, *, primary: bool) -> None:
        """Opens an empty lease for what began elsewhere: only what goes beyond its hold there is spent from the share."""
        await self.admit(account, Ask(lease, 0, 0, 0, 0, primary=primary, forced=True))

    async def progress(self, account: Account, lease: str, consumed: int, extend_to: int | None) -> Progress:
        return await self._books.progress(self._resume(account), lease, consumed, extend_to)

    async def settle(self, account: Account, lease: str, consumed: int) -> None:
        await self._books.settle(self._stand_in(account), lease, consumed)

    async def renew(self, leases: list[tuple[Account, str]]) -> None:
        await self._books.renew([(self._stand_in(account), lease) for account, lease in leases])

    async def forget(self, slot: str) -> None:
        """The store answers for this slot again."""
        await self._books.forget(slot)
        self._asked.pop(slot, None)
        self._resumed = {resumed for resumed in self._resumed if resumed[0] != slot}

    def forget_all(self) -> None:
        """The store answers again."""
        self._books = MemoryStore(self._clock, self._lease_seconds)
        self._resumed.clear()
        self._asked.clear()

    def _stand_in(self, account: Account) -> Account:
        """The account with the limits that hold here."""
        share = self._share()
        scopes = (replace(scope, policy=_share_of(scope.policy, share)) for scope in account.scopes)
        return replace(account, scopes=tuple(scopes))

    def _resume(self, account: Account) -> Account:
        stand_in = self._stand_in(account)
        fresh = [scope for scope in account.scopes if _owner(account, scope) not in self._resumed]
        if fresh:
            self._asked.setdefault(account.slot, {})[account.scopes[0].name] = account
            self._resumed |= {_owner(account, scope) for scope in fresh}
            share = self._share()
            windows = [] if share is None else [window for scope in fresh for window in self._lasting(account, scope)]
            self._books.resume(stand_in, (_scaled(window, share or 0.0) for window in windows))
        return stand_in

    def _lasting(self, account: Account, scope: Scope) -> list[Window]:
        """What was seen of a scope, last by any of its keys, and has not slid out meanwhile."""
        moment, shown = self._seen.get(_owner(account, scope), (0.0, ()))
        age = self._clock() - moment
        return [
            window
            for window in shown
            if window.scope == scope.kind
            and (window.name == "burst" or max(window.reset_seconds, self._lease_seconds) > age)
        ]


def _owner(account: Account, scope: Scope) -> _Owner:
    return account.slot, scope.kind, scope.name


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


def _scaled(window: Window, share: float) -> Window:
    limit = int(window.limit * share)
    used = min(limit, ceil((window.used + window.held) * share))
    return replace(window, limit=limit, used=used, held=0, remaining=int(window.remaining * share))
