"""One edit: a transaction that counts the revision up, writes rows, and says in the audit log what they were before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeVar

from msgspec.structs import asdict, replace
from pydantic import ValidationError
from sqlalchemy import Table, delete, insert, update
from sqlalchemy.ext.asyncio import AsyncConnection

from meter.callers.errors import Mistake, mistakes_in
from meter.callers.stored import StoredKey, StoredPrice, StoredTerms
from meter.callers.tables import keys_on, terms_named
from meter.callers.tiers import merged
from meter.ledger.schema import api_key, audit_log, price, team, tier

Entity = Literal["key", "tier", "team", "price"]
Stored = StoredKey | StoredTerms | StoredPrice
Versioned = TypeVar("Versioned", StoredKey, StoredTerms)

TABLES: Mapping[Entity, Table] = {"key": api_key, "tier": tier, "team": team, "price": price}


@dataclass(frozen=True, slots=True)
class Edit:
    """`revision` is the one this edit makes. Nobody else edits until its transaction has ended."""

    connection: AsyncConnection
    actor: str
    now: datetime
    revision: int

    async def create(self, entity: Entity, new: Versioned) -> Versioned:
        """Versions start at the revision: so a name that was deleted and made again never has a version it had before."""
        new = replace(new, version=self.revision)
        await self.connection.execute(insert(TABLES[entity]).values(asdict(new)))
        await self._audit("create", entity, None, new)
        return new

    async def change(self, entity: Entity, before: Versioned, after: Versioned) -> Versioned:
        after = replace(after, version=before.version + 1)
        table = TABLES[entity]
        identity = next(iter(table.primary_key))
        statement = update(table).where(identity == _identity(before)).values(asdict(after))
        await self.connection.execute(statement)
        await self._audit("update", entity, before, after)
        return after

    async def delete(self, entity: Entity, before: StoredKey | StoredTerms) -> None:
        table = TABLES[entity]
        await self.connection.execute(delete(table).where(next(iter(table.primary_key)) == _identity(before)))
        await self._audit("delete", entity, before, None)

    async def add_price(self, new: StoredPrice) -> StoredPrice:
        """Prices are only ever added."""
        columns = asdict(new)
        del columns["id"]
        number = await self.connection.scalar(insert(price).values(columns).returning(price.c.id))
        new = replace(new, id=number)
        await self._audit("create", "price", None, new)
        return new

    async def key_mistakes(self, key: StoredKey, prefix: str = "policy") -> list[Mistake]:
        """What stands against these terms: a tier or team that is not there, an override that does not fit the tier."""
        found: list[Mistake] = []
        of_tier = await terms_named(self.connection, "tier", key.tier)
        if of_tier is None:
            found.append(("tier", f"there is no tier {key.tier!r}; make it first, or name another"))
        else:
            found += misfits(of_tier.policy, key.policy, prefix)
        if key.team is not None and await terms_named(self.connection, "team", key.team) is None:
            found.append(("team", f"there is no team {key.team!r}; make it first, or name another"))
        return found

    async def tier_mistakes(self, name: str, policy: Mapping[str, Any]) -> list[Mistake]:
        """The overrides that would make no sense any more on a tier with these terms."""
        return [
            (field, f"does not fit the override of key {key.name!r} ({key.id}): {reason}")
            for key in await keys_on(self.connection, "tier", name)
            if key.policy
            for field, reason in misfits(policy, key.policy)
        ]

    async def _audit(self, action: str, entity: Entity, before: Stored | None, after: Stored | None) -> None:
        subject = after or before
        assert subject is not None
        row = {
            "at": self.now,
            "actor": self.actor,
            "action": action,
            "entity": entity,
            "entity_id": _identity(subject),
            "before": self._shown(before),
            "after": self._shown(after),
        }
        await self.connection.execute(insert(audit_log).values(row))

    def _shown(self, stored: Stored | None) -> dict[str, Any] | None:
        if stored is None:
            return None
        return stored.shown(self.now) if isinstance(stored, StoredKey) else stored.shown()


def misfits(tier_policy: Mapping[str, Any], override: Mapping[str, Any], prefix: str = "") -> list[Mistake]:
    """Why an override cannot stand on a tier; empty: it can."""
    try:
        merged(tier_policy, override)
    except ValidationError as error:
        return mistakes_in(error, prefix)
    return []


def _identity(stored: Stored) -> str:
    return stored.name if isinstance(stored, StoredTerms) else str(stored.id)
