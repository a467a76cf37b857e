"""The traffic site: routes, limits, cancellation, draining. Paths are matched raw: what the engine would decode is not ours.

aiohttp's low-level server, because every request takes the same few steps; with handler_cancellation, without which a
client that leaves is noticed only at the next write (https://docs.aiohttp.org/en/stable/web_advanced.html).
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable
from urllib.parse import unquote
from uuid import UUID

import msgspec
import uuid_utils
from aiohttp import web

from engine_adapter.request import ENDPOINTS
from meter.config import ListenTerms
from meter.gateway import credentials, replies
from meter.gateway.admission import Visit
from meter.gateway.exchange import Gateway
from meter.gateway.free import PATHS as FREE
from meter.gateway.free import FreeCalls
from meter.gateway.replies import Reply
from meter.listener import Listener
from meter.telemetry import log
from meter.telemetry.metrics import OTHER
from quotas.store import LeaseView, StoreUnavailable, View

CLIENT_CLOSED = 499
"""What a request counts as whose client left before it was answered (nginx's word for it)."""

MODELS, QUOTA = "/v1/models", "/v1/quota"
_COUNTED = frozenset({*ENDPOINTS, *FREE, MODELS, QUOTA})
_NONE = "none"
_ABSOLUTE = re.compile(r"^https?://[^/?]*", re.IGNORECASE)
"""What a target in absolute form has before its path (RFC 9112, 3.2.2); our own address, whatever it says."""


class TrafficSite:
    """Listens, routes, answers; knows which requests run."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._free = FreeCalls(gateway)
        self._tasks: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._runner: web.ServerRunner | None = None
        self._site: web.TCPSite | None = None
        self._cors = frozenset(gateway.config.listen.cors_origins)
        self._born = int(gateway.now().timestamp())
        self.draining = False

    # ---- listening ---------------------------------------------------------------------------------------------------

    async def start(self, terms: ListenTerms) -> int:
        """Binds; returns the port."""
        server = Listener(self._handle, handler_cancellation=True, auto_decompress=False)
        self._runner = web.ServerRunner(server, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, terms.host, terms.port, ssl_context=_tls(terms), backlog=1024)
        await self._site.start()
        port: int = self._runner.addresses[0][1]
        return port

    def drain(self) -> None:
        """New requests are refused from now on; running ones go on."""
        self.draining = True

    async def drained(self, seconds: float) -> bool:
        """Waits until nothing runs any more, at most `seconds`."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def stop(self, grace_seconds: float) -> None:
        """Stops listening, lets running requests finish within the grace, cuts the rest cleanly."""
        self.drain()
        if self._site is not None:
            await self._site.stop()
        if not await self.drained(grace_seconds):
            self._gateway.leaving = True
            for task in list(self._tasks):
                task.cancel()
            await self.drained(2.0)
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def inflight(self) -> int:
        return len(self._tasks)

    # ---- one request -------------------------------------------------------------------------------------------------

    async def _handle(self, http: web.BaseRequest) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._idle.clear()
        self._gateway.metrics.inflight.inc()
        visit = self._visit(http)
        status = CLIENT_CLOSED
        try:
            response = await self._answer(visit)
            status = response.status
            return response
        finally:
            self._count(visit, status)
            self._gateway.metrics.inflight.dec()
            self._tasks.discard(task)
            if not self._tasks:
                self._idle.set()

    def _visit(self, http: web.BaseRequest) -> Visit:
        path, _, query = _ABSOLUTE.sub("", http.raw_path).partition("?")
        visit = Visit(
            http=http,
            path=path,
            query=query,
            request_id=UUID(bytes=uuid_utils.uuid7().bytes),
            started_at=self._gateway.now(),
            started=self._gateway.timer(),
        )
        visit.headers.append(("x-weir-request-id", str(visit.request_id)))
        if (said := credentials.client_request_id(http.headers)) is not None:
            visit.headers.append(("x-request-id", said))
        visit.headers += self._cors_headers(http)
        return visit

    async def _answer(self, visit: Visit) -> web.StreamResponse:
        try:
            if self.draining:
                raise replies.shutting_down()
            return await self._route(visit)
        except Reply as reply:
            return self._respond(visit, reply)
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception:
            log.log.exception("a request failed here", extra={"fields": {"request_id": str(visit.request_id)}})
            if visit.response is not None:  # its head is out: all that is left is not to pretend a clean end
                if visit.http.transport is not None:
                    visit.http.transport.abort()
                return visit.response
            return self._respond(visit, replies.internal())

    async def _route(self, visit: Visit) -> web.StreamResponse:
        handlers = self._handlers(visit.path)
        if not handlers:
            raise replies.not_found(visit.path)
        method = visit.http.method
        if method == "OPTIONS" and self._cors:
            return self._preflight(visit, handlers)
        handler = handlers.get(method)
        if handler is None:
            raise replies.method_not_allowed(method, handlers)
        return await handler(visit)

    def _handlers(self, path: str) -> dict[str, Callable[[Visit], Awaitable[web.StreamResponse]]]:
        if path in ENDPOINTS:
            return {"POST": self._gateway.converse}
        if path in FREE:
            return {"POST": self._free.answer}
        if path == MODELS or path.startswith(MODELS + "/"):
            return {"GET": self._models, "HEAD": self._models}
        if path == QUOTA:
            return {"GET": self._quota, "HEAD": self._quota}
        return {}

    # ---- what is answered here ---------------------------------------------------------------------------------------

    async def _models(self, visit: Visit) -> web.Response:
        caller = visit.caller = self._gateway.identify(visit.http)
        names = [name for name in self._gateway.fleet.models if caller.models is None or name in caller.models]
        if visit.path == MODELS:
            return _json(visit, {"object": "list", "data": [self._model(name) for name in names]})
        name = unquote(visit.path.removeprefix(MODELS + "/"))
        if name not in names:
            raise replies.model_not_found(name)
        return _json(visit, self._model(name))

    def _model(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._born, "owned_by": "tokenweir"}

    async def _quota(self, visit: Visit) -> web.Response:
        caller = visit.caller = self._gateway.identify(visit.http)
        try:
            with self._gateway.timed("peek"):
                view = await self._gateway.store.peek(caller.account)
        except StoreUnavailable:
            raise replies.quota_unavailable("its windows cannot be shown") from None
        return _json(visit, _quota_of(view, caller.key_id))

    def _respond(self, visit: Visit, reply: Reply) -> web.Response:
        response = web.Response(status=reply.status, body=reply.body(visit.dialect), content_type="application/json")
        for name, value in (*visit.headers, *reply.headers):
            response.headers[name] = value
        if ("connection", "close") in reply.headers:
            response.force_close()
        if visit.verdict is not None:
            response.headers.setdefault("x-weir-verdict", visit.verdict)
        log.info(
            "refused" if reply.status == 429 else "answered",
            request_id=str(visit.request_id),
            key_id=visit.caller and visit.caller.key_id,
            path=visit.path[:200],
            status=reply.status,
            code=reply.code,
            model=visit.model,
        )
        return response

    def _count(self, visit: Visit, status: int) -> None:
        endpoint = visit.path if visit.path in _COUNTED else OTHER
        self._gateway.metrics.requests.labels(
            endpoint, visit.model or _NONE, visit.backend or _NONE, visit.verdict or _NONE, str(status)
        ).inc()

    # ---- browsers ----------------------------------------------------------------------------------------------------

    def _cors_headers(self, http: web.BaseRequest) -> replies.Headers:
        origin = http.headers.get("origin")
        if origin is None or not (origin in self._cors or "*" in self._cors):
            return []
        exposed = "x-weir-request-id, x-weir-verdict, x-weir-backend, x-weir-model, retry-after, ratelimit"
        return [
            ("access-control-allow-origin", origin),
            ("access-control-expose-headers", exposed),
            ("vary", "Origin"),
        ]

    def _preflight(
        self, visit: Visit, handlers: dict[str, Callable[[Visit], Awaitable[web.StreamResponse]]]
    ) -> web.Response:
        response = web.Response(status=204)
        for name, value in visit.headers:
            response.headers[name] = value
        response.headers["access-control-allow-methods"] = ", ".join(sorted(handlers))
        response.headers["access-control-allow-headers"] = (
            "authorization, api-key, x-api-key, content-type, x-request-id, x-weir-on-overage, x-weir-tags,"
            " anthropic-version, anthropic-beta"
        )
        response.headers["access-control-max-age"] = "600"
        return response


def _quota_of(view: View, key_id: str) -> dict[str, object]:
    """`{"windows": […], "leases": […]}` as the contract shapes them; of a team's leases only the key's own."""
    return {"windows": view.windows, "leases": [_lease(lease) for lease in view.leases if lease.key == key_id]}


def _lease(lease: LeaseView) -> dict[str, object]:
    return {
        "request_id": lease.lease,
        "route": lease.route,
        "held": lease.held,
        "charged": lease.charged,
        "age_seconds": lease.age_seconds,
    }


def _json(visit: Visit, body: object) -> web.Response:
    response = web.Response(body=msgspec.json.encode(body), content_type="application/json")
    for name, value in visit.headers:
        response.headers[name] = value
    return response


def _tls(terms: ListenTerms) -> ssl.SSLContext | None:
    if terms.tls is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(terms.tls.cert_file, terms.tls.key_file)
    return context
