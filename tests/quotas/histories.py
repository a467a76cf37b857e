"""Generated histories of a quota store, and the monitors that watch its answers.

A history is a list of steps. Every step is played on one or more stores, whose answers must be the same, and told to one
monitor a scope (and a target's rate), each of which knows the exact windows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from hypothesis import strategies as st

from quotas.policy import Limit, Policy, problems
from quotas.store import Account, Ask, Progress, QuotaStore, Scope, Target, Verdict, View
from tests.quotas import monitor
from tests.quotas.monitor import Monitor, RuleBroken

TICK = 1 / 64
"""All moments are multiples of this: exact in binary, so that the monitor's seconds and the stores' microseconds agree."""

_serial = itertools.count()


@dataclass
class Clock:
    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


# ---- what is generated ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wait:
    ticks: int


@dataclass(frozen=True)
class Admit:
    account: int
    ask: Ask  # its lease is named when it is played


@dataclass(frozen=True)
class Spend:
    """One request from its admission to its end, at one moment."""

    account: int
    ask: Ask
    percent: int  # of what it was expected to use


@dataclass(frozen=True)
class AdmitAgain:
    lease: int


@dataclass(frozen=True)
class Report:
    lease: int
    more: int
    extend: int | None


@dataclass(frozen=True)
class Settle:
    lease: int
    more: int


@dataclass(frozen=True)
class Renew:
    leases: tuple[int, ...]


@dataclass(frozen=True)
class Peek:
    account: int


@dataclass(frozen=True)
class Retune:
    """The caps' tokens and the parallel limits change; running leases feel it at their next extension."""

    cap: int
    parallel: int | None


Step = Wait | Admit | Spend | AdmitAgain | Report | Settle | Renew | Peek | Retune


@dataclass(frozen=True)
class History:
    keys: tuple[Policy, ...]
    team: Policy | None
    steps: tuple[Step, ...]


