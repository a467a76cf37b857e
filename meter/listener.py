"""The HTTP server beneath every site: aiohttp's, but what is no proper HTTP is answered in the sites' error shape."""

from __future__ import annotations

import logging
import re
from typing import Any

import msgspec
import uuid_utils
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMethod

from meter.telemetry import log

MAX_HEAD_BYTES = 16 * 1024
"""Of one header field and of the request line."""

_METHOD = re.compile(r"\b[A-Z]{1,20} /\S* HTTP/1")


_SETTINGS: dict[str, Any] = {
    "access_log": None,
    "keepalive_timeout": 75,  # idle connections, and heads that are never finished
    "logger": logging.getLogger("weir.http"),
    "max_line_size": MAX_HEAD_BYTES,
    "max_field_size": MAX_HEAD_BYTES,
}


class Listener(web.Server):
    """`web.Server` with our connections; keywords are those of `web.Server`."""

    def __call__(self) -> _Connection:
        return _Connection(self, loop=self._loop, **_SETTINGS, **self._kwargs)

    @classmethod
    async def beneath(cls, app: web.AppRunner) -> web.ServerRunner:
        """The same server for an application; `app` is set up here and must be cleaned up by the caller."""
        await app.setup()
        assert app.server is not None
        return web.ServerRunner(
            cls(app.server.request_handler, request_factory=app.server.request_factory),
            handle_signals=False,
            shutdown_timeout=1.0,
        )


class _Connection(web.RequestHandler):
    def log_exception(self, *args: Any, **kw: Any) -> None:
        """A body that is not what it claims to be is its sender's affair; anything else is ours."""
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Without a stack trace in the log: anybody can send this, and what was sent may hold a key."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer is under way already")
        response = _answer(status, exc)
        log.info("no proper request", status=response.status, reason=type(exc).__name__)
        response.headers["connection"] = "close"
        response.headers["x-weir-request-id"] = str(uuid_utils.uuid7())
        response.force_close()
        return response


def _answer(status: int, error: BaseException | None) -> web.Response:
    if isinstance(error, BadHttpMethod) and _METHOD.search(str(error)):  # the parser knows registered methods only
        response = _error(405, "method_not_allowed", "This method is not possible here.")
        response.headers["allow"] = "GET, HEAD, OPTIONS, POST"
        return response
    if status >= 500:
        return _error(500, "internal_error", "Something went wrong here; it has been logged.", "server_error")
    return _error(400, None, "This is not a proper HTTP/1.1 request.")


def _error(status: int, code: str | None, message: str, kind: str = "invalid_request_error") -> web.Response:
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")
