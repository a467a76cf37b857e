"""Bytes from worker to client: plain and streamed, with back-pressure and clean ends.

While nothing of an answer was passed on, a failure raises EngineUnavailable and the next target is tried; afterwards
EngineBroke, and the client is told by an error event.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection
from typing import TYPE_CHECKING

from aiohttp import HttpVersion11, web

from engine_adapter import events, vllm
from engine_adapter.answers import NotAnAnswer, read_answer
from engine_adapter.errors import EngineBroke, EngineUnavailable
from engine_adapter.events import Scanner
from engine_adapter.http1 import Answer
from engine_adapter.request import SEVERAL, Live
from engine_adapter.usage import Usage
from meter.gateway import capabilities, plan, replies, upstream
from meter.gateway.fleet import Target
from meter.gateway.replies import Reply
from meter.gateway.upstream import EngineRefused, EngineSaid
from meter.ledger.record import Ending
from meter.telemetry import log

if TYPE_CHECKING:
    from meter.gateway.exchange import Exchange

MAX_UNSENT_BYTES = 4 * 1024 * 1024
"""What may come before the first content event; more of it is no answer."""
TAIL_SECONDS = 1.0
"""How long the end of a stream may take after its [DONE]."""


async def first_that_answers(exchange: Exchange) -> web.StreamResponse:
    """Tries the route's targets in the order of their fitness. Raises what the last one failed with."""
    failure: EngineUnavailable | None = None
    for target in upstream.by_fitness(exchange.admission.targets, exchange.gateway.timer()):
        exchange.target = target
        exchange.attempt += 1
        try:
            return await _from(exchange, target)
        except EngineRefused as refused:
            exchange.book("engine_refused", Usage(), status=refused.reply.status)
            raise refused.reply from None
        except EngineUnavailable as away:
            failure = away
            if away.phase != "busy":
                upstream.fails(target, exchange.gateway.timer())
    assert failure is not None
    raise failure


async def _from(exchange: Exchange, target: Target) -> web.StreamResponse:
    """One target's answer. It is asked again at once without a field of ours that it turns out not to know."""
    call, unknown = exchange.admission.wanted.call, set[str]()
    unfit = capabilities.unfit(call, exchange.admission.size.prompt_estimate)
    while True:
        live = target.backend.capabilities.best(unfit | unknown)
        try:
            return await _answer(exchange, target, live, unknown)
        except EngineRefused as refused:
            reply = refused.reply
            field = capabilities.refused_field(call, live, reply.status, reply.as_it_came or b"")
            if field is None:
                raise
            unknown.add(field)


async def _answer(exchange: Exchange, target: Target, live: Live, unknown: Collection[str]) -> web.StreamResponse:
    """`live`: what it is asked to count; `unknown`: fields that it has just refused, as is known once it takes the rest."""
    backend, hold, sent = target.backend, exchange.admission.plan.ceiling, exchange.gateway.timer()
    wanted, streamed = exchange.admission.wanted, exchange.admission.wanted.call.stream
    exchange.usage = lambda: _unanswered(exchange, target, 0.0 if streamed else exchange.gateway.timer() - sent)
    backend.outstanding += hold
    try:
        async with await upstream.ask(
            exchange.gateway, wanted.visit, target, _body(exchange, target, live), request_id=exchange.lease
        ) as answer:
            if answer.status != 200:
                raise await upstream.said(answer, backend.terms.idle_seconds)
            _does_not_know(target, unknown)
            if streamed and not _is_json(answer):
                return await _Stream(exchange, target, answer, sent, live).relay()
            return await _plain(exchange, target, answer, sent)
    finally:
        backend.outstanding -= hold


def _body(exchange: Exchange, target: Target, live: Live) -> bytes:
    admission = exchange.admission
    return admission.wanted.call.body(
        model=target.model,
        output_limit=admission.plan.output_limit,
        kind=target.backend.terms.kind,
        live=live,
        salt=_salt(admission.wanted.caller.account.slot),
    )


