"""Every way out of a handler is an answer in JSON with a request id; what nobody foresaw is logged, and is a 500."""

from __future__ import annotations

import uuid_utils
from aiohttp import web
from aiohttp.typedefs import Handler

from meter.admin.answers import Refusal, refusal_for
from meter.ledger.database import DatabaseUnavailable
from meter.telemetry.log import log

REQUEST_ID = "x-weir-request-id"
ID: web.RequestKey[str] = web.RequestKey("id", str)
"""What this request is called in the answer and in the log."""


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    request_id = request[ID] = str(uuid_utils.uuid7())
    try:
        response = await handler(request)
    except Exception as error:
        if isinstance(error, ConnectionError) and request.transport is None:
            raise  # the client has left: nobody is there to be answered
        response = _refusal(request, error, request_id).response()
    if not response.prepared:
        response.headers[REQUEST_ID] = request_id
    return response


def _refusal(request: web.Request, error: Exception, request_id: str) -> Refusal:
    if isinstance(error, Refusal):
        return error
    if isinstance(error, web.HTTPException):
        return _of_http(request, error)
    if isinstance(error, web.RequestPayloadError):
        return Refusal(400, "invalid_body", "The body cannot be read: it broke off, or is not encoded as it says.")
    known = refusal_for(error)
    if isinstance(error, DatabaseUnavailable):
        log.warning("the database cannot be used", extra={"fields": {"reason": str(error), "request_id": request_id}})
    if known is None:
        log.error("admin request failed", exc_info=error, extra={"fields": {"request_id": request_id}})
        return Refusal(500, "internal_error", f"Something went wrong here; the log says what, under {request_id}.")
    return known


def _of_http(request: web.Request, error: web.HTTPException) -> Refusal:
    match error:
        case web.HTTPNotFound():
            return Refusal(404, "not_found", f"There is nothing at {request.path[:200]}.")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"{request.method[:20]} is not possible here; {allowed} is."
            return Refusal(405, "method_not_allowed", message, headers={"Allow": allowed})
        case web.HTTPRequestEntityTooLarge():
            return Refusal(413, "request_too_large", "The body is too large; the limit is 4 MiB.")
    return Refusal(error.status, "invalid_request", error.reason or "The request cannot be understood.")