def limits(seconds: Sequence[int], most: int) -> st.SearchStrategy[Limit]:
    tokens = st.integers(-most // 10, most).map(lambda number: max(0, number))
    return st.builds(Limit, tokens, st.sampled_from(seconds))


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    rate = draw(st.none() | limits((1, 2, 7, 59, 60, 90, 400), 3_000))
    burst = draw(st.none() | limits((1, 5, 20, 130), 6_000))
    cap = draw(st.none() | limits((1, 60, 361, 3_600, 7_205), 20_000))
    if rate and burst:
        burst = replace(burst, tokens=max(burst.tokens, rate.tokens, 1))
    if rate and cap and cap.tokens:
        cap = replace(cap, tokens=max(cap.tokens, rate.tokens))
    if burst and not burst.tokens:
        burst = None
    policy = Policy(rate, burst, cap, draw(st.none() | st.integers(0, 5) | st.integers(2, 5)))
    assert not problems(policy)
    return policy


usual = st.builds(
    Policy,
    st.just(Limit(2_000, 60)),
    st.sampled_from([None, Limit(4_000, 5)]),
    st.sampled_from([None, Limit(5_000, 3_600), Limit(2_000, 60)]),
    st.sampled_from([None, 3]),
)

targets = st.lists(
    st.builds(
        Target, st.sampled_from(["cheap", "ché:p}"]), limits((10, 60), 1_500) | limits((10, 60), 1_500) | st.none()
    ),
    max_size=2,
    unique_by=lambda target: target.name,
).map(tuple)


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    least = draw(st.integers(1, 40) | st.integers(1, 600))
    first_hold = least + draw(st.integers(100, 900))
    ceiling = first_hold + draw(st.sampled_from([0, 0, 300, 5_000]))
    return Ask(
        lease="",
        expected=draw(st.just(first_hold) | st.integers(1, ceiling) | st.integers(1, least)),
        first_hold=first_hold,
        ceiling=ceiling,
        least=least,
        on_cap=draw(st.sampled_from(["clamp", "clamp", "refuse"])),
        primary=draw(st.sampled_from([True] * 9 + [False])),
        targets=draw(st.just(()) | st.just(()) | targets),
    )


waits = st.sampled_from(
    [1, 32, 64, 64, 64, 64, 200, 200, 320, 320, 500, 800, 1_280, 1_985, 3_900, 8_000, 25_600, 41_600, 240_000]
)
some_lease = st.integers(-5, -1)  # one of the last opened
one_key = st.sampled_from([0, 0, 0, 1])
steps: st.SearchStrategy[Step] = st.one_of(
    st.builds(Wait, waits),
    st.builds(Admit, one_key, asks()),
    st.builds(Admit, one_key, asks()),
    st.builds(Spend, one_key, asks(), st.sampled_from([0, 50, 100, 100, 150, 300])),
    st.builds(Spend, one_key, asks(), st.sampled_from([100, 100, 100, 200])),
    st.builds(Spend, one_key, asks(), st.sampled_from([100, 100, 100, 200])),
    st.builds(AdmitAgain, some_lease),
    st.builds(Report, some_lease, st.integers(-20, 900), st.none() | st.integers(0, 900)),
    st.builds(Report, some_lease, st.integers(0, 90), st.none() | st.integers(0, 300)),
    st.builds(Settle, some_lease, st.integers(-20, 900)),
    st.builds(Renew, st.lists(some_lease, max_size=3).map(tuple)),
    st.builds(Peek, one_key),
    st.builds(Retune, st.integers(1, 20_000), st.none() | st.integers(0, 5)) | st.builds(Wait, waits),
)

histories = st.builds(
    History,
    st.tuples(usual | usual | policies(), usual | policies()),
    st.none() | st.none() | usual | policies(),
    st.lists(steps, min_size=25, max_size=60).map(tuple),
)


# ---- playing it -------------------------------------------------------------------------------------------------------


@dataclass
class _Opened:
    """A lease as its owner knows it."""

    name: str
    account: int
    ask: Ask
    expected: int
    target: str | None = None
    consumed: int = 0


@dataclass
class Play:
    """Plays a history on stores that share one clock, and watches."""

    history: History
    stores: Sequence[QuotaStore]
    clock: Clock
    opened: list[_Opened] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slot = f"play {next(_serial)}"
        self.policies = dict(enumerate(self.history.keys)) | ({"team": self.history.team} if self.history.team else {})
        self.monitors = {who: Monitor(exact(policy)) for who, policy in self.policies.items()}
        self.targets: dict[tuple[int, str], Monitor] = {}
        self.rates: dict[tuple[int, str], Target] = {}

    async def run(self) -> None:
        for step in self.history.steps:
            await self._step(step)
        for account in (0, 1):
            await self._peek(Peek(account))

    async def _step(self, step: Step) -> None:
        match step:
            case Wait(ticks):
                self.clock.now += ticks * TICK
            case Admit(account, ask):
                await self._admit(account, replace(ask, lease=f"lease {len(self.opened)}"))
            case Spend(account, ask, percent):
                if await self._admit(account, replace(ask, lease=f"lease {len(self.opened)}")):
                    await self._settle(Settle(-1, self.opened[-1].expected * percent // 100))
            case AdmitAgain():
                await self._admit_again(step)
            case Report():
                await self._report(step)
            case Settle():
                await self._settle(step)
            case Renew(leases):
                await self._renew([self._lease(index) for index in leases if self.opened])
            case Peek():
                await self._peek(step)
            case Retune():
                self._retune(step)

    def account(self, key: int) -> Account:
        scopes = [Scope("key", f"key {key}", self.policies[key])]
        if "team" in self.policies:
            scopes.append(Scope("team", "the team", self.policies["team"]))
        return Account(f"{self.slot} {'' if len(scopes) == 2 else key}", tuple(scopes))

    def watching(self, key: int) -> list[Monitor]:
        return [self.monitors[who] for who in (key, "team") if who in self.monitors]

    def target(self, key: int, target: Target) -> Monitor:
        """The monitor of a target's own rate; a changed rate is another target here (its debt would be another)."""
        assert target.rate is not None
        rule = exact(Policy(rate=target.rate, burst=None, cap=None, max_parallel=None))
        return self.targets.setdefault((key, target.name), Monitor(rule))

    async def _admit(self, key: int, ask: Ask) -> bool:
        ask = replace(ask, targets=tuple(self._known(key, target) for target in ask.targets))
        verdict = same([comparable(await store.admit(self.account(key), ask)) for store in self.stores])
        if not verdict.admitted:
            self._refused(key, ask, verdict)
            return False
        self.opened.append(_Opened(ask.lease, key, ask, verdict.expected, verdict.target))
        self._check_lowered(key, ask, verdict)
        said = verdict.answers if verdict.kind != "overflow" else ("overflow",) * len(self.watching(key))
        self._check_overage(key, verdict)
        for watcher, mine in zip(self.watching(key), said, strict=True):
            watcher.admitted(self.clock.now, ask.lease, mine, verdict.expected, verdict.hold)
        for target in ask.targets:
            if target.name == verdict.target and target.rate is not None:
                self.target(key, target).admitted(self.clock.now, ask.lease, "base", verdict.expected, verdict.hold)
        return True

    def _known(self, key: int, target: Target) -> Target:
        """One name, one rate: the first that was generated for it."""
        return self.rates.setdefault((key, target.name), target)

    def _check_lowered(self, key: int, ask: Ask, verdict: Verdict) -> None:
        for given, asked in ((verdict.hold, ask.first_hold), (verdict.ceiling, ask.ceiling)):
            fits = all(watcher._cap_fits(self.clock.now, given + 1, slack=True) for watcher in self._ticked(key))
            if given > asked or (given < asked and fits):
                raise RuleBroken(f"{given} of {asked} at {self.clock.now}, though more fits even with a longer slot")

    def _ticked(self, key: int) -> list[Monitor]:
        for watcher in self.watching(key):
            watcher._expire(self.clock.now)
        return self.watching(key)

    def _check_overage(self, key: int, verdict: Verdict) -> None:
        for watcher, said in zip(self.watching(key), verdict.answers, strict=bool(verdict.answers)):
            if said == "no":
                watcher.overage(self.clock.now, verdict.expected)

    def _refused(self, key: int, ask: Ask, verdict: Verdict) -> None:
        watcher = self.watching(key)[0 if verdict.scope == "key" else 1]
        if verdict.kind == "parallel":
            watcher.refused_by_parallel(self.clock.now)
        elif verdict.kind == "cap":
            watcher.refused_by_cap(self.clock.now, ask.cap_need)
        else:
            self._check_overage(key, verdict)
            for target in ask.targets:
                assert target.rate is not None, "a target without a rate takes everything"
                self.target(key, target).overage(self.clock.now, verdict.expected)
        self._check_retry(key, ask, verdict)

    def _check_retry(self, key: int, ask: Ask, verdict: Verdict) -> None:
        """The named moment, in both directions; where a lowered ceiling would lower what is expected, only the store
        itself can say (see `comes_true`)."""
        self._check_hopeless(key, ask, verdict)
        known = verdict.retry_after is not None and not verdict.guess
        if known and (ask.expected <= ask.cap_need or ask.on_cap == "refuse"):
            now, then = self.clock.now, self.clock.now + verdict.retry_after
            if not self._fits(key, ask, then, slack=False):
                raise RuleBroken(f"retry after {verdict.retry_after} at {now}: it will not fit then")
            if verdict.retry_after > 1 and self._fits(key, ask, then - 1, slack=True):
                raise RuleBroken(f"retry after {verdict.retry_after} at {now}: it fits a second sooner")

    def _check_hopeless(self, key: int, ask: Ask, verdict: Verdict) -> None:
        """Blocked or impossible is what would not even fit after all is forgotten, and nothing else."""
        hopeless = verdict.blocked or verdict.impossible
        assert hopeless == (verdict.retry_after is None)
        caps = [watcher.policy.cap.tokens for watcher in self.watching(key) if watcher.policy.cap]
        ask = replace(ask, expected=min(ask.expected, *caps, ask.ceiling))
        if ask.primary or ask.targets:
            assert hopeless == (not self._fits(key, ask, self.clock.now + 1e9, slack=False))

    def _fits(self, key: int, ask: Ask, then: float, *, slack: bool) -> bool:
        """`Monitor.retry_after`'s question, asked of all scopes and targets together."""
        overflow = any(
            target.rate is None
            or self.target(key, target)._would_fit(then, ask.expected, 0, slack=slack, overflow=False)
            for target in ask.targets
        )
        over = overflow or not ask.primary
        fits = [
            watcher._would_fit(then, ask.expected, ask.cap_need, slack=slack, overflow=over)
            for watcher in self.watching(key)
        ]
        return all(fits) and (overflow or ask.primary)

    async def _admit_again(self, step: AdmitAgain) -> None:
        if not self.opened:
            return
        lease = self._lease(step.lease)
        if all(lease.name in watcher.leases for watcher in self._ticked(lease.account)):
            verdict = same(
                [comparable(await store.admit(self.account(lease.account), lease.ask)) for store in self.stores]
            )
            assert verdict.admitted
            assert verdict.target == lease.target

    def _lease(self, back: int) -> _Opened:
        return self.opened[max(back, -len(self.opened))]

    def _watchers(self, lease: _Opened) -> list[Monitor]:
        found = self.watching(lease.account)
        if (lease.account, lease.target) in self.targets:
            found.append(self.targets[lease.account, lease.target or ""])
        return found

    async def _report(self, step: Report) -> None:
        if not self.opened:
            return
        lease = self._lease(step.lease)
        consumed = max(0, lease.consumed + step.more)
        extend = None if step.extend is None else consumed + step.extend
        account = self.account(lease.account)
        told = same([await store.progress(account, lease.name, consumed, extend) for store in self.stores])
        self._check_progress(lease, told, consumed, extend)
        if not told.expired:
            lease.consumed = max(lease.consumed, consumed)

    def _check_progress(self, lease: _Opened, told: Progress, consumed: int, extend: int | None) -> None:
        now, scopes = self.clock.now, self._ticked(lease.account)
        assert told.expired == (lease.name not in scopes[0].leases)
        for watcher in self._watchers(lease):
            watcher.progressed(now, lease.name, consumed, extend if told.extended and watcher in scopes else None)
        if told.expired:
            return
        mine = scopes[0].leases[lease.name]
        assert told.covered == mine.consumed + mine.cap_hold
        assert told.left == 0 or all(watcher._cap_fits(now, told.left, slack=False) for watcher in scopes)
        if extend is not None and not told.extended:
            more = max(0, extend - mine.consumed - mine.cap_hold)
            if all(watcher._cap_fits(now, more, slack=True) for watcher in scopes):
                raise RuleBroken(f"{lease.name} not extended to {extend} at {now}, but it fits with a longer slot")

    async def _settle(self, step: Settle) -> None:
        if not self.opened:
            return
        lease = self._lease(step.lease)
        consumed = max(0, lease.consumed + step.more)
        for store in self.stores:
            await store.settle(self.account(lease.account), lease.name, consumed)
        for watcher in self._watchers(lease):
            watcher.finished(self.clock.now, lease.name, consumed)

    async def _renew(self, leases: list[_Opened]) -> None:
        for store in self.stores:
            await store.renew([(self.account(lease.account), lease.name) for lease in leases])
        for lease in leases:
            for watcher in self._watchers(lease):
                watcher.progressed(self.clock.now, lease.name, 0)

    async def _peek(self, step: Peek) -> None:
        view = same([shown(await store.peek(self.account(step.account))) for store in self.stores])
        for kind, who in (("key", step.account), ("team", "team")):
            if who in self.monitors:
                self._check_view(view, kind, self.monitors[who])
        assert {lease.lease for lease in view.leases} == set(self.monitors[step.account].leases)

    def _check_view(self, view: View, kind: str, watcher: Monitor) -> None:
        """Higher by at most what one slot holds, never lower; holds exact; what remains within 0 and the limit."""
        now, counts = self.clock.now, watcher.counts(self.clock.now)
        for window in (window for window in view.windows if window.scope == kind):
            exactly, held, slack = {
                "minute": (
                    counts["rate_used"],
                    counts["rate_held"],
                    watcher._rate_used(now, watcher.policy.rate, True),
                ),
                "burst": (
                    watcher._rate_used(now, watcher.policy.repay),
                    counts["rate_held"],
                    watcher._rate_used(now, watcher.policy.repay, True),
                ),
                "hour": (counts["cap_used"], counts["cap_held"], watcher._cap_used(now, True)),
            }[window.name]
            assert exactly <= window.used <= slack
            assert window.held == held
            assert 0 <= window.remaining <= max(0, window.limit - exactly - held)
            assert window.reset_seconds >= 0

    def _retune(self, step: Retune) -> None:
        for who, policy in self.policies.items():
            cap = policy.cap and replace(policy.cap, tokens=step.cap)
            self.policies[who] = replace(policy, cap=cap, max_parallel=step.parallel)
            self.monitors[who].policy = exact(self.policies[who])


def exact(policy: Policy) -> monitor.Policy:
    """A policy as the monitor knows it."""

    def window(limit: Limit | None) -> monitor.Window | None:
        return None if limit is None else monitor.Window(limit.tokens, limit.seconds, limit.slot)

    return monitor.Policy(window(policy.rate), window(policy.burst), window(policy.cap), policy.max_parallel)


Told = TypeVar("Told")


def same(answers: list[Told]) -> Told:
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]


def comparable(verdict: Verdict) -> Verdict:
    """Without the jitter of a guess."""
    return replace(verdict, retry_after=1.0) if verdict.guess else verdict


def shown(view: View) -> View:
    """Leases in order; whether the slot is still marked after a long silence goes by Redis' own clock."""
    return replace(view, seeded=True, leases=tuple(sorted(view.leases, key=lambda lease: lease.lease)))
