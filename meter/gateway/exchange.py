"""The life of a request: identify, read, admit, relay, settle, record.

`Gateway.converse` is the story; everything it needs was built once by `meter/app.py`. An `Exchange` is one lease's
passage from admission to its end: whatever happens inside its `async with`, it owes one record and one settlement.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from types import TracebackType
from typing import Self
from uuid import UUID

import msgspec
from aiohttp import web

from engine_adapter import prompt_size, request
from engine_adapter.errors import EngineBroke, EngineUnavailable
from engine_adapter.http1 import Workers
from engine_adapter.usage import Usage
from meter.callers.caller import Caller, CallerBook, UnknownKey
from meter.config import Config
from meter.gateway import credentials, plan, relay, replies, upstream
from meter.gateway.admission import Admission, Visit, Wanted, admit
from meter.gateway.fleet import Fleet, Model, Target
from meter.gateway.shadow import Shadows
from meter.gateway.tokenizers import ExactPrompts
from meter.ledger.journal import Journal, JournalError
from meter.ledger.pricing import PriceBook, cost_nanousd
from meter.ledger.record import Advanced, Ending, Opened, UsageRecord
from meter.ledger.refusals import RefusalCounts
from meter.telemetry import log
from meter.telemetry.metrics import Metrics
from quotas.store import Account, QuotaStore, StoreUnavailable


@dataclass(slots=True)
class Gateway:
    """What every request needs. `now` is wall-clock UTC for records, `timer` a monotonic clock in seconds."""

    config: Config
    fleet: Fleet
    callers: CallerBook
    prices: Callable[[], PriceBook]
    store: QuotaStore
    journal: Journal
    workers: Workers
    metrics: Metrics
    refusals: RefusalCounts
    shadows: Shadows
    exact: ExactPrompts
    now: Callable[[], datetime]
    timer: Callable[[], float] = time.monotonic
    sizes: prompt_size.Estimator = field(default_factory=prompt_size.Estimator)
    answers: prompt_size.AnswerSizes = field(default_factory=prompt_size.AnswerSizes)
    running: dict[UUID, Exchange] = field(default_factory=dict)
    settling: set[asyncio.Task[None]] = field(default_factory=set)
    leaving: bool = False
    """True while running exchanges are cut because this process stops."""

    # ---- the story ---------------------------------------------------------------------------------------------------

    async def converse(self, visit: Visit) -> web.StreamResponse:
        """Answers one metered call. Raises Reply where it ends early, CancelledError when the client leaves."""
        caller = visit.caller = self.identify(visit.http)
        strict = credentials.refuses_overage(visit.http.headers)
        tags = credentials.tags(visit.http.headers, caller.tags)
        raw = await credentials.read_body(visit.http, int(self.config.listen.max_body_mb * 1024 * 1024))
        call = self.read(visit, raw)
        wanted = Wanted(visit, caller, call, self.model_for(visit, caller, call), tags, strict)
        admission = await admit(self, wanted)
        try:
            return await self.serve(admission)
        except EngineUnavailable as away:
            if admission.route == "overflow" or not wanted.overflow(caller.tier.on_outage):
                raise upstream.reply_of(away) from None
        admission = await admit(self, wanted, primary=False)
        try:
            return await self.serve(admission)
        except EngineUnavailable as away:
            raise upstream.reply_of(away) from None

    async def serve(self, admission: Admission) -> web.StreamResponse:
        """One exchange on one route: its targets are tried in turn while nothing of an answer was passed on."""
        async with Exchange(self, admission) as exchange:
            if exchange.drains:
                return await self._through_hangups(exchange)
            return await relay.first_that_answers(exchange)

    async def _through_hangups(self, exchange: Exchange) -> web.StreamResponse:
        """`on_hangup: drain`: a client that leaves does not stop the engine; the answer is read and booked to its end."""
        answering = asyncio.ensure_future(relay.first_that_answers(exchange))
        try:
            return await asyncio.shield(answering)
        except asyncio.CancelledError:
            if self.leaving:
                answering.cancel()
            exchange.abandoned = not self.leaving
            try:
                await answering
            except EngineUnavailable as away:
                exchange.book("engine_unavailable", Usage(), status=away.status, reason=away.phase)
            raise

    def identify(self, http: web.BaseRequest) -> Caller:
        try:
            return self.callers.identify(credentials.presented(http.headers), self.now())
        except UnknownKey as unknown:
            raise replies.unauthorized(unknown.reason) from None

    def read(self, visit: Visit, raw: bytes) -> request.Call:
        try:
            return request.parse(request.ENDPOINTS[visit.path], raw)
        except request.BadRequest as wrong:
            raise replies.bad_request(wrong.message, wrong.param) from None

    def model_for(self, visit: Visit, caller: Caller, call: request.Call) -> Model:
        model = self.model_named(visit, caller, call.model)
        if caller.tier.max_n is not None and call.choices > caller.tier.max_n:
            raise replies.bad_request(f"n must be at most {caller.tier.max_n} for this key.", "n")
        return model

    def model_named(self, visit: Visit, caller: Caller, name: str) -> Model:
        """The model of this name, with its targets that serve this endpoint."""
        model = self.fleet.models.get(name)
        if model is None or (caller.models is not None and name not in caller.models):
            raise replies.model_not_found(name)
        visit.model = name
        model = model.at(visit.path)
        if not model.primary:
            raise replies.not_served(name, visit.path)
        return model

    # ---- what the story's steps lean on ------------------------------------------------------------------------------

    async def exact_prompt(self, wanted: Wanted) -> int | None:
        """The prompt's exact tokens, where the model's tokenizer is known and answers."""
        return await self.exact.count(wanted.model, wanted.call)

    def refused(self, caller: Caller, rule: str, *, shadow: bool) -> None:
        """Counts a refusal; `shadow`: one that would have been, by a limit that is only tried out."""
        self.metrics.refusals.labels(rule, str(shadow).lower()).inc()
        self.refusals.add(caller.key_id, rule, shadow=shadow)

    def account_now(self, caller: Caller) -> Account:
        """The caller's account with the limits in force now: an edit bites at a running stream's next slice, and a stream
        goes with its key into another team."""
        current = self.callers.by_key(caller.key_id)
        return caller.account if current is None else current.account

    def settle_later(self, caller: Caller, lease: str, consumed: int) -> None:
        """Settles in the background; a store that is away is told when it is back."""
        self.settle_account_later(self.account_now(caller), lease, consumed)
        self.shadows.settle(lease, consumed)

    def settle_account_later(self, account: Account, lease: str, consumed: int) -> None:
        task = asyncio.get_running_loop().create_task(self._settle(account, lease, consumed))
        self.settling.add(task)
        task.add_done_callback(self.settling.discard)

    async def _settle(self, account: Account, lease: str, consumed: int) -> None:
        try:
            with self.timed("settle"):
                await self.store.settle(account, lease, consumed)
        except Exception:  # what is not settled is booked when its lease expires
            log.log.exception("a settlement failed", extra={"fields": {"lease": lease, "consumed": consumed}})

    async def settled(self, seconds: float) -> None:
        """Waits for settlements under way, at most `seconds`; what is missed is booked when its lease expires."""
        if self.settling:
            await asyncio.wait(self.settling, timeout=seconds)
        for task in list(self.settling):
            task.cancel()

    async def renew(self) -> None:
        """Keeps the leases of everything that runs here alive."""
        leases = [(self.account_now(e.admission.wanted.caller), e.lease) for e in self.running.values()]
        leases += self.shadows.leases()
        if not leases:
            return
        with self.timed("renew"):
            await self.store.renew(leases)

    async def note(self) -> None:
        """Keeps the journal's knowledge of every running stream fresh."""
        for exchange in list(self.running.values()):
            exchange.note()

    @contextmanager
    def timed(self, op: str) -> Iterator[None]:
        """Observes one call of the quota store."""
        started = self.timer()
        try:
            yield
        except StoreUnavailable:
            self.metrics.store_failures.labels(op).inc()
            raise
        finally:
            self.metrics.store_seconds.labels(op).observe(self.timer() - started)


