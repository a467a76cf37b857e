"""May this request run, and where? Its size and plan, the one question to the quota store, the answer in words."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Literal
from uuid import UUID

import uuid_utils
from aiohttp import web

from engine_adapter import request
from meter.callers.caller import Caller
from meter.gateway import plan, replies
from meter.gateway.fleet import Model, Target
from meter.gateway.replies import RULE_WINDOWS
from meter.ledger.record import Route
from quotas.store import Ask, StoreUnavailable, Verdict

if TYPE_CHECKING:
    from meter.gateway.exchange import Gateway


@dataclass(slots=True)
class Visit:
    """One HTTP request as it came in. `started` is the monotonic clock, for durations."""

    http: web.BaseRequest
    path: str
    query: str
    request_id: UUID
    started_at: datetime
    started: float
    headers: replies.Headers = field(default_factory=list)
    """What every answer to it carries."""
    response: web.StreamResponse | None = None
    """The answer whose head is out."""
    caller: Caller | None = None
    model: str | None = None
    backend: str | None = None
    verdict: str | None = None
    sent_after: float | None = None
    """Seconds that passed here before the engine was asked."""

    @property
    def dialect(self) -> replies.Dialect:
        return replies.dialect_of(self.path)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for, read and checked. `strict`: this request must not overflow."""

    visit: Visit
    caller: Caller
    call: request.Call
    model: Model
    tags: dict[str, str]
    strict: bool

    def overflow(self, policy: Literal["overflow", "reject"]) -> tuple[Target, ...]:
        """The cheaper targets that it may take, where the tier's policy is `policy`."""
        return self.model.overflow if policy == "overflow" and not self.strict else ()


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that was let in: by which verdict, under which lease, with which plan, onto which route."""

    wanted: Wanted
    verdict: Verdict
    lease: UUID
    size: plan.Size
    plan: plan.Plan
    route: Route
    targets: tuple[Target, ...]


async def admit(gateway: Gateway, wanted: Wanted, *, primary: bool = True) -> Admission:
    """Asks the store. Where a refusal or a clamp could hang on it, the prompt is counted exactly first. Raises Reply."""
    if gateway.journal.full and gateway.config.ledger.on_journal_full == "deny":
        raise replies.ledger_full()
    size = _size(gateway, wanted)
    admission = await _ask(gateway, wanted, size, primary=primary)
    if admission.verdict.kind in ("cap", "rate") and not admission.verdict.blocked:
        exact = await gateway.exact_prompt(wanted)
        if exact is not None:
            size = counted(size, exact)
            admission = await _ask(gateway, wanted, size, primary=primary)
    elif admission.plan.output_limit != planned(wanted, size).output_limit:
        exact = await gateway.exact_prompt(wanted)
        if exact is not None:
            admission = _unclamped(admission, counted(size, exact))
    wanted.visit.verdict = admission.verdict.kind
    gateway.shadows.ask(gateway, admission, primary=primary)
    if not admission.verdict.admitted:
        gateway.refused(wanted.caller, admission.verdict.kind, shadow=False)
        raise replies.refused(admission.verdict, _words(admission), never=_never_fits(admission))
    return admission


def _never_fits(admission: Admission) -> bool:
    """Whether the request is too large for good. Where only a bound of its prompt is known, that is sure if what it
    has at least does not fit, or if it does not fit although nothing is used."""
    verdict, size = admission.verdict, admission.size
    if not verdict.impossible or verdict.blocked:
        return False
    for window in verdict.windows:
        if window.scope == verdict.scope and window.name == RULE_WINDOWS[verdict.kind]:
            beside_prompt = _needs(admission) - (size.prompt_estimate if verdict.kind == "rate" else size.prompt_bound)
            return size.prompt_floor + beside_prompt > window.limit or not window.used + window.held
    return True


def _size(gateway: Gateway, wanted: Wanted) -> plan.Size:
    caller, call, model = wanted.caller, wanted.call, wanted.model
    default = caller.tier.default_output_tokens or plan.UNKNOWN_CONTEXT
    return plan.Size(
        prompt_bound=gateway.sizes.bound(model.name, call.prompt),
        prompt_estimate=gateway.sizes.estimate(model.name, call.prompt),
        choices=call.prompts * call.choices,
        asked_output=call.asked_output,
        learned_output=gateway.answers.expected_output(caller.key_id, model.name, default),
        context=model.primary[0].context,
        prompt_floor=prompt_floor(call.prompt),
        exact=not call.prompt.text_bytes and not call.prompt.images,
    )


def prompt_floor(parts: request.PromptParts) -> int:
    """What the prompt surely has. Not of its JSON: a schema that answers must follow is seldom written into it."""
    return parts.token_ids + (parts.text_bytes - parts.json_bytes) // plan.BYTES_A_TOKEN_AT_MOST


def planned(wanted: Wanted, size: plan.Size) -> plan.Plan:
    """What a call of this size may cost."""
    if not wanted.call.generates:
        return plan.reading(size)
    return plan.generation(size, wanted.caller.tier, streamed=wanted.call.stream)


def counted(size: plan.Size, exact: int) -> plan.Size:
    """The same with the prompt's exact tokens."""
    return replace(size, prompt_bound=exact, prompt_estimate=exact, prompt_floor=exact, exact=True)


