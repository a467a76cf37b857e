"""What the admin and health sites answer: JSON, an ETag where a single thing can be edited, errors in one shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from meter.callers.errors import Conflict, Invalid, Mistake, NotFound, ReadOnly, Stale
from meter.ledger.database import DatabaseUnavailable, SchemaMissing
from quotas.store import StoreUnavailable


class Refusal(Exception):
    """A request that is answered with an error. `param` names the field or header that is wrong."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        details: list[Mistake] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.details = details
        self.headers = headers

    def response(self) -> web.Response:
        error: dict[str, Any] = {
            "message": self.message,
            "type": "invalid_request_error" if self.status < 500 else "server_error",
            "param": self.param,
            "code": self.code,
        }
        if self.details is not None:
            error["details"] = [{"field": field, "message": reason} for field, reason in self.details]
        return answer({"error": error}, self.status, headers=self.headers)


def answer(
    body: object, status: int = 200, *, version: int | None = None, headers: Mapping[str, str] | None = None
) -> web.Response:
    """`version`: of the one thing that the body shows; becomes the ETag."""
    response = web.Response(
        body=msgspec.json.encode(body, enc_hook=str), status=status, content_type="application/json", headers=headers
    )
    if version is not None:
        response.headers["ETag"] = f'"{version}"'
    return response


def refusal_for(error: Exception) -> Refusal | None:
    """How an error of the registry or the store is answered; None: it is no such error."""
    match error:
        case NotFound():
            return Refusal(404, "not_found", str(error))
        case Conflict():
            return Refusal(409, "conflict", str(error))
        case ReadOnly():
            return Refusal(409, "managed_by_file", str(error))
        case Stale():
            return Refusal(412, "precondition_failed", str(error), param="If-Match")
        case Invalid():
            field = error.mistakes[0][0] or None
            return Refusal(422, "invalid_value", str(error), param=field, details=error.mistakes)
        case SchemaMissing():
            return Refusal(503, "database_unavailable", str(error), headers={"Retry-After": "1"})
        case DatabaseUnavailable():  # what it says may name host and user: that is for the log
            message = "The ledger's database cannot be reached; try again in a moment."
            return Refusal(503, "database_unavailable", message, headers={"Retry-After": "1"})
        case StoreUnavailable():
            message = "The quota store does not answer; try again in a moment."
            return Refusal(503, "quota_unavailable", message, headers={"Retry-After": "1"})
    return None
