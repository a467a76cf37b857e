"""The health site: for probes, scrapers and the hook that runs before a pod is stopped. No keys, no tokens, no edits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from typing import Protocol

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest

from meter.admin.answers import Refusal, answer
from meter.admin.errors import errors_as_json

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Condition(Protocol):
    """How the process is. Problems keep it from working as it should, warnings want to be known."""

    def ready(self) -> tuple[bool, list[str], list[str]]:
        """(whether it takes requests now, problems, warnings)"""

    def drain(self) -> None:
        """Takes no new requests from now on and lets running ones finish; may be said again."""

    async def drained(self) -> None:
        """Returns when nothing runs any more, or when the grace period has passed."""


def health_app(condition: Condition, metrics: CollectorRegistry = REGISTRY) -> web.Application:
    """GET /healthz, /readyz, /metrics and POST /drain; nothing else is here."""
    app = web.Application(middlewares=[errors_as_json])
    app.add_routes([*open_routes(condition, metrics), web.post("/drain", _drain(condition))])
    return app


def open_routes(condition: Condition, metrics: CollectorRegistry) -> list[web.RouteDef]:
    """The three that need no token, wherever they are served."""
    return [
        web.get("/healthz", _alive),
        web.get("/readyz", _ready(condition)),
        web.get("/metrics", _metrics(metrics)),
    ]


async def _alive(_: web.Request) -> web.Response:
    return answer({"status": "alive"})


def _ready(condition: Condition) -> Handler:
    async def ready(_: web.Request) -> web.Response:
        takes, problems, warnings = condition.ready()
        status = "unready" if not takes else "degraded" if problems else "ready"
        return answer({"status": status, "problems": problems, "warnings": warnings}, 200 if takes else 503)

    return ready


def _metrics(registry: CollectorRegistry) -> Handler:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return metrics


def _drain(condition: Condition) -> Handler:
    async def drain(request: web.Request) -> web.Response:
        if not from_loopback(request.remote):
            raise Refusal(403, "loopback_only", "Drain is only for this machine: call it through 127.0.0.1.")
        condition.drain()
        await condition.drained()
        return answer({"status": "drained"})

    return drain


def from_loopback(remote: str | None) -> bool:
    """Whether a peer's address is this machine's own. A Unix socket has none, and counts."""
    if not remote:
        return True
    try:
        address = ip_address(remote.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
