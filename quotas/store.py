"""The quota store's protocol: the words in which the gateway asks, and the store answers.

One implementation keeps the state in this process (`memory.py`), one where all sidecars share it (`redis.py`); both give
the same answers, and one contract suite says so. Amounts are tokens, times are seconds. Time is the store's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from quotas.policy import Limit, Policy

ScopeKind = Literal["key", "team"]
VerdictKind = Literal["base", "burst", "overflow", "parallel", "cap", "rate"]
Answer = Literal["base", "burst", "no"]
"""What one scope says about the primary route."""

WindowName = Literal["minute", "burst", "hour"]
"""Roles, whatever the seconds: the rate, the burst, the cap."""


class StoreUnavailable(Exception):
    """The store did not answer in time, or not usably. Nothing is known about whether the call took effect."""


class Unseeded(Exception):
    """The account's slot carries no mark: the store is new, or came back empty. Nothing is known about what was used.

    Whoever is told so sums what is on record, says `seed`, and asks again, whether its seed was taken or another was
    faster.
    """


@dataclass(frozen=True, slots=True)
class Scope:
    """One owner of limits: `name` is unique among scopes of its kind (a key's id, a team's name)."""

    kind: ScopeKind
    name: str
    policy: Policy


@dataclass(frozen=True, slots=True)
class Account:
    """Whose windows are asked for. All state of one account lives in one hash slot, named by `slot`.

    `slot` is the team where there is one ("team:<name>"), else the key ("key:<id>"). `scopes` are one or two, the key's first.
    """

    slot: str
    scopes: tuple[Scope, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """A cheaper route that overage may take; `rate` limits what one key may spend there (None: unlimited)."""

    name: str
    rate: Limit | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """One admission: all limits of all scopes in one atomic question.

    `expected` ≤ `ceiling`, `least` ≤ `first_hold` ≤ `ceiling`; rule.md defines each. `primary` False: only the overflow
    may serve it (the primary is down). `targets` are tried in order; none: overage is refused. `forced`: booked whatever
    the limits say, on the primary or (`primary` False) in the cap alone: tokens spent while the store was away.
    """

    lease: str
    expected: int
    first_hold: int
    ceiling: int
    least: int
    on_cap: Literal["clamp", "refuse"] = "clamp"
    primary: bool = True
    targets: tuple[Target, ...] = ()
    forced: bool = False

    @property
    def cap_need(self) -> int:
        """What the cap must have left: under `clamp` the least, under `refuse` the whole ceiling."""
        return self.least if self.on_cap == "clamp" else self.ceiling


@dataclass(slots=True)
class Window:
    """One window as it stands. `remaining` is never below 0 nor above `limit`. (Not frozen only for the time that takes.)

    `reset_seconds`: until all that is used has slid out (for `burst`: until one may be opened).
    """

    name: WindowName
    scope: ScopeKind
    limit: int
    seconds: int
    used: int
    held: int
    remaining: int
    reset_seconds: float


@dataclass(slots=True)
class Verdict:
    """The answer to an `Ask`. An admission booked a lease; a refusal changed nothing.

    Admitted: `hold` tokens are held against the cap, `ceiling` is what the answer may cost in all (lowered where the cap
    leaves less, so the output limit sent to the engine must be lowered to fit), `expected` is held against the rate on a
    primary route, `target` names the overflow taken. `answers`: what each scope said about the primary, in their order.

    Refused: `scope` says whose limit it was (for `rate`, `expected` is what found no room); `retry_after` is the first moment (seconds from now) at which the same ask
    fits if nobody says anything more, None if it never will; `guess`: only holds stand in the way, so `retry_after` is
    a guess; `impossible`: it could not fit even into empty windows; `by_holds`: the cap is full of running requests'
    holds, not of use; `blocked`: a limit of 0 refuses it, whatever happens.
    """

    kind: VerdictKind
    now: float
    hold: int = 0
    ceiling: int = 0
    expected: int = 0
    target: str | None = None
    scope: ScopeKind | None = None
    retry_after: float | None = None
    guess: bool = False
    impossible: bool = False
    by_holds: bool = False
    blocked: bool = False
    windows: Sequence[Window] = ()
    answers: tuple[Answer, ...] = ()

    @property
    def admitted(self) -> bool:
        return self.kind in ("base", "burst", "overflow")


@dataclass(frozen=True, slots=True)
class Progress:
    """The answer to `progress`. `expired`: the lease had ended, so its stream must end too.

    `covered`: tokens in all (used + held against the cap) that the lease may reach now. `left`: tokens that the cap would
    still grant beyond that, at this moment.
    """

    expired: bool
    extended: bool
    covered: int
    left: int


@dataclass(frozen=True, slots=True)
class LeaseView:
    """One running request, as `peek` shows it."""

    lease: str
    key: str
    route: Literal["primary", "overflow"]
    held: int
    charged: int
    age_seconds: float


@dataclass(frozen=True, slots=True)
class View:
    """An account as it stands: its windows (absent limits are left out) and its running leases.

    `seeded` False: its slot carries no mark, so the windows are shown empty because nothing is known of them. `since`:
    when, in seconds of the store's time, the slot was seeded.
    """

    now: float
    windows: tuple[Window, ...]
    leases: tuple[LeaseView, ...] = field(default=())
    seeded: bool = True
    since: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Past:
    """Tokens that one scope used, summed over as short a span as its windows' slots, or shorter.

    `at`, in seconds of the store's time, is the latest moment that any of them can have had (one in the future counts as
    now). `primary`: they count in the rate, the repay span and the debt too; else in the cap alone. `capped` False:
    the cap has them already.
    """

    kind: ScopeKind
    name: str
    at: float
    tokens: int
    primary: bool = True
    capped: bool = True


@dataclass(frozen=True, slots=True)
class Seed:
    """What is on record about one slot: the books that an empty store starts from.

    `scopes`: whose books to start, with the policies in force; a scope that is left out starts unused, and `past` of one
    that is not among them is not counted. `past` is in order of time, the newest last. `opened`: when, in seconds of the
    store's time, a scope's last burst was opened.
    """

    scopes: tuple[Scope, ...] = ()
    past: tuple[Past, ...] = ()
    opened: Mapping[tuple[ScopeKind, str], float] = field(default_factory=dict)


class QuotaStore(Protocol):
    """Every call may raise StoreUnavailable. A call said again changes nothing (admit by lease name, progress and
    settle by their cumulative figures), so an unclear answer may always be asked for once more.

    A slot's books count only under its mark, which `seed` sets. The mark outlives the longest window by an hour, and all
    of the slot's books; every call that finds it keeps it alive. Where it is missing, `admit` raises Unseeded (forced
    asks too), every lease is unknown, and `peek` shows nothing.
    """

    async def admit(self, account: Account, ask: Ask) -> Verdict:
        """Books a lease if every limit of every scope allows; else says which one does not. May raise Unseeded."""

    async def progress(self, account: Account, lease: str, consumed: int, extend_to: int | None = None) -> Progress:
        """Charges what was consumed so far in all, renews the lease; `extend_to`: tokens in all it wants covered.

        `account` carries the policies in force now: a lowered limit bites here, at a stream's next slice.
        """

    async def settle(self, account: Account, lease: str, consumed: int) -> bool:
        """Charges the rest, gives the holds back, deletes the lease. Final; an unknown lease is a no-op, and False."""

    async def renew(self, leases: list[tuple[Account, str]]) -> None:
        """Keeps many leases alive at once; unknown ones are passed over."""

    async def peek(self, account: Account) -> View:
        """The windows and leases as they stand, changing nothing."""

    async def seed(self, slot: str, seed: Seed) -> bool:
        """Starts the books of a slot without a mark and sets the mark, in one step; False if the slot has a mark."""

    async def recall(self, account: Account, seed: Seed, since: float) -> bool:
        """Charges one scope, which `account` has alone, what it used before its books were in this slot: `past`, each at its
        moment, and `opened`. False: the slot has no mark, or this was done at `since`, in seconds of the store's time, or
        later, so that what was seen before must be looked at again."""

    async def forget(self, slot: str) -> None:
        """Takes the slot's mark away, and with it all of its books and leases."""

    async def ping(self) -> float:
        """The store's time; reaches it."""

    async def close(self) -> None:
        """Lets go of connections. Leases stay."""
