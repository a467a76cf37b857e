"""A ledger on each database and a journal beside it; and whole proxies between scripted workers, Redis and Postgres."""

from __future__ import annotations

from tests.cases.conftest import build, config, shared, u1, u2
from tests.ledger.conftest import database, engine, journal

__all__ = ["build", "config", "database", "engine", "journal", "shared", "u1", "u2"]
