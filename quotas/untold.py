"""What a quota store is still to be told: settlements that it may have missed, and what ended here without it. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from uuid import uuid4

from quotas import windows
from quotas.books import REMEMBER
from quotas.policy import Limit
from quotas.store import Account
from quotas.windows import SECOND


@dataclass(frozen=True, slots=True)
class Debt:
    """What the store is still to be told, as it is handed to a successor: a settlement, or (`primary` not None) tokens to be
    charged on the primary, or in the cap alone. `ended`: the newest of it, in seconds of the store's time."""

    account: Account
    lease: str
    tokens: int
    primary: bool | None
    ended: float


@dataclass(frozen=True, slots=True)
class Owed:
    """A settlement that the store may have missed; not worth telling after `until`."""

    account: Account
    lease: str
    consumed: int
    until: float


@dataclass(slots=True, eq=False)
class Spent:
    """What ended here and the store does not know, in windows as long as the account's longest. `since_filled`: it was left
    out of what the slot was filled with."""

    account: Account
    rate: windows.Window | None = field(init=False)
    cap: windows.Window | None = field(init=False)
    names: dict[bool, str] = field(default_factory=lambda: {primary: f"away-{uuid4()}" for primary in (True, False)})
    newest: int = 0
    since_filled: bool = False

    def __post_init__(self) -> None:
        self.rate = _longest(scope.policy.rate for scope in self.account.scopes)
        self.cap = _longest(scope.policy.cap for scope in self.account.scopes)

    def add(self, now: int, tokens: int, *, primary: bool) -> None:
        self.newest = max(self.newest, now)
        for window in (self.rate if primary else None, self.cap):
            if window is not None:
                window.slide(now)
                window.add(now, tokens)

    def tokens(self, now: int, since: int = 0) -> dict[bool, int]:
        """What still counts of it and ended after `since`: on the primary, and in the cap alone."""
        rate, cap = (_sum(window, now, since) for window in (self.rate, self.cap))
        return {True: rate, False: max(0, cap - rate)}


class Untold:
    """Moments are seconds by our own clock. A settlement is known by its slot and its lease."""

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._owed: dict[tuple[str, str], Owed] = {}
        self._spent: dict[Spent, None] = {}
        self._open: dict[Account, Spent] = {}  # those of them to which more may be added

    def __bool__(self) -> bool:
        return bool(self._owed or self._spent)

    def __len__(self) -> int:
        """How many settlements are owed."""
        return len(self._owed)

    @property
    def slots(self) -> set[str]:
        """Of which something is to be told."""
        return {slot for slot, _ in self._owed} | {spent.account.slot for spent in self._spent}

    # ---- settlements

    def owe(self, account: Account, lease: str, consumed: int, now: float) -> None:
        until = now + self._lease_seconds + REMEMBER / SECOND
        self._owed[account.slot, lease] = Owed(account, lease, consumed, until)

    @property
    def settlements(self) -> list[Owed]:
        return list(self._owed.values())

    def settled(self, owed: Owed) -> None:
        """It was told; one that was added for the same lease meanwhile was not."""
        if self._owed.get((owed.account.slot, owed.lease)) is owed:
            del self._owed[owed.account.slot, owed.lease]

    def take_settlement(self, slot: str, lease: str) -> Owed | None:
        """It is to be told otherwise."""
        return self._owed.pop((slot, lease), None)

    # ---- what ended here

    def spend(self, account: Account, now: float, tokens: int, *, primary: bool) -> None:
        spent = self._open.get(account)
        if spent is None:
            spent = self._open[account] = Spent(account)
            self._spent[spent] = None
        spent.add(round(now * SECOND), max(0, tokens), primary=primary)

    @property
    def spendings(self) -> list[Spent]:
        return list(self._spent)

    def spent_of(self, slot: str) -> list[Spent]:
        """What ended in the slot, from now on without what ends later."""
        self._open = {account: spent for account, spent in self._open.items() if account.slot != slot}
        return [spent for spent in self._spent if spent.account.slot == slot]

    def close(self, spent: Spent) -> None:
        """Nothing more is added to it."""
        if self._open.get(spent.account) is spent:
            del self._open[spent.account]

    def still(self, spent: Spent) -> bool:
        return spent in self._spent

    def told(self, spent: Spent) -> None:
        self._spent.pop(spent, None)

    # ---- handed over to a successor

    def debts(self, now: float, ahead: Callable[[str], float]) -> Iterator[Debt]:
        """All of it; `ahead`: by how many seconds a slot's clock at the store is before ours."""
        for owed in self._owed.values():
            yield Debt(owed.account, owed.lease, owed.consumed, None, now + ahead(owed.account.slot))
        for spent in self._spent:
            ended = spent.newest / SECOND + ahead(spent.account.slot)
            for primary, tokens in spent.tokens(round(now * SECOND)).items():
                if tokens:
                    yield Debt(spent.account, spent.names[primary], tokens, primary, ended)

    def take_on(self, debt: Debt, now: float, ahead: float) -> None:
        if debt.primary is None:
            self.owe(debt.account, debt.lease, debt.tokens, now)
            return
        spent = Spent(debt.account, names={debt.primary: debt.lease})
        spent.add(round((debt.ended - ahead) * SECOND), debt.tokens, primary=debt.primary)
        self._spent[spent] = None


def _longest(limits: Iterable[Limit | None]) -> windows.Window | None:
    longest = max((limit for limit in limits if limit is not None), key=lambda limit: limit.seconds, default=None)
    return None if longest is None else windows.Window(longest.seconds * SECOND, longest.slot * SECOND)


def _sum(window: windows.Window | None, now: int, since: int) -> int:
    if window is None:
        return 0
    window.slide(now)
    return sum(tokens for index, tokens in window.slots.items() if (index + 1) * window.slot > since)
