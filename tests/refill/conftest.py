"""A ledger on each database, and a journal beside it."""

from __future__ import annotations

from tests.ledger.conftest import database, engine, journal

__all__ = ["database", "engine", "journal"]
