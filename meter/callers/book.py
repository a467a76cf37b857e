"""Who is who at one moment: everything worked out beforehand, so that to find a caller is a look-up and a hash. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any

import msgspec
from pydantic import ValidationError

from meter.callers.caller import Caller, UnknownKey
from meter.callers.keys import MalformedCredential, parse
from meter.callers.stored import Known, StoredKey, StoredPrice
from meter.callers.tiers import ScopeTerms, Tier, merged
from meter.ledger.pricing import Price, PriceBook
from quotas.policy import UNLIMITED, Policy
from quotas.store import Account, Scope

Unfit = tuple[str, str]
"""(whose terms, why they cannot be used)"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A key and what opens it. Its digests are in no `repr`."""

    caller: Caller
    disabled: bool
    digest: bytes
    previous: bytes | None
    previous_until: datetime | None

    def __repr__(self) -> str:
        return f"<Entry {self.caller.key_id}{' disabled' if self.disabled else ''}>"


@dataclass(frozen=True, slots=True, repr=False)
class Book:
    """Callers by the id of their key, and prices; `known` is what they were made of."""

    known: Known
    entries: Mapping[str, Entry]
    prices: PriceBook

    def identify(self, credential: str, now: datetime) -> Caller:
        """The caller of `wk-<public id>-<secret>`; raises UnknownKey."""
        if not credential:
            raise UnknownKey("missing")
        try:
            shown = parse(credential)
        except MalformedCredential:
            raise UnknownKey("malformed") from None
        entry = self.entries.get(shown.public_id)
        if entry is None:
            raise UnknownKey("unknown")
        rotated = entry.previous is not None and entry.previous_until is not None and now < entry.previous_until
        if not shown.opens(entry.digest) and not (rotated and entry.previous and shown.opens(entry.previous)):
            raise UnknownKey("unknown")
        if entry.disabled:
            raise UnknownKey("disabled")
        expires_at = entry.caller.expires_at
        if expires_at is not None and expires_at <= now:
            raise UnknownKey("expired")
        return entry.caller


class Binder:
    """Makes the entries of a book. Terms are worked out once for all keys that share them."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._terms: dict[tuple[str, bytes], tuple[Tier, Policy]] = {}
        self.unfit: list[Unfit] = []
        self._teams = {name: Scope("team", name, self._team_policy(name)) for name in known.teams}

    def entry(self, key: StoredKey) -> Entry:
        return Entry(
            caller=self.caller(key),
            disabled=key.disabled,
            digest=bytes.fromhex(key.secret_sha256),
            previous=bytes.fromhex(key.previous_sha256) if key.previous_sha256 else None,
            previous_until=key.previous_until,
        )

    def caller(self, key: StoredKey) -> Caller:
        tier, policy = self._in_force(key)
        return Caller(
            key_id=key.id,
            name=key.name,
            team_id=key.team,
            tier_name=key.tier,
            tier=tier,
            models=_models(tier, key),
            tags=MappingProxyType(key.tags),
            expires_at=key.expires_at,
            account=self._account(key, policy),
        )

    def _account(self, key: StoredKey, policy: Policy) -> Account:
        own = Scope("key", key.id, policy)
        if key.team is None:
            return Account(f"key:{key.id}", (own,))
        return Account(f"team:{key.team}", (own, self._teams.get(key.team) or Scope("team", key.team, UNLIMITED)))

    def _in_force(self, key: StoredKey) -> tuple[Tier, Policy]:
        same = (key.tier, msgspec.json.encode(key.policy, order="deterministic"))
        found = self._terms.get(same)
        if found is None:
            tier = self._merged(key)
            found = self._terms[same] = (tier, tier.policy)
        return found

    def _merged(self, key: StoredKey) -> Tier:
        stored = self._known.tiers.get(key.tier)
        tier, unfit = terms_in_force(stored.policy if stored else {}, key.policy)
        self.unfit += [(f"key {key.id} on tier {key.tier!r}", reason) for reason in unfit]
        return tier

    def _team_policy(self, name: str) -> Policy:
        terms, unfit = team_in_force(self._known.teams[name].policy)
        self.unfit += [(f"team {name!r}", reason) for reason in unfit]
        return terms.policy


def terms_in_force(tier: Mapping[str, Any], override: Mapping[str, Any]) -> tuple[Tier, list[str]]:
    """A key's terms, and why not all that is stored could be used.

    What makes no sense was not written by this registry, but by a newer release for instance. Nobody is shut out for
    that: what can be used is used; without a usable override it is the tier, without a usable tier the product's default.
    """
    unfit: list[str] = []
    for own in (override, {}):
        try:
            return merged(_familiar(Tier, tier), _familiar(Tier, own)), unfit
        except ValidationError as error:
            unfit.append(_in_one_line(error))
    return Tier(), unfit


def team_in_force(policy: Mapping[str, Any]) -> tuple[ScopeTerms, list[str]]:
    """A team's terms likewise; without usable ones its keys' own limits stand alone."""
    try:
        return ScopeTerms.model_validate(_familiar(ScopeTerms, policy)), []
    except ValidationError as error:
        return ScopeTerms(), [_in_one_line(error)]


def bind(known: Known) -> Book:
    """A whole book at once."""
    binder = Binder(known)
    return Book(known, {key.id: binder.entry(key) for key in known.keys.values()}, price_book(known.prices))


def price_book(prices: list[StoredPrice]) -> PriceBook:
    return PriceBook(
        Price(
            id=price.id,
            model=price.model,
            backend=price.backend,
            effective_from=price.effective_from,
            prompt=price.prompt,
            cached_prompt=price.cached_prompt,
            completion=price.completion,
        )
        for price in prices
    )


def _models(tier: Tier, key: StoredKey) -> frozenset[str] | None:
    """A key's own list narrows what its terms allow; it never widens it."""
    allowed = None if tier.models is None else frozenset(tier.models)
    if key.models is None:
        return allowed
    return frozenset(key.models) if allowed is None else allowed & frozenset(key.models)


def _familiar(model: type[ScopeTerms], policy: Mapping[str, Any]) -> dict[str, Any]:
    """Without the fields that only a newer release knows."""
    return {name: value for name, value in policy.items() if name in model.model_fields}


def _in_one_line(error: ValidationError) -> str:
    return "; ".join(item["msg"] for item in error.errors(include_url=False, include_input=False))
