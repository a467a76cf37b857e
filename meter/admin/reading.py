"""Keys, tiers and teams from the database; while it is away, as the directory knew them last."""

from __future__ import annotations

from datetime import datetime

from meter.admin.deps import AdminDeps
from meter.callers.errors import NotFound
from meter.callers.stored import Known, StoredKey, StoredTerms, TermsKind
from meter.ledger.database import DatabaseUnavailable


async def key_and_tier(deps: AdminDeps, key_id: str) -> tuple[StoredKey, StoredTerms]:
    """Raises NotFound."""
    try:
        return await deps.registry.key_and_tier(key_id)
    except DatabaseUnavailable as away:
        known = _last_known(deps, away)
        key = known.keys.get(key_id)
        if key is None:
            raise NotFound(f"There is no key {key_id!r}.") from None
        return key, known.tiers[key.tier]


async def page_of_keys(deps: AdminDeps, after: tuple[datetime, str] | None, limit: int) -> list[StoredKey]:
    """The oldest first, from behind this one."""
    try:
        return await deps.registry.keys(after, limit)
    except DatabaseUnavailable as away:
        keys = sorted(_last_known(deps, away).keys.values(), key=_age)
        return [key for key in keys if after is None or _age(key) > after][:limit]


async def terms_named(deps: AdminDeps, kind: TermsKind, name: str) -> StoredTerms:
    """Raises NotFound."""
    try:
        return await deps.registry.terms(kind, name)
    except DatabaseUnavailable as away:
        terms = _last_known(deps, away).terms(kind).get(name)
        if terms is None:
            raise NotFound(f"There is no {kind} {name!r}.") from None
        return terms


async def all_terms(deps: AdminDeps, kind: TermsKind) -> list[StoredTerms]:
    """By name."""
    try:
        return await deps.registry.all_terms(kind)
    except DatabaseUnavailable as away:
        return sorted(_last_known(deps, away).terms(kind).values(), key=lambda terms: terms.name)


def _last_known(deps: AdminDeps, away: DatabaseUnavailable) -> Known:
    if not deps.directory.loaded:
        raise away
    return deps.directory.known


def _age(key: StoredKey) -> tuple[datetime, str]:
    return key.created_at, key.id
