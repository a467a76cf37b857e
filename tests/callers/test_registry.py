from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from meter.callers.edits import KeyDraft, KeyPatch, PriceDraft, Rotation, read
from meter.callers.errors import Conflict, Invalid, NotFound, ReadOnly, Stale
from meter.callers.keys import parse
from meter.callers.registry import Registry
from meter.callers.tables import current_revision, reading
from meter.ledger.schema import api_key, audit_log
from tests.callers.databases import config, now


async def revision(engine: AsyncEngine) -> int:
    async with reading(engine, 5) as connection:
        return await current_revision(connection)


async def audited(registry: Registry) -> list[tuple[str, str, str]]:
    rows = await registry.audit(None, 1_000, {})
    return [(row["actor"], row["action"], row["entity"]) for row in reversed(rows)]


async def test_a_created_key_is_stored_with_nothing_but_the_hash_of_its_secret(
    registry: Registry, engine: AsyncEngine
) -> None:
    """T108"""
    key, text = await registry.create_key("ops", KeyDraft(name="search bot", tags={"team": "a"}))
    secret = parse(text).secret
    async with engine.connect() as connection:
        row = (await connection.execute(select(api_key))).one()
    assert secret not in repr(row)
    assert row.secret_sha256 == parse(text).secret_sha256
    assert row.secret_sha256 not in repr(key)
    entries = await registry.audit(None, 100, {})
    assert secret not in repr(entries)
    assert row.secret_sha256 not in repr(entries)


async def test_every_edit_counts_the_revision_up_by_one_and_is_audited(registry: Registry, engine: AsyncEngine) -> None:
    before = await revision(engine)
    key, _ = await registry.create_key("ops", KeyDraft(name="a"))
    key = await registry.patch_key("ops", key.id, {key.version}, KeyPatch(name="b"))
    key = await registry.set_override("ops", key.id, {key.version}, {"max_parallel": 2})
    key, _ = await registry.rotate_key("ops", key.id, Rotation(grace_seconds=60))
    await registry.create_terms("ops", "team", "search", {})
    await registry.replace_terms("ops", "tier", "standard", None, {"max_n": 2})
    await registry.delete_terms("ops", "team", "search", None)
    await registry.add_price("ops", PriceDraft(model="m", backend="b", prompt=1, completion=2))
    await registry.delete_key("ops", key.id, {key.version})
    assert await revision(engine) == before + 9
    assert await audited(registry) == [
        ("file", "create", "tier"),
        ("ops", "create", "key"),
        ("ops", "update", "key"),
        ("ops", "update", "key"),
        ("ops", "update", "key"),
        ("ops", "create", "team"),
        ("ops", "update", "tier"),
        ("ops", "delete", "team"),
        ("ops", "create", "price"),
        ("ops", "delete", "key"),
    ]


async def test_the_audit_says_what_it_was_before_and_after(registry: Registry) -> None:
    key, _ = await registry.create_key("ops", KeyDraft(name="a"))
    await registry.patch_key("eve", key.id, {key.version}, KeyPatch(name="b", state="disabled"))
    (entry,) = await registry.audit(None, 10, {"entity_id": key.id, "action": "update"})
    assert (entry["before"]["name"], entry["before"]["state"]) == ("a", "active")
    assert (entry["after"]["name"], entry["after"]["state"]) == ("b", "disabled")


async def test_a_refused_edit_changes_nothing(registry: Registry, engine: AsyncEngine) -> None:
    key, _ = await registry.create_key("ops", KeyDraft(name="a"))
    before, entries = await revision(engine), await audited(registry)
    with pytest.raises(Stale):
        await registry.patch_key("ops", key.id, {key.version + 1}, KeyPatch(name="b"))
    with pytest.raises(Conflict):
        await registry.create_key("ops", KeyDraft(name="a"))
    with pytest.raises(NotFound):
        await registry.delete_key("ops", "nobody", None)
    assert await revision(engine) == before
    assert await audited(registry) == entries
    assert (await registry.key(key.id)).name == "a"


async def test_of_two_edits_decided_on_the_same_version_one_wins_and_nothing_is_lost(
    engine: AsyncEngine, registry: Registry
) -> None:
    """T104"""
    other = Registry(engine, now)
    key, _ = await registry.create_key("ops", KeyDraft(name="n"))
    for round_number in range(50):
        key = await registry.key(key.id)
        tags = {"i": str(round_number)}
        name = f"n_{round_number}"
        results = await asyncio.gather(
            registry.patch_key("one", key.id, {key.version}, KeyPatch(tags=tags)),
            other.patch_key("two", key.id, {key.version}, KeyPatch(name=name)),
            return_exceptions=True,
        )
        stands = await registry.key(key.id)
        assert sorted(type(result).__name__ for result in results) == ["Stale", "StoredKey"]
        assert stands.version == key.version + 1
        if isinstance(results[0], Stale):
            assert (stands.name, stands.tags) == (name, key.tags)
        else:
            assert (stands.name, stands.tags) == (key.name, tags)


