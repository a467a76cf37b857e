"""Limits that are only tried out: asked about each request and counted, never enforced.

A tier's `shadow` limits have books of their own, in a slot of the store of their own: whatever happens to these never
touches those of the real limits. As soon as the real verdict is there they are asked the same question in the background:
nobody waits for the answer, and nobody hears of it but the counts. What fits is held and charged in these books as in the
real ones; what went to the cheaper backend, or would have gone there, counts in their cap alone; what the shadow would have
refused, or the real limits did refuse, leaves nothing in them.

While the store is away nothing is asked. What a crashed process held is booked when its lease expires, and stays so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from meter.callers.caller import Caller, CallerBook
from meter.gateway.admission import Admission, counted, planned
from meter.gateway.plan import Plan
from meter.telemetry import log
from quotas.store import Account, Ask, QuotaStore, Scope, StoreUnavailable, Target, Verdict

if TYPE_CHECKING:
    from meter.gateway.exchange import Gateway

CHEAPER = (Target("shadow"),)
"""Stands for whatever cheaper backend the request may take: it counts in the cap alone."""


def account_of(caller: Caller) -> Account | None:
    """The books of a caller's shadow limits; None where nothing is tried out."""
    terms = caller.tier.shadow
    if terms is None or (terms.rate is None and terms.cap is None):
        return None
    return Account(f"shadow:{caller.key_id}", (Scope("key", caller.key_id, terms.policy),))


def _beside(lease: str) -> str:
    """The name of the lease in the shadow's books: who looks after all leases must tell the two apart."""
    return f"{lease}~shadow"


@dataclass(frozen=True, slots=True)
class _Beside:
    """What runs beside a lease of the real books. `booked`: whether the shadow's books have a lease too."""

    key_id: str
    account: Account
    lease: str
    booked: asyncio.Task[bool]


class Shadows:
    """One per process. `up`: whether the store answers at the moment. No call waits, none fails."""

    def __init__(self, store: QuotaStore, callers: CallerBook, up: Callable[[], bool]) -> None:
        self._store = store
        self._callers = callers
        self._up = up
        self._running: dict[str, _Beside] = {}
        self._tasks: set[asyncio.Task[bool]] = set()

    # ---- what the life of a request tells ----------------------------------------------------------------------------

    def ask(self, gateway: Gateway, admission: Admission, *, primary: bool) -> None:
        """Asks about a request whose real verdict is there. It is counted once, when it asks for the primary route."""
        caller, lease = admission.wanted.caller, str(admission.lease)
        account = account_of(caller)
        if account is None or not self._up():
            return
        booked = self._later(self._asked(gateway, admission, account, primary=primary))
        if admission.verdict.admitted:
            self._running[lease] = _Beside(caller.key_id, account, _beside(lease), booked)

    def progress(self, lease: str, used: int, extend_to: int) -> None:
        """What a running stream used and wants: the shadow's books follow, and never end it."""
        if (beside := self._running.get(lease)) is not None:
            self._later(self._progressed(beside, used, extend_to))

    def settle(self, lease: str, consumed: int) -> None:
        """The end of a lease of the real books, whether anything runs beside it or not."""
        if (beside := self._running.pop(lease, None)) is not None:
            self._later(self._settled(beside, consumed))

    def leases(self) -> list[tuple[Account, str]]:
        """What is to be renewed."""
        return [(self._account_now(beside), beside.lease) for beside in self._running.values()]

    async def stop(self, seconds: float) -> None:
        """Waits for calls under way, at most `seconds`; what is missed is booked when its lease expires."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        for task in list(self._tasks):
            task.cancel()

    # ---- what follows in the background ------------------------------------------------------------------------------

    def _later(self, work: Coroutine[Any, Any, bool]) -> asyncio.Task[bool]:
        task = asyncio.get_running_loop().create_task(_harmless(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _asked(self, gateway: Gateway, admission: Admission, account: Account, *, primary: bool) -> bool:
        """Whether the shadow's books now have a lease of a request that runs."""
        verdict = await self._verdict(gateway, admission, account, primary=primary)
        if primary and (rule := _rule(verdict)) is not None:
            gateway.refused(admission.wanted.caller, rule, shadow=True)
        if not verdict.admitted:
            return False
        lease, real = _beside(str(admission.lease)), admission.verdict
        if not real.admitted:
            await self._store.settle(account, lease, 0)
        elif real.kind == "overflow" and verdict.kind != "overflow":  # it runs on the cheaper backend all the same
            await self._store.settle(account, lease, 0)
            ask = _question(admission, admission.plan, primary=False)
            await self._store.admit(account, replace(ask, forced=True))
        return real.admitted

    async def _verdict(self, gateway: Gateway, admission: Admission, account: Account, *, primary: bool) -> Verdict:
        """As in the real admission: once more with the prompt's exact size where a refusal could hang on it."""
        verdict = await self._store.admit(account, _question(admission, admission.plan, primary=primary))
        if verdict.admitted or verdict.blocked or admission.size.exact:
            return verdict
        exact = await gateway.exact_prompt(admission.wanted)
        if exact is None:
            return verdict
        again = planned(admission.wanted, counted(admission.size, exact))
        return await self._store.admit(account, _question(admission, again, primary=primary))

    async def _progressed(self, beside: _Beside, used: int, extend_to: int) -> bool:
        if await beside.booked:
            await self._store.progress(self._account_now(beside), beside.lease, used, extend_to)
        return True

    async def _settled(self, beside: _Beside, consumed: int) -> bool:
        if await beside.booked:
            await self._store.settle(self._account_now(beside), beside.lease, consumed)
        return True

    def _account_now(self, beside: _Beside) -> Account:
        """With the limits as they stand now; once there are none any more, with those it was admitted by."""
        caller = self._callers.by_key(beside.key_id)
        return (caller and account_of(caller)) or beside.account


def _question(admission: Admission, plan: Plan, *, primary: bool) -> Ask:
    tier = admission.wanted.caller.tier
    may_overflow = not primary or bool(admission.wanted.overflow(tier.on_overage))
    return plan.ask(_beside(str(admission.lease)), tier, CHEAPER if may_overflow else (), primary=primary)


def _rule(verdict: Verdict) -> Literal["rate", "cap"] | None:
    """Which limit has no room for it; what would have overflowed did not fit the rate."""
    match verdict.kind:
        case "rate" | "overflow":
            return "rate"
        case "cap":
            return "cap"
    return None


async def _harmless(work: Coroutine[Any, Any, bool]) -> bool:
    """What goes wrong with limits that are only tried out goes wrong for nobody."""
    try:
        return await work
    except StoreUnavailable:
        return False
    except Exception:
        log.log.exception("a shadow limit could not be asked")
        return False