def _unclamped(admission: Admission, size: plan.Size) -> Admission:
    """The same grant, used for the answer as far as the prompt's exact size leaves it."""
    costs = plan.clamped(planned(admission.wanted, size), admission.plan.ceiling, size)
    fits = replace(admission.plan, output_limit=costs.output_limit, lowered=costs.lowered)
    return replace(admission, size=size, plan=fits)


async def _ask(gateway: Gateway, wanted: Wanted, size: plan.Size, *, primary: bool) -> Admission:
    tier, costs = wanted.caller.tier, planned(wanted, size)
    cheaper = [
        target
        for target in wanted.overflow(tier.on_overage if primary else tier.on_outage)
        if plan.fits_context(target.context, size, least_output=costs.least - size.prompt_bound)
    ]
    lease = wanted.visit.request_id if primary else UUID(bytes=uuid_utils.uuid7().bytes)
    ask = costs.ask(str(lease), tier, tuple(target.as_overflow for target in cheaper), primary=primary)
    verdict = await _answer(gateway, wanted.caller, ask)
    route: Route = "overflow" if verdict.kind == "overflow" else "primary"
    return Admission(
        wanted=wanted,
        verdict=verdict,
        lease=lease,
        size=size,
        plan=plan.clamped(costs, verdict.ceiling, size) if verdict.admitted else costs,
        route=route,
        targets=tuple(t for t in cheaper if t.name == verdict.target) if route == "overflow" else wanted.model.primary,
    )


async def _answer(gateway: Gateway, caller: Caller, ask: Ask) -> Verdict:
    try:
        with gateway.timed("admit"):
            return await gateway.store.admit(gateway.account_now(caller), ask)
    except StoreUnavailable:
        raise replies.quota_unavailable() from None
    except asyncio.CancelledError:
        gateway.settle_later(caller, ask.lease, 0)  # the store may have booked it; nobody will use it
        raise


def _words(admission: Admission) -> str:
    """The numbers of a refused request, for people."""
    if admission.verdict.kind == "parallel":
        return f"at most {admission.wanted.caller.tier.max_parallel} may run at the same time"
    return f"this request needs {_needs(admission)} tokens (its prompt is at most {admission.size.prompt_bound})"


def _needs(admission: Admission) -> int:
    """Tokens that the refusing rule found no room for."""
    if admission.verdict.kind == "rate":
        return admission.plan.expected
    return admission.plan.least if admission.wanted.caller.tier.on_cap == "clamp" else admission.plan.ceiling
