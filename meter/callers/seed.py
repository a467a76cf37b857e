"""What the configuration file says about tiers, teams, prices and keys, and what that changes in the database.

Entries are inserted where absent, and left alone from then on. Those with `managed_by: file`, and all keys of the file,
are also brought up to date: there the file rules. What the file does not name stays as it is: other processes may have
other files, so nothing is ever deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from msgspec.structs import replace

from meter.callers.edit import Edit, misfits
from meter.callers.errors import Invalid, Mistake
from meter.callers.stored import Known, StoredKey, StoredPrice, StoredTerms, TermsKind
from meter.callers.tiers import given
from meter.config import Config, FileKey, FileTeam, FileTier, PriceTerms
from meter.ledger.pricing import from_usd_per_million

STANDARD = "standard"
"""The tier that always exists, with the product's defaults unless somebody said otherwise."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to write: (what stands there or None, what shall stand there), and prices to add."""

    terms: tuple[tuple[TermsKind, StoredTerms | None, StoredTerms], ...]
    keys: tuple[tuple[StoredKey | None, StoredKey], ...]
    prices: tuple[StoredPrice, ...]

    def __bool__(self) -> bool:
        return bool(self.terms or self.keys or self.prices)


def plan(config: Config, known: Known, now: datetime) -> Plan:
    """What it takes for the database to agree with the file; raises Invalid with everything that does not fit."""
    wanted = Plan(tuple(_terms(config, known)), tuple(_keys(config, known, now)), tuple(_prices(config, known, now)))
    if mistakes := [*_tier_mistakes(wanted, known), *_key_mistakes(config, wanted, known)]:
        raise Invalid(mistakes)
    return wanted


async def carry_out(edit: Edit, wanted: Plan) -> None:
    for kind, terms_before, terms in wanted.terms:
        await (edit.change(kind, terms_before, terms) if terms_before else edit.create(kind, terms))
    for key_before, key in wanted.keys:
        await (edit.change("key", key_before, key) if key_before else edit.create("key", key))
    for price in wanted.prices:
        await edit.add_price(price)


def _terms(config: Config, known: Known) -> Iterator[tuple[TermsKind, StoredTerms | None, StoredTerms]]:
    for name, tier in {STANDARD: FileTier(), **config.tiers}.items():
        before, after = _one_terms(name, tier, known.tiers.get(name), said=name in config.tiers)
        if before != after:
            yield "tier", before, after
    for name, team in config.teams.items():
        before, after = _one_terms(name, team, known.teams.get(name), said=True)
        if before != after:
            yield "team", before, after


def _one_terms(
    name: str, terms: FileTier | FileTeam, before: StoredTerms | None, said: bool
) -> tuple[StoredTerms | None, StoredTerms]:
    """`said` False: the product's own default, which never changes what is there."""
    if before is None:
        return None, StoredTerms(name=name, policy=given(terms), managed_by=terms.managed_by)
    if not said:
        return before, before
    policy = given(terms) if terms.managed_by == "file" else before.policy
    return before, replace(before, policy=policy, managed_by=terms.managed_by)


def _keys(config: Config, known: Known, now: datetime) -> Iterator[tuple[StoredKey | None, StoredKey]]:
    for key in config.keys:
        before = known.keys.get(key.id)
        columns = key.model_dump()
        after = replace(before, **columns, managed_by="file") if before else _new_key(key, now)
        if before != after:
            yield before, after


def _new_key(key: FileKey, now: datetime) -> StoredKey:
    return StoredKey(**key.model_dump(), managed_by="file", created_at=now)


def _prices(config: Config, known: Known, now: datetime) -> Iterator[StoredPrice]:
    for pair, terms in config.prices.items():
        model, _, backend = pair.partition("@")
        entries = [price for price in known.prices if (price.model, price.backend) == (model, backend)]
        if not entries:
            # From the beginning of the day: another process' clock may be a little behind ours.
            yield _price(model, backend, terms, now.replace(hour=0, minute=0, second=0, microsecond=0))
        elif terms.managed_by == "file":
            latest = max(entries, key=lambda price: (price.effective_from <= now, price.effective_from))
            wanted = _price(model, backend, terms, now)
            if replace(latest, id=0, effective_from=now) != wanted:
                yield wanted


def _price(model: str, backend: str, terms: PriceTerms, moment: datetime) -> StoredPrice:
    return StoredPrice(
        model=model,
        backend=backend,
        effective_from=moment,
        prompt=from_usd_per_million(terms.prompt),
        completion=from_usd_per_million(terms.completion),
        cached_prompt=None if terms.cached_prompt is None else from_usd_per_million(terms.cached_prompt),
        managed_by=terms.managed_by,
    )


def _tier_mistakes(wanted: Plan, known: Known) -> Iterator[Mistake]:
    """Overrides that would make no sense any more on a tier as the file has it."""
    for kind, before, after in wanted.terms:
        if kind == "tier" and before is not None:
            for key in known.keys.values():
                if key.tier == after.name and key.policy:
                    for field, reason in misfits(after.policy, key.policy):
                        yield f"tiers.{after.name}.{field}", f"does not fit the override of key {key.name!r}: {reason}"


def _key_mistakes(config: Config, wanted: Plan, known: Known) -> Iterator[Mistake]:
    """Keys of the file whose tier or team is not there, or whose name another key has."""
    tiers = known.tiers.keys() | {terms.name for kind, _, terms in wanted.terms if kind == "tier"}
    teams = known.teams.keys() | {terms.name for kind, _, terms in wanted.terms if kind == "team"}
    owners = {key.name: key.id for key in known.keys.values()}
    for position, key in enumerate(config.keys):
        if key.tier not in tiers:
            yield f"keys.{position}.tier", f"there is no tier {key.tier!r}"
        if key.team is not None and key.team not in teams:
            yield f"keys.{position}.team", f"there is no team {key.team!r}"
        if owners.setdefault(key.name, key.id) != key.id:
            yield f"keys.{position}.name", f"another key has the name {key.name!r}"
