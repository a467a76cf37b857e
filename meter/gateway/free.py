"""What is answered without tokens being made: counting and tokenizing, by the worker that would serve the model.

Authenticated, and for the models that the caller may use. Nothing is charged, so there is no lease and no record; what
holds it in bounds is the size of bodies, and how many may run at once for one key. Only the primary's workers are asked:
the cheaper model counts otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from engine_adapter.body import BadRequest, Members, read_object, text, write_object
from engine_adapter.errors import EngineBroke, EngineUnavailable
from engine_adapter.splice import rename_model
from meter.callers.caller import Caller
from meter.gateway import credentials, replies, upstream
from meter.gateway.admission import Visit
from meter.gateway.fleet import Model, Target

if TYPE_CHECKING:
    from meter.gateway.exchange import Gateway

PATHS: Final = ("/v1/messages/count_tokens", "/tokenize", "/detokenize")

AT_ONCE: Final = 4
"""Of one key, in one process; its tier's `max_parallel` may say less. While an engine's front end tokenizes a long text it
does little else."""


class FreeCalls:
    """Those that run in this process."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._running: Counter[str] = Counter()

    async def answer(self, visit: Visit) -> web.Response:
        """Raises Reply where it ends early."""
        gateway = self._gateway
        caller = visit.caller = gateway.identify(visit.http)
        raw = await credentials.read_body(visit.http, int(gateway.config.listen.max_body_mb * 1024 * 1024))
        members, model = self._read(visit, caller, raw)
        with self._place(caller):
            return await self._first_that_answers(visit, model, members)

    def _read(self, visit: Visit, caller: Caller, raw: bytes) -> tuple[Members, Model]:
        try:
            members = read_object(raw)
            name = text(members, "model", "the name of a model, as a string")
        except BadRequest as wrong:
            raise replies.bad_request(wrong.message, wrong.param) from None
        return members, self._gateway.model_named(visit, caller, name)

    @contextmanager
    def _place(self, caller: Caller) -> Iterator[None]:
        most = AT_ONCE if caller.tier.max_parallel is None else min(AT_ONCE, caller.tier.max_parallel)
        if self._running[caller.key_id] >= most:
            raise replies.too_many_at_once(most)
        self._running[caller.key_id] += 1
        try:
            yield
        finally:
            self._running[caller.key_id] -= 1
            if not self._running[caller.key_id]:
                del self._running[caller.key_id]

    async def _first_that_answers(self, visit: Visit, model: Model, members: Members) -> web.Response:
        failure: EngineUnavailable | None = None
        for target in upstream.by_fitness(model.primary, self._gateway.timer()):
            try:
                return await self._from(visit, model, target, members)
            except upstream.EngineRefused as refused:
                raise refused.reply from None
            except EngineUnavailable as away:
                failure = away
                if away.phase != "busy":
                    upstream.fails(target, self._gateway.timer())
        assert failure is not None
        raise upstream.reply_of(failure) from None

    async def _from(self, visit: Visit, model: Model, target: Target, members: Members) -> web.Response:
        asked = write_object({**members, "model": msgspec.json.encode(target.model)})
        seconds = target.backend.terms.idle_seconds
        async with await upstream.ask(self._gateway, visit, target, asked, request_id=str(visit.request_id)) as answer:
            if answer.status != 200:
                raise await upstream.said(answer, seconds)
            try:
                said = await answer.read_all(seconds, upstream.MAX_ANSWER_BYTES)
            except TimeoutError:
                raise EngineUnavailable("The worker fell silent within its answer.", phase="head", status=504) from None
            except EngineBroke as broken:
                raise EngineUnavailable(str(broken), phase="head") from None
        body = said if model.expose_served_model else _renamed(said, model.name)
        upstream.works(target)
        visit.backend = target.backend.name
        response = web.Response(body=body)
        upstream.head(visit, target, answer, response)
        response.content_type = "application/json"
        return response


class _Named(msgspec.Struct):
    model: str | None = None


def _renamed(said: bytes, name: str) -> bytes:
    """With the caller's name of the model, should the answer have one; a long list of tokens is not read for it."""
    if b'"model"' not in said:
        return said
    try:
        return rename_model(said, msgspec.json.decode(said, type=_Named).model, name)
    except (msgspec.DecodeError, RecursionError):
        raise EngineUnavailable("The worker's answer is not a JSON object.", phase="head") from None