async def test_twenty_creations_of_one_name_make_one_key(registry: Registry) -> None:
    """T107"""
    tries = [registry.create_key("ops", KeyDraft(name="twin")) for _ in range(20)]
    results = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(result, Conflict) for result in results) == 19
    assert [key.name for key in await registry.keys(None, 10)] == ["twin"]


async def test_of_twenty_deletions_one_happens(registry: Registry) -> None:
    """T107"""
    key, _ = await registry.create_key("ops", KeyDraft(name="gone"))
    tries = [registry.delete_key("ops", key.id, {key.version}) for _ in range(20)]
    results = await asyncio.gather(*tries, return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["NoneType"] + ["NotFound"] * 19


async def test_a_name_made_again_never_has_a_version_it_had_before(registry: Registry) -> None:
    old = await registry.create_terms("ops", "team", "search", {})
    old = await registry.replace_terms("ops", "team", "search", {old.version}, {"max_parallel": 1})
    await registry.delete_terms("ops", "team", "search", {old.version})
    new = await registry.create_terms("ops", "team", "search", {})
    assert new.version > old.version


async def test_every_mistake_of_a_new_key_is_named_at_once(registry: Registry) -> None:
    policy = {"cap": {"tokens": 100, "seconds": 60}}
    with pytest.raises(Invalid) as caught:
        draft = KeyDraft(name="a", tier="nope", team="nobody", expires_at=now() - timedelta(days=1))
        await registry.create_key("ops", draft)
    assert [field for field, _ in caught.value.mistakes] == ["tier", "team", "expires_at"]
    with pytest.raises(Invalid) as caught:
        await registry.create_key("ops", read(KeyDraft, {"name": "a", "policy": policy}))
    assert [field for field, _ in caught.value.mistakes] == ["policy.cap.tokens"]
    assert await registry.keys(None, 10) == []


async def test_a_tier_that_overrides_would_not_fit_is_refused_and_names_them(registry: Registry) -> None:
    terms = {"rate": {"tokens": 1_000, "seconds": 60}, "burst": None, "cap": {"tokens": 50_000, "seconds": 3_600}}
    tier = await registry.create_terms("ops", "tier", "gold", terms)
    for name in ("small", "free"):
        await registry.create_key("ops", KeyDraft(name=name, tier="gold"))
    small = await registry.key_named("small")
    await registry.set_override("ops", small.id, None, {"cap": {"tokens": 5_000, "seconds": 3_600}})
    with pytest.raises(Invalid, match=rf"'small' \({small.id}\).*at least rate.tokens"):
        await registry.replace_terms(
            "ops", "tier", "gold", {tier.version}, {**terms, "rate": {"tokens": 6_000, "seconds": 60}}
        )
    assert (await registry.terms("tier", "gold")).policy["rate"]["tokens"] == 1_000


async def test_a_tier_or_team_in_use_is_not_deleted_and_the_refusal_names_the_keys(registry: Registry) -> None:
    await registry.create_terms("ops", "tier", "gold", {})
    await registry.create_terms("ops", "team", "search", {})
    key, _ = await registry.create_key("ops", KeyDraft(name="bot", tier="gold", team="search"))
    for kind, name in (("tier", "gold"), ("team", "search")):
        with pytest.raises(Conflict, match="'bot'"):
            await registry.delete_terms("ops", kind, name, None)  # type: ignore[arg-type]
    await registry.patch_key("ops", key.id, None, KeyPatch(tier="standard", team=None))
    await registry.delete_terms("ops", "tier", "gold", None)
    await registry.delete_terms("ops", "team", "search", None)


async def test_the_tier_standard_always_exists(registry: Registry) -> None:
    assert (await registry.terms("tier", "standard")).policy == {}
    with pytest.raises(Conflict, match="always exists"):
        await registry.delete_terms("ops", "tier", "standard", None)


async def test_a_price_never_edits_the_past(registry: Registry) -> None:
    draft = PriceDraft(model="m", backend="b", prompt=0.5, completion=1.5)
    price = await registry.add_price("ops", draft)
    assert (price.prompt, price.cached_prompt, price.completion) == (500_000_000, None, 1_500_000_000)
    with pytest.raises(Invalid, match="past"):
        await registry.add_price("ops", draft.model_copy(update={"effective_from": now() - timedelta(seconds=1)}))
    tomorrow = draft.model_copy(update={"effective_from": now() + timedelta(days=1)})
    await registry.add_price("ops", tomorrow)
    with pytest.raises(Conflict, match="that very moment"):
        await registry.add_price("ops", tomorrow)


FILE: dict[str, Any] = {
    "backends": {"gpu": {"url": "http://127.0.0.1:1"}},
    "models": {"assistant": {"primary": [{"backend": "gpu", "model": "real"}]}},
    "tiers": {"gold": {"max_n": 2}, "ruled": {"max_n": 3, "managed_by": "file"}},
    "teams": {"search": {"max_parallel": 3, "managed_by": "file"}},
    "prices": {"assistant@gpu": {"prompt": 0.1, "completion": 0.2, "managed_by": "file"}},
    "keys": [{"id": "abcd", "name": "git", "tier": "gold", "team": "search", "secret_sha256": "ab" * 32}],
}


async def test_the_file_is_inserted_once_and_then_changes_nothing(registry: Registry, engine: AsyncEngine) -> None:
    await registry.seed(config(**FILE))
    seeded, known = await revision(engine), await registry.known()
    await registry.seed(config(**FILE))
    assert await revision(engine) == seeded
    assert known.tiers.keys() == {"standard", "gold", "ruled"}
    assert known.tiers["gold"].policy == {"max_n": 2}
    assert known.keys["abcd"].managed_by == "file"
    assert [price.prompt for price in known.prices] == [100_000_000]
    assert known.prices[0].effective_from <= now()


async def test_twenty_processes_that_start_at_once_insert_it_once(engine: AsyncEngine) -> None:
    await asyncio.gather(*(Registry(engine, now).seed(config(**FILE)) for _ in range(20)))
    async with engine.connect() as connection:
        assert await connection.scalar(select(func.count()).select_from(audit_log)) == 6


async def test_from_then_on_rest_rules_but_for_what_the_file_manages(registry: Registry) -> None:
    await registry.seed(config(**FILE))
    await registry.replace_terms("ops", "tier", "gold", None, {"max_n": 9})
    changed = {
        **FILE,
        "tiers": {"gold": {"max_n": 5}, "ruled": {"max_n": 7, "managed_by": "file"}},
        "prices": {"assistant@gpu": {"prompt": 0.4, "completion": 0.2, "managed_by": "file"}},
        "keys": [{**FILE["keys"][0], "name": "renamed"}],
    }
    await registry.seed(config(**changed))
    known = await registry.known()
    assert known.tiers["gold"].policy == {"max_n": 9}
    assert known.tiers["ruled"].policy == {"max_n": 7}
    assert known.keys["abcd"].name == "renamed"
    assert [price.prompt for price in known.prices] == [100_000_000, 400_000_000]


async def test_what_the_file_rules_is_read_only_elsewhere(registry: Registry) -> None:
    await registry.seed(config(**FILE))
    edits = [
        registry.replace_terms("ops", "tier", "ruled", None, {}),
        registry.delete_terms("ops", "team", "search", None),
        registry.patch_key("ops", "abcd", None, KeyPatch(name="mine")),
        registry.set_override("ops", "abcd", None, {"max_n": 1}),
        registry.rotate_key("ops", "abcd", Rotation()),
        registry.delete_key("ops", "abcd", None),
        registry.add_price("ops", PriceDraft(model="assistant", backend="gpu", prompt=1, completion=1)),
    ]
    for edit in edits:
        with pytest.raises(ReadOnly, match="configuration file rules"):
            await edit


async def test_a_key_of_the_file_can_still_be_shut_and_stays_shut_after_a_restart(registry: Registry) -> None:
    await registry.seed(config(**FILE))
    await registry.patch_key("ops", "abcd", None, KeyPatch(state="disabled"))
    await registry.seed(config(**FILE))
    assert (await registry.key("abcd")).disabled


async def test_a_file_that_does_not_fit_the_database_says_everything_that_is_wrong(registry: Registry) -> None:
    key, _ = await registry.create_key("ops", KeyDraft(name="git"))
    await registry.set_override("ops", key.id, None, {"cap": {"tokens": 2_500, "seconds": 3_600}})
    wrong = config(
        tiers={"standard": {"rate": {"tokens": 3_000, "seconds": 60}, "managed_by": "file"}},
        keys=[{"id": "abcd", "name": "git", "tier": "standard", "secret_sha256": "ab" * 32}],
    )
    with pytest.raises(Invalid) as caught:
        await registry.seed(wrong)
    assert [field for field, _ in caught.value.mistakes] == ["tiers.standard.cap.tokens", "keys.0.name"]
    assert (await registry.known()).tiers["standard"].policy == {}


async def test_moments_come_back_as_they_went_in(registry: Registry) -> None:
    moment = datetime.fromisoformat("2031-05-06T07:08:09.123456+02:00")
    key, _ = await registry.create_key("ops", read(KeyDraft, {"name": "a", "expires_at": moment.isoformat()}))
    assert (await registry.key(key.id)).expires_at == moment
