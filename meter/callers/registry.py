"""Every edit of keys, tiers, teams and prices, for REST and the command line alike: one transaction each, audited.

An edit names the versions it was decided on (`expected`; None: whatever stands there). Errors are those of `errors`,
and DatabaseUnavailable: then the edit that was being committed may or may not have happened.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any, TypeVar

from msgspec.structs import replace
from pydantic import TypeAdapter, ValidationError
from sqlalchemy import RowMapping, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from meter.callers import seed
from meter.callers.edit import Edit
from meter.callers.edits import KeyDraft, KeyPatch, PriceDraft, Rotation, read
from meter.callers.errors import Conflict, Invalid, Mistake, NotFound, ReadOnly, Stale, mistakes_in
from meter.callers.keys import new_key, new_secret
from meter.callers.stored import Known, StoredKey, StoredPrice, StoredTerms, TermsKind
from meter.callers.tables import (
    everything,
    key_with,
    keys_on,
    next_revision,
    page_of_keys,
    page_of_prices,
    price_at,
    price_in_force,
    reading,
    terms_by_name,
    terms_named,
    transaction,
)
from meter.callers.tiers import Override, ScopeTerms, Tier, given
from meter.config import Config, Name
from meter.ledger.pricing import from_usd_per_million
from meter.ledger.schema import audit_log

Expected = Collection[int] | None
Policy = Mapping[str, object]
Thing = TypeVar("Thing")

TERMS_MODEL: Mapping[TermsKind, type[ScopeTerms]] = {"tier": Tier, "team": ScopeTerms}
NAME: TypeAdapter[str] = TypeAdapter(Name)


class Registry:
    """`timeout`: seconds after which the database counts as away."""

    def __init__(self, engine: AsyncEngine, clock: Callable[[], datetime], timeout: float = 5.0) -> None:
        self._engine = engine
        self._clock = clock
        self._timeout = timeout

    # Keys

    async def create_key(self, actor: str, draft: KeyDraft) -> tuple[StoredKey, str]:
        """The key, and its credential, which nothing can tell again."""
        credential = new_key()
        async with self._edit(actor) as edit:
            key = StoredKey(
                id=credential.public_id,
                secret_sha256=credential.secret_sha256,
                created_at=edit.now,
                policy=given(draft.policy),
                models=None if draft.models is None else list(draft.models),
                **draft.model_dump(include={"name", "tier", "team", "tags", "expires_at"}),
            )
            await _free_name(edit, key)
            _none(await edit.key_mistakes(key) + _already_over(key, edit.now))
            return await edit.create("key", key), credential.text

    async def patch_key(self, actor: str, key_id: str, expected: Expected, patch: KeyPatch) -> StoredKey:
        return await self._change_key(actor, key_id, expected, patch.changes())

    async def set_override(self, actor: str, key_id: str, expected: Expected, policy: Policy) -> StoredKey:
        """Replaces the whole override; empty: back to the tier."""
        return await self._change_key(actor, key_id, expected, {"policy": given(read(Override, policy))})

    async def rotate_key(
        self, actor: str, key_id: str, rotation: Rotation, expected: Expected = None
    ) -> tuple[StoredKey, str]:
        """A new secret; the one it had opens until the grace is over, one older than that no more."""
        credential = new_secret(key_id)
        async with self._edit(actor) as edit:
            before = await _key(edit, key_id, expected)
            _ours(before, f"key {before.name!r}")
            until = edit.now + timedelta(seconds=rotation.grace_seconds)
            after = replace(
                before,
                secret_sha256=credential.secret_sha256,
                previous_sha256=before.secret_sha256 if rotation.grace_seconds else None,
                previous_until=until if rotation.grace_seconds else None,
            )
            return await edit.change("key", before, after), credential.text

    async def delete_key(self, actor: str, key_id: str, expected: Expected) -> None:
        """Its records stay in the ledger."""
        async with self._edit(actor) as edit:
            before = await _key(edit, key_id, expected)
            _ours(before, f"key {before.name!r}")
            await edit.delete("key", before)

    async def _change_key(self, actor: str, key_id: str, expected: Expected, changes: dict[str, Any]) -> StoredKey:
        async with self._edit(actor) as edit:
            before = await _key(edit, key_id, expected)
            if changes.keys() - {
                "disabled"
            }:  # the file says nothing about the state: a leaked key can be shut anywhere
                _ours(before, f"key {before.name!r}")
            after = replace(before, **changes)
            if after.name != before.name:
                await _free_name(edit, after)
            if changes.keys() & {"tier", "team", "policy"}:
                _none(await edit.key_mistakes(after, "" if changes.keys() == {"policy"} else "policy"))
            return await edit.change("key", before, after)

    # Tiers and teams

    async def create_terms(self, actor: str, kind: TermsKind, name: str, policy: Policy) -> StoredTerms:
        """Raises Stale where the name is there already."""
        _none(_name_mistakes(name))
        terms = given(read(TERMS_MODEL[kind], policy))
        async with self._edit(actor) as edit:
            if await terms_named(edit.connection, kind, name):
                raise Stale(f"There is a {kind} {name!r} already; read it, and send its ETag as If-Match.")
            return await edit.create(kind, StoredTerms(name=name, policy=terms))

    async def replace_terms(
        self, actor: str, kind: TermsKind, name: str, expected: Expected, policy: Policy
    ) -> StoredTerms:
        """All terms anew: what is absent is the default. A tier that its keys' overrides would not fit is refused."""
        terms = given(read(TERMS_MODEL[kind], policy))
        async with self._edit(actor) as edit:
            before = await _terms(edit, kind, name, expected)
            _ours(before, f"{kind} {name!r}")
            if kind == "tier":
                _none(await edit.tier_mistakes(name, terms))
            return await edit.change(kind, before, replace(before, policy=terms))

    async def delete_terms(self, actor: str, kind: TermsKind, name: str, expected: Expected) -> None:
        """Raises Conflict while keys use it, and names them."""
        async with self._edit(actor) as edit:
            before = await _terms(edit, kind, name, expected)
            _ours(before, f"{kind} {name!r}")
            if (kind, name) == ("tier", seed.STANDARD):
                raise Conflict("The tier 'standard' always exists; give it other limits instead of deleting it.")
            if users := await keys_on(edit.connection, kind, name):
                raise Conflict(f"The {kind} {name!r} is in use by {_listed(users)}; move them first.")
            await edit.delete(kind, before)

    # Prices

    async def add_price(self, actor: str, draft: PriceDraft) -> StoredPrice:
        """In force from now on or later; the past keeps the prices it had."""
        async with self._edit(actor) as edit:
            price = StoredPrice(
                model=draft.model,
                backend=draft.backend,
                effective_from=draft.effective_from or edit.now,
                prompt=from_usd_per_million(draft.prompt),
                completion=from_usd_per_million(draft.completion),
                cached_prompt=None if draft.cached_prompt is None else from_usd_per_million(draft.cached_prompt),
            )
            if price.effective_from < edit.now:
                raise Invalid([("effective_from", "must not lie in the past: what was used is priced already")])
            if await price_at(edit.connection, price.model, price.backend, price.effective_from):
                raise Conflict("There is a price of this model and backend from that very moment on already.")
            latest = await price_in_force(edit.connection, price.model, price.backend, edit.now)
            if latest is not None:
                _ours(latest, f"price of {price.model!r} at {price.backend!r}")
            return await edit.add_price(price)

    # Reading

    async def key(self, key_id: str) -> StoredKey:
        async with self._read() as connection:
            return _found(await key_with(connection, id=key_id), f"There is no key {key_id!r}.")

    async def key_and_tier(self, key_id: str) -> tuple[StoredKey, StoredTerms]:
        """What a key's terms are made of."""
        async with self._read() as connection:
            key = _found(await key_with(connection, id=key_id), f"There is no key {key_id!r}.")
            tier = await terms_named(connection, "tier", key.tier)
            return key, _found(tier, f"There is no tier {key.tier!r}, which the key is on; make it.")

    async def key_named(self, name: str) -> StoredKey:
        async with self._read() as connection:
            return _found(await key_with(connection, name=name), f"There is no key named {name!r}.")

    async def keys(self, after: tuple[datetime, str] | None, limit: int) -> list[StoredKey]:
        """The oldest first; `after`: the moment of creation and the id of the last one seen."""
        async with self._read() as connection:
            return await page_of_keys(connection, after, limit)

    async def terms(self, kind: TermsKind, name: str) -> StoredTerms:
        async with self._read() as connection:
            return _found(await terms_named(connection, kind, name), f"There is no {kind} {name!r}.")

    async def all_terms(self, kind: TermsKind) -> list[StoredTerms]:
        """By name."""
        async with self._read() as connection:
            return await terms_by_name(connection, kind)

    async def prices(self, after: int, limit: int) -> list[StoredPrice]:
        """In the order in which they were made; `after`: the id of the last one seen, or 0."""
        async with self._read() as connection:
            return await page_of_prices(connection, after, limit)

    async def known(self) -> Known:
        """All keys, tiers, teams and prices at one moment."""
        async with self._read() as connection:
            return await everything(connection)

    async def audit(self, before: int | None, limit: int, filters: Mapping[str, str]) -> list[RowMapping]:
        """The newest first; `before`: the id of the last one seen; `filters`: columns of `audit_log`."""
        statement = select(audit_log).filter_by(**filters).order_by(audit_log.c.id.desc()).limit(limit)
        if before is not None:
            statement = statement.where(audit_log.c.id < before)
        async with self._read() as connection:
            return list((await connection.execute(statement)).mappings())

    # Seeding

    async def seed(self, config: Config) -> None:
        """What the configuration file says about tiers, teams, prices and keys; raises Invalid."""
        if seed.plan(config, await self.known(), self._clock()):
            async with self._edit("file") as edit:
                await seed.carry_out(edit, seed.plan(config, await everything(edit.connection), edit.now))

    @asynccontextmanager
    async def _edit(self, actor: str) -> AsyncIterator[Edit]:
        async with transaction(self._engine, self._timeout) as connection:
            revision = await next_revision(connection)
            yield Edit(connection, actor, self._clock(), revision)

    @asynccontextmanager
    async def _read(self) -> AsyncIterator[AsyncConnection]:
        async with reading(self._engine, self._timeout) as connection:
            yield connection