class Exchange:
    """One lease from admission to its end. Owes one record (`book`, once) and one settlement, on every way out."""

    __slots__ = (
        "_booked",
        "_noted",
        "abandoned",
        "admission",
        "attempt",
        "drains",
        "finish_reason",
        "first_token",
        "gateway",
        "lease",
        "target",
        "usage",
    )

    def __init__(self, gateway: Gateway, admission: Admission) -> None:
        self.gateway = gateway
        self.admission = admission
        self.lease = str(admission.lease)
        self.target: Target = admission.targets[0]
        self.attempt = 0
        self.first_token: float | None = None
        self.finish_reason: str | None = None
        self.usage: Callable[[], Usage] = Usage
        """What was used so far; the relay says it better as it learns."""
        self.drains = admission.wanted.caller.tier.on_hangup == "drain"
        self.abandoned = False
        """The client left, but the answer is read to its end."""
        self._booked = False
        self._noted = 0

    async def __aenter__(self) -> Self:
        gateway, wanted = self.gateway, self.admission.wanted
        account = gateway.account_now(wanted.caller)
        scopes = tuple((scope.kind, scope.name) for scope in account.scopes)
        asked = Usage(prompt=self.admission.size.prompt_estimate, source="estimated")
        crashed = self._record("crashed", asked, None, "the process ended")
        try:
            gateway.journal.opened(Opened(record=crashed, account_slot=account.slot, scope_names=scopes))
        except JournalError as full:
            log.info("an exchange could not be noted", request_id=str(wanted.visit.request_id), reason=str(full))
            if gateway.config.ledger.on_journal_full == "deny":
                gateway.settle_later(wanted.caller, self.lease, 0)
                raise replies.ledger_full() from None
        gateway.running[self.admission.lease] = self
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if not self._booked:
            self._book_for(error)
        del self.gateway.running[self.admission.lease]

    def _book_for(self, error: BaseException | None) -> None:
        match error:
            case asyncio.CancelledError() | ConnectionError():
                self.book("shut_down" if self.gateway.leaving else "client_gone", self.usage())
            case EngineBroke():
                self.book("engine_broke", self.usage(), reason=error.phase)
            case EngineUnavailable():
                self.book("engine_unavailable", Usage(), status=error.status, reason=error.phase)
            case _:
                self.book("engine_broke", self.usage(), status=500, reason="internal")

    def book(self, ending: Ending, usage: Usage, *, status: int | None = None, reason: str | None = None) -> None:
        """Writes the record, before the client sees the end, and starts the settlement. Only the first call counts."""
        if self._booked:
            return
        self._booked = True
        gateway, wanted = self.gateway, self.admission.wanted
        if self.abandoned and ending == "completed":
            ending, reason = "client_gone", "drained"
        record = self._record(ending, usage, status, reason)
        try:
            gateway.journal.finished(record)
        except JournalError as full:
            gateway.metrics.dropped.inc()
            log.warning("a record could not be written", reason=str(full), **_line(record))
        gateway.settle_later(wanted.caller, self.lease, usage.total)
        gateway.metrics.observe(record, model=wanted.model.name, backend=self.target.backend.name)
        if usage.source == "engine":
            self._learn(usage)
        wanted.visit.backend = self.target.backend.name
        log.info("exchange", **_line(record))

    def _learn(self, usage: Usage) -> None:
        gateway, wanted = self.gateway, self.admission.wanted
        if usage.prompt:
            gateway.metrics.estimate_error.observe(self.admission.size.prompt_estimate / usage.prompt)
            gateway.sizes.learn(wanted.model.name, wanted.call.prompt, usage.prompt)
        if usage.completion and wanted.call.generates:
            each = usage.completion // self.admission.size.choices
            gateway.answers.learn(wanted.caller.key_id, wanted.model.name, each)

    def note(self) -> None:
        """Writes into the journal how far a running answer has come, so that a crash books what was known by then."""
        usage = self.usage()
        if self.first_token is None or usage.total == self._noted or self._booked:
            return
        self._noted = usage.total
        self.gateway.journal.advanced(
            Advanced(
                exchange_id=self.admission.lease,
                prompt_tokens=usage.prompt,
                completion_tokens=usage.completion,
                engine_prompt_tokens=usage.prompt * self.admission.wanted.call.answers,
                duration_ms=round((self.gateway.timer() - self.admission.wanted.visit.started) * 1000),
            )
        )

    async def advance(self, used: int, extend_to: int) -> plan.Cover:
        """Charges `used` tokens so far and asks to be covered up to `extend_to`: what is covered now."""
        gateway, caller = self.gateway, self.admission.wanted.caller
        self.note()
        gateway.shadows.progress(self.lease, used, extend_to)
        try:
            with gateway.timed("progress"):
                said = await gateway.store.progress(gateway.account_now(caller), self.lease, used, extend_to)
        except StoreUnavailable:
            return plan.Cover(extended=False, covered=None, left=0)
        return plan.Cover(extended=said.extended, covered=0 if said.expired else said.covered, left=said.left)

    def _record(self, ending: Ending, usage: Usage, status: int | None, reason: str | None) -> UsageRecord:
        gateway, admission = self.gateway, self.admission
        wanted, visit, caller = admission.wanted, admission.wanted.visit, admission.wanted.caller
        price = gateway.prices().at(wanted.model.name, self.target.backend.name, visit.started_at)
        return UsageRecord(
            exchange_id=admission.lease,
            request_id=visit.request_id,
            attempt=max(1, self.attempt),
            key_id=caller.key_id,
            team_id=caller.team_id,
            tags=wanted.tags,
            endpoint=visit.path,
            model_requested=wanted.model.name,
            model_served=self.target.model,
            backend=self.target.backend.name,
            route=admission.route,
            verdict=admission.verdict.kind,
            reason=reason,
            streamed=wanted.call.stream,
            prompt_tokens=usage.prompt,
            cached_prompt_tokens=usage.cached,
            completion_tokens=usage.completion,
            reasoning_tokens=usage.reasoning,
            engine_prompt_tokens=usage.prompt * wanted.call.answers,
            engine_completion_tokens=usage.completion,
            usage_source=usage.source,
            expected_tokens=admission.plan.expected,
            ceiling_tokens=admission.plan.ceiling,
            ending=ending,
            http_status=status,
            finish_reason=self.finish_reason,
            started_at=visit.started_at,
            first_token_ms=None if self.first_token is None else round((self.first_token - visit.started) * 1000),
            duration_ms=round((gateway.timer() - visit.started) * 1000),
            price_id=price.id if price else None,
            cost_nanousd=cost_nanousd(usage.prompt, usage.cached, usage.completion, price) if price else None,
        )


def _line(record: UsageRecord) -> dict[str, object]:
    """The log line of a record: what is not a default."""
    fields = msgspec.structs.asdict(record)
    return {name: value for name, value in fields.items() if value not in (None, "", {}, 0)}
