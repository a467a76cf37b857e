"""What the admin site works with: built once by the application, passed in whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from aiohttp import web
from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import AsyncEngine

from meter.admin.health import Condition
from meter.callers.directory import Directory
from meter.callers.registry import Registry
from meter.config import Config
from quotas.store import QuotaStore


@dataclass(frozen=True)
class AdminDeps:
    """`state`: one line for each part of the process, for GET /state; `engine`: the ledger, for reports."""

    config: Config
    engine: AsyncEngine
    registry: Registry
    directory: Directory
    store: QuotaStore
    state: Callable[[], Mapping[str, object]]
    condition: Condition
    metrics: CollectorRegistry
    clock: Callable[[], datetime]


DEPS = web.AppKey("deps", AdminDeps)
