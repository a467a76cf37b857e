"""One question to one worker: in which order they are asked, what goes along, what an answer other than 200 means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from engine_adapter import vllm
from engine_adapter.errors import EngineBroke, EngineUnavailable
from engine_adapter.http1 import Answer
from engine_adapter.routing import order
from meter.gateway import replies
from meter.gateway.admission import Visit
from meter.gateway.fleet import Target
from meter.gateway.replies import Reply
from meter.telemetry import log

if TYPE_CHECKING:
    from meter.gateway.exchange import Gateway

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""A plain answer is held whole to read what it says; embeddings of a long list and their like are the largest known."""
MAX_ERROR_BYTES = 1024 * 1024

_FORWARDED = ("accept", "user-agent", "traceparent", "tracestate")
_FORWARDED_IN = {"anthropic": ("anthropic-version", "anthropic-beta")}
_OWN_HEADERS = {"content-length", "content-type", "date", "server", "content-encoding"}


class EngineSaid(EngineUnavailable):
    """The worker's own refusal (5xx, 429): another target may be tried; if none answers, this is passed on."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.message, phase="busy" if reply.status in (429, 503) else "head", status=reply.status)
        self.reply = reply


class EngineRefused(Exception):
    """The worker's own 4xx: what the caller did wrong is wrong everywhere."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.message)
        self.reply = reply


def reply_of(away: EngineUnavailable) -> Reply:
    if isinstance(away, EngineSaid):
        return away.reply
    said = {
        502: "The model's backend could not be reached, or its answer was broken; try again.",
        503: "The model's backend is busy or restarting; try again shortly.",
        504: "The model's backend did not answer in time; try again.",
    }
    status = away.status if away.status in said else 502
    return replies.engine_unavailable(status, said[status])


def by_fitness(targets: Sequence[Target], now: float) -> Sequence[Target]:
    """In the order in which they are worth a try."""
    if len(targets) == 1:
        return targets
    ranked = order([(t.backend.fitness, t.backend.outstanding) for t in targets], now)
    return [targets[position] for position in ranked]


async def ask(gateway: Gateway, visit: Visit, target: Target, body: bytes, *, request_id: str) -> Answer:
    """Sends what a caller asks on to where it is served, under an id of our own. Raises EngineUnavailable."""
    terms = target.backend.terms
    headers = [*target.backend.headers, (b"x-request-id", request_id.encode())]
    headers += [
        (name.encode(), value.encode("utf-8", "surrogateescape"))
        for name in (*_FORWARDED, *_FORWARDED_IN.get(visit.dialect, ()))
        if (value := visit.http.headers.get(name)) is not None
    ]
    if visit.sent_after is None:
        visit.sent_after = gateway.timer() - visit.started
        gateway.metrics.overhead.observe(visit.sent_after)
    return await gateway.workers.open(
        target.backend.origin,
        method=b"POST",
        path=f"{visit.path}?{visit.query}" if visit.query else visit.path,
        headers=headers,
        body=body,
        connect_seconds=terms.connect_seconds,
        head_seconds=terms.first_event_seconds,
    )


async def said(answer: Answer, seconds: float) -> EngineUnavailable | EngineRefused:
    """What a worker's answer other than 200 means: the caller's mistake, or a reason to ask elsewhere."""
    try:
        body = await answer.read_all(seconds, MAX_ERROR_BYTES)
    except (EngineBroke, TimeoutError):
        return EngineUnavailable("The worker's error answer broke off.", phase="head")
    if answer.status in (401, 403) or not 400 <= answer.status < 600:
        return EngineUnavailable(f"The worker answered {answer.status}.", phase="head")
    error = vllm.error_of(answer.status, body)
    kept = [
        (name.decode(), value.decode("latin-1")) for name, value in answer.headers if name.startswith(b"retry-after")
    ]
    reply = Reply(answer.status, error.type, error.code, error.message, error.param, kept, as_it_came=body)
    if answer.status == 429 or answer.status >= 500:
        return EngineSaid(reply)
    return EngineRefused(reply)


def works(target: Target) -> None:
    if not target.backend.fitness.closed:
        log.warning("a backend answers again", backend=target.backend.name)
    target.backend.fitness.ok()


def fails(target: Target, now: float) -> None:
    fitness = target.backend.fitness
    was = fitness.closed
    fitness.failed(now)
    target.backend.capabilities.forget()
    if was and not fitness.closed:
        log.warning("a backend does not answer: requests avoid it", backend=target.backend.name)


def head(visit: Visit, target: Target, answer: Answer, response: web.StreamResponse) -> None:
    """The worker's end-to-end headers, those that every answer of ours has, and who answered."""
    for name, value in answer.headers:
        text = name.decode("latin-1")
        if text not in _OWN_HEADERS:
            response.headers.add(text, value.decode("utf-8", "surrogateescape"))
    for own, words in visit.headers:
        response.headers[own] = words
    response.headers["x-weir-backend"] = target.backend.name
    response.headers["x-weir-model"] = target.model