def _salt(slot: str) -> str:
    """Keeps a team's prefixes (or those of a key without one) apart from others' in a vLLM's cache, so that nobody can tell
    by an answer's speed what others sent (https://arxiv.org/abs/2411.18191). The same in every process, so that the cache
    is of use to the team wherever its requests go. It need not be a secret: a salt that a caller sends is never sent on
    itself, only hashed together with its own team's."""
    return hashlib.sha256(f"tokenweir/{slot}".encode()).hexdigest()


def _does_not_know(target: Target, fields: Collection[str]) -> None:
    if target.backend.capabilities.learn(fields):
        log.info("a backend does not know a field", backend=target.backend.name, fields=", ".join(sorted(fields)))


def _is_json(answer: Answer) -> bool:
    """Whether a worker that was asked for a stream sends one plain answer; a stream need not say what it is."""
    return any(name == b"content-type" and b"json" in value.lower() for name, value in answer.headers)


# ---- plain answers ---------------------------------------------------------------------------------------------------


async def _plain(exchange: Exchange, target: Target, answer: Answer, sent: float) -> web.Response:
    gateway, admission = exchange.gateway, exchange.admission
    try:
        body = await answer.read_all(target.backend.terms.idle_seconds, upstream.MAX_ANSWER_BYTES)
        answered = read_answer(
            admission.wanted.call.endpoint,
            body,
            prompt_estimate=admission.size.prompt_estimate,
            rename=_rename(exchange, target),
        )
    except TimeoutError:
        raise EngineUnavailable("The worker fell silent within its answer.", phase="head", status=504) from None
    except (EngineBroke, NotAnAnswer) as broken:
        raise EngineUnavailable(str(broken), phase="head") from None
    if answered.usage.source != "engine" and replies.is_error(body):
        said = vllm.error_of(502, body)
        raise EngineSaid(Reply(502, said.type, said.code, said.message, said.param, as_it_came=body))
    if answered.finish_reason == "abort":  # vLLM's word for a request it gave up, for example when it is stopped
        raise EngineUnavailable("The worker gave its answer up.", phase="head", status=503)
    upstream.works(target)
    exchange.finish_reason = answered.finish_reason
    target.backend.learn_pace(answered.usage.completion // admission.size.choices, gateway.timer() - sent)
    exchange.book("completed", answered.usage, status=200)
    response = web.Response(body=answered.body, headers=None)
    _head(exchange, target, answer, response)
    response.content_type = "application/json"
    return response


def _unanswered(exchange: Exchange, target: Target, waited: float) -> Usage:
    """What an engine did for a client that left before the answer: the prompt, and what it made meanwhile at its pace."""
    size, limit = exchange.admission.size, exchange.admission.plan.output_limit or 0
    made = size.choices * min(limit, int(waited * target.backend.pace))
    return Usage(prompt=size.prompt_estimate, completion=made, source="estimated")


def _rename(exchange: Exchange, target: Target) -> tuple[str, str] | None:
    model = exchange.admission.wanted.model
    return None if model.expose_served_model or model.name == target.model else (target.model, model.name)


def _head(exchange: Exchange, target: Target, answer: Answer, response: web.StreamResponse) -> None:
    """The head of an answer, with what the caller may know of its quota."""
    admission = exchange.admission
    upstream.head(admission.wanted.visit, target, answer, response)
    for name, value in replies.quota_headers(admission.verdict):
        response.headers[name] = value
    if admission.plan.lowered:
        response.headers["x-weir-max-tokens"] = str(admission.plan.output_limit)


# ---- streams ---------------------------------------------------------------------------------------------------------


class _Stream:
    """One streamed answer from its head to its end."""

    def __init__(self, exchange: Exchange, target: Target, answer: Answer, sent: float, live: Live) -> None:
        admission, call = exchange.admission, exchange.admission.wanted.call
        self._exchange = exchange
        self._target = target
        self._answer = answer
        self._timer = exchange.gateway.timer
        self._scanner = events.scanner(
            call.endpoint,
            wants_usage=call.wants_usage,
            wants_live_usage=call.wants_live_usage,
            wants_token_ids=call.wants_token_ids,
            choices=call.prompts * call.answers,
            prompt_estimate=admission.size.prompt_estimate,
            rename=_rename(exchange, target),
            prompts=call.prompts,
        )
        self._governor = plan.Governor(admission.verdict.hold, admission.plan.ceiling)
        self._sent = sent
        self._asked_ids = live == "token_ids" and call.endpoint in SEVERAL

    async def relay(self) -> web.StreamResponse:
        """Until the first content event nothing is passed on; then every piece at once."""
        first = await self._until_content()
        response = await self._begin()
        try:
            await self._pass_on(response, first)
        except EngineBroke as broken:
            upstream.fails(self._target, self._timer())
            said = replies.engine_unavailable(502, f"The answer is incomplete. {broken}")
            await self._break(response, "engine_broke", broken.phase, said)
        except asyncio.CancelledError:
            if self._exchange.gateway.leaving:
                await self._break(response, "shut_down", "grace", replies.shutting_down())
            raise
        return response

    async def _until_content(self) -> bytes:
        """Reads up to and with the first content event. Failures until then leave the next target untouched."""
        unsent = bytearray()
        deadline = self._sent + self._target.backend.terms.first_event_seconds
        while not self._scanner.content_seen:
            seen = self._scanner.events
            piece = await self._first_piece(deadline)
            unsent += self._scanned(piece)
            if self._scanner.error is not None:
                raise _event_said(self._scanner)
            if not piece or len(unsent) > MAX_UNSENT_BYTES:
                break
            if self._scanner.events != seen:
                deadline = self._timer() + self._target.backend.terms.first_event_seconds
        if not self._scanner.content_seen:
            raise EngineUnavailable("The worker's stream ended before its first event.", phase="first_event")
        return bytes(unsent)

    async def _first_piece(self, deadline: float) -> bytes:
        try:
            return await self._answer.read(max(0.0, deadline - self._timer()))
        except TimeoutError:
            raise EngineUnavailable("The worker sent no event in time.", phase="first_event", status=504) from None
        except EngineBroke as broken:
            raise EngineUnavailable(str(broken), phase="first_event") from None

    def _scanned(self, piece: bytes) -> bytes:
        try:
            return self._scanner.feed(piece) if piece else self._scanner.end()
        except EngineBroke as broken:
            raise EngineUnavailable(str(broken), phase="first_event") from None

    async def _begin(self) -> web.StreamResponse:
        exchange = self._exchange
        exchange.first_token = self._timer()
        exchange.usage = self._scanner.usage
        upstream.works(self._target)
        visit = exchange.admission.wanted.visit
        response = visit.response = web.StreamResponse()
        if visit.http.version < HttpVersion11:  # the end of the connection is the end of the answer
            response.force_close()
        _head(exchange, self._target, self._answer, response)
        response.headers["content-type"] = "text/event-stream; charset=utf-8"
        response.headers["cache-control"] = "no-cache"
        response.headers["x-accel-buffering"] = "no"
        if not exchange.abandoned:
            await response.prepare(visit.http)
        return response

    async def _send(self, response: web.StreamResponse, data: bytes) -> None:
        """To the client, as fast as it reads; one that reads nothing for the idle time counts as gone."""
        exchange, transport = self._exchange, self._exchange.admission.wanted.visit.http.transport
        if exchange.abandoned or not data:
            return None
        try:
            if transport is None or not transport.get_write_buffer_size():
                return await response.write(data)
            async with asyncio.timeout(self._target.backend.terms.idle_seconds):
                await response.write(data)
        except TimeoutError:
            assert transport is not None
            transport.abort()
            raise ConnectionResetError("the client reads nothing") from None
        except ConnectionError:
            if not exchange.drains:
                raise
            exchange.abandoned = True

    async def _close(self, response: web.StreamResponse) -> None:
        if not self._exchange.abandoned:
            await response.write_eof()

    async def _pass_on(self, response: web.StreamResponse, out: bytes) -> None:
        """Each piece is booked before it is passed on if it ends the answer, then charged."""
        scanner, idle = self._scanner, self._target.backend.terms.idle_seconds
        deadline = self._timer() + idle
        while True:
            if scanner.error is not None:
                await self._send(response, out)
                raise EngineBroke(f"The worker gave it up: {scanner.error.message}", phase="error_event")
            if scanner.done:
                return await self._complete(response, out)
            await self._send(response, out)
            if await self._must_end():
                return await self._cut(response)
            try:
                piece = await self._answer.read(max(0.0, deadline - self._timer()))
            except TimeoutError:
                raise EngineBroke("The worker fell silent within its answer.", phase="idle") from None
            if not piece:
                return await self._complete(response, scanner.end())
            seen = scanner.events
            out = scanner.feed(piece)
            if scanner.events != seen:
                deadline = self._timer() + idle

    async def _must_end(self) -> bool:
        """Reports what was used and extends the hold ahead of need; True when nothing more may be delivered."""
        used = self._scanner.live_prompt + self._scanner.live_completion
        asked = self._governor.asks(used, self._scanner.live_most)
        while asked is not None:
            cover = await self._exchange.advance(used, asked)
            asked = self._governor.hears(used, asked, cover)
        return self._governor.spent(self._scanner.live_most)

    async def _complete(self, response: web.StreamResponse, out: bytes) -> None:
        scanner, exchange = self._scanner, self._exchange
        if not scanner.done and scanner.finish_reason is None:
            await self._send(response, out)
            raise EngineBroke("The worker's stream ended within the answer.", phase="cut")
        if self._asked_ids and not scanner.ids_seen:
            _does_not_know(self._target, (capabilities.RETURN_IDS,))
        exchange.finish_reason = scanner.finish_reason
        usage = scanner.usage()
        seconds = self._timer() - self._sent
        self._target.backend.learn_pace(usage.completion // exchange.admission.size.choices, seconds)
        if scanner.aborted:  # the worker was stopped; its answer says so itself
            exchange.book("engine_broke", usage, status=200, reason="abort")
        else:
            exchange.book("completed", usage, status=200)
        await self._send(response, out)
        await self._tail(response)
        await self._close(response)

    async def _tail(self, response: web.StreamResponse) -> None:
        """What may still come after [DONE], so that the connection can be used again."""
        try:
            async with asyncio.timeout(TAIL_SECONDS):
                while piece := await self._answer.read():
                    await self._send(response, self._scanner.feed(piece))
            await self._send(response, self._scanner.end())
        except (TimeoutError, EngineBroke):
            return

    async def _cut(self, response: web.StreamResponse) -> None:
        """The cap: all that was held is delivered, the answer is ended cleanly, the engine is stopped."""
        self._answer.close()
        ending = self._scanner.cut()
        self._exchange.finish_reason = "length"
        self._exchange.book("cut_at_cap", self._scanner.usage(), status=200, reason="cap")
        await self._send(response, ending)
        await self._close(response)

    async def _break(self, response: web.StreamResponse, ending: Ending, reason: str, said: Reply) -> None:
        """After its head a stream can only end with an error event, and without [DONE]."""
        exchange = self._exchange
        exchange.finish_reason = self._scanner.finish_reason
        exchange.book(ending, self._scanner.usage(), status=200, reason=reason)
        await self._send(response, said.event(exchange.admission.wanted.visit.dialect, self._scanner.next_number))
        await self._close(response)


def _event_said(scanner: Scanner) -> EngineUnavailable:
    """An error event before any content: the worker's refusal, inside a 200."""
    error = scanner.error
    assert error is not None
    status = error.code if error.code is not None and 400 <= error.code < 600 else 502
    return EngineSaid(Reply(status, "server_error", "engine_unavailable", error.message or "The worker refused."))
