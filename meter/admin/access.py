"""Who may do what: bearer tokens of the configuration and their roles.

admin: everything · operator: reads everything, disables keys · finance: reads usage, refusals and prices.
"""

from __future__ import annotations

import hmac
from hashlib import sha256

from aiohttp import web
from aiohttp.typedefs import Handler

from meter.admin.answers import Refusal
from meter.admin.deps import DEPS
from meter.config import AdminToken

OPEN = frozenset({"/healthz", "/readyz", "/metrics"})
FINANCE = frozenset({f"/admin/v1/{part}" for part in ("usage", "usage/records", "refusals", "prices")})
ONE_KEY = "/admin/v1/keys/{id}"
TOKEN: web.RequestKey[AdminToken] = web.RequestKey("token", AdminToken)
"""Whose request it is."""


@web.middleware
async def with_token(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Lets nothing through but the open paths, and what the token's role may do."""
    path = _template(request)
    if path not in OPEN and (path is not None or request.path.startswith("/admin")):
        token = request[TOKEN] = _holder(request)
        if not _may(token, request.method, path):
            raise Refusal(
                403, "forbidden", f"The token {token.name!r} has the role {token.role}, which may not do this."
            )
    return await handler(request)


def _template(request: web.Request) -> str | None:
    """The route's path with its placeholders; None: there is no such route or method."""
    resource = request.match_info.route.resource
    return None if resource is None else resource.canonical


def _holder(request: web.Request) -> AdminToken:
    scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
    token = _matching(request.app[DEPS].config.admin.tokens, shown.strip()) if scheme.lower() == "bearer" else None
    if token is None:
        message = "This needs an admin token: send Authorization: Bearer <token>."
        raise Refusal(401, "invalid_admin_token", message, headers={"WWW-Authenticate": "Bearer"})
    return token


def _matching(tokens: tuple[AdminToken, ...], shown: str) -> AdminToken | None:
    """Compared with each by hash and in constant time. Read anew each time: a token is changed without a restart."""
    digest = sha256(shown.encode(errors="surrogateescape")).digest()
    found = None
    for token in tokens:
        secret = _secret(token)
        if secret and hmac.compare_digest(sha256(secret.encode()).digest(), digest):
            found = token
    return found


def _secret(token: AdminToken) -> str | None:
    """None: unset, or its file cannot be read. Such a token opens nothing."""
    try:
        return token.token
    except (OSError, UnicodeDecodeError):
        return None


def _may(token: AdminToken, method: str, path: str | None) -> bool:
    reads = method in {"GET", "HEAD"}
    match token.role:
        case "admin":
            return True
        case "operator":
            return reads or (method == "PATCH" and path == ONE_KEY)
        case "finance":
            return reads and path in FINANCE
