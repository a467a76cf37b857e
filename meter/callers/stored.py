"""Keys, tiers, teams and prices as they stand in the database, and as people may see them: without any hash."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from meter.ledger.pricing import NANOS

ManagedBy = Literal["file", "rest"]
TermsKind = Literal["tier", "team"]
KeyState = Literal["active", "disabled", "expired"]


class StoredKey(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `api_key`; `version` counts its changes (0: not stored yet). Its hashes are in no `repr` and in nothing that `shown` gives."""

    id: str
    name: str
    tier: str
    created_at: datetime
    secret_sha256: str
    version: int = 0
    team: str | None = None
    models: list[str] | None = None
    tags: dict[str, str] = {}
    policy: dict[str, Any] = {}
    disabled: bool = False
    previous_sha256: str | None = None
    previous_until: datetime | None = None
    managed_by: ManagedBy = "rest"
    expires_at: datetime | None = None

    def __repr__(self) -> str:
        return f"StoredKey(id={self.id!r}, name={self.name!r}, tier={self.tier!r}, version={self.version})"

    def state(self, now: datetime) -> KeyState:
        if self.disabled:
            return "disabled"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "active"

    def shown(self, now: datetime) -> dict[str, Any]:
        """What everybody who may read keys may see."""
        return {
            "id": self.id,
            "name": self.name,
            "tier": self.tier,
            "team": self.team,
            "state": self.state(now),
            "models": self.models,
            "tags": self.tags,
            "policy": self.policy,
            "created_at": iso(self.created_at),
            "expires_at": iso(self.expires_at),
            "previous_secret_until": iso(self.previous_until),
            "managed_by": self.managed_by,
        }


class StoredTerms(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `tier` or `team`; `policy` has the fields that were given."""

    name: str
    version: int = 0
    policy: dict[str, Any] = {}
    managed_by: ManagedBy = "rest"

    def shown(self) -> dict[str, Any]:
        return {"name": self.name, "policy": self.policy, "managed_by": self.managed_by}


class StoredPrice(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `price`: nano-dollars per million tokens. `id` is the database's; 0: not stored yet."""

    id: int = 0
    model: str
    backend: str
    effective_from: datetime
    prompt: int
    completion: int
    cached_prompt: int | None = None
    managed_by: ManagedBy = "rest"

    def shown(self) -> dict[str, Any]:
        """In US dollars per million tokens."""
        return {
            "id": self.id,
            "model": self.model,
            "backend": self.backend,
            "effective_from": iso(self.effective_from),
            "prompt": self.prompt / NANOS,
            "cached_prompt": None if self.cached_prompt is None else self.cached_prompt / NANOS,
            "completion": self.completion / NANOS,
            "managed_by": self.managed_by,
        }


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """All of it at one moment: what the directory serves from, and what its snapshot file holds."""

    revision: int = 0
    keys: dict[str, StoredKey] = {}
    tiers: dict[str, StoredTerms] = {}
    teams: dict[str, StoredTerms] = {}
    prices: list[StoredPrice] = []

    def terms(self, kind: TermsKind) -> dict[str, StoredTerms]:
        return self.tiers if kind == "tier" else self.teams


def utc(moment: datetime) -> datetime:
    """SQLite keeps no zone: what comes back without one was UTC."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def iso(moment: datetime | None) -> str | None:
    """As RFC 3339 has it, in UTC."""
    return None if moment is None else moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
