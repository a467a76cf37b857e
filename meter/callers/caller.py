"""Who is asking, once the key is known: everything the gateway needs of it, immutable, ready for the hot path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from meter.callers.tiers import Tier
from quotas.store import Account


@dataclass(frozen=True, slots=True)
class Caller:
    """`tier` are the merged terms in force; `models` what it may ask for (None: every configured model)."""

    key_id: str
    name: str
    team_id: str | None
    tier_name: str
    tier: Tier
    models: frozenset[str] | None
    tags: Mapping[str, str]
    expires_at: datetime | None
    account: Account


class UnknownKey(Exception):
    """No such key, or it is disabled or expired. `reason`: missing | malformed | unknown | disabled | expired."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class CallerBook(Protocol):
    """Finds callers. In memory, no I/O: refreshed behind the scenes within a second of an edit."""

    def identify(self, credential: str, now: datetime) -> Caller:
        """The caller of `wk-<public id>-<secret>`; raises UnknownKey."""

    def by_key(self, key_id: str) -> Caller | None:
        """The caller of a key's id as its terms stand now; None when it is gone."""