async def _key(edit: Edit, key_id: str, expected: Expected) -> StoredKey:
    key = _found(await key_with(edit.connection, id=key_id), f"There is no key {key_id!r}.")
    _fresh(f"Key {key_id}", key.version, expected)
    return key


async def _terms(edit: Edit, kind: TermsKind, name: str, expected: Expected) -> StoredTerms:
    terms = _found(
        await terms_named(edit.connection, kind, name),
        f"There is no {kind} {name!r}; to make it, send If-None-Match: * instead of If-Match.",
    )
    _fresh(f"The {kind} {name!r}", terms.version, expected)
    return terms


def _found(thing: Thing | None, otherwise: str) -> Thing:
    if thing is None:
        raise NotFound(otherwise)
    return thing


def _fresh(what: str, version: int, expected: Expected) -> None:
    if expected is not None and version not in expected:
        raise Stale(f"{what} was changed in the meantime; read it again, then decide again.")


def _ours(entry: StoredKey | StoredTerms | StoredPrice, what: str) -> None:
    if entry.managed_by == "file":
        raise ReadOnly(f"The configuration file rules {what}; change it there and restart.")


def _none(mistakes: list[Mistake]) -> None:
    if mistakes:
        raise Invalid(mistakes)


def _name_mistakes(name: str) -> list[Mistake]:
    try:
        NAME.validate_python(name)
    except ValidationError as error:
        return mistakes_in(error, "name")
    return []


async def _free_name(edit: Edit, key: StoredKey) -> None:
    if await key_with(edit.connection, name=key.name):
        raise Conflict(f"There is a key named {key.name!r} already; names are unique.")


def _already_over(key: StoredKey, now: datetime) -> list[Mistake]:
    over = key.expires_at is not None and key.expires_at <= now
    return [("expires_at", "must lie in the future")] if over else []


def _listed(keys: list[StoredKey]) -> str:
    named = ", ".join(f"{key.name!r} ({key.id})" for key in keys[:20])
    return f"{named} and {len(keys) - 20} more" if len(keys) > 20 else named
