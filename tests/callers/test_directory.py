from __future__ import annotations

import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import insert, update
from sqlalchemy.ext.asyncio import AsyncEngine

from meter.callers.caller import UnknownKey
from meter.callers.directory import Directory
from meter.callers.edits import KeyDraft, KeyPatch, PriceDraft, Rotation, read
from meter.callers.errors import Invalid
from meter.callers.keys import new_key, parse
from meter.callers.registry import Registry
from meter.callers.tables import next_revision
from meter.config import Config
from meter.ledger.database import migrate, open_engine
from meter.ledger.schema import api_key, tier
from quotas.policy import UNLIMITED, Limit, Policy
from tests.callers.databases import config, eventually, now
from tests.services.postgres import PostgresServer

PRODUCT = Config()


def refusal(directory: Directory, credential: str) -> str:
    """Why a credential does not open; '' if it does."""
    try:
        directory.identify(credential, now())
    except UnknownKey as unknown:
        return unknown.reason
    return ""


@asynccontextmanager
async def running(engine: AsyncEngine, snapshot: Path, settings: Config = PRODUCT) -> AsyncIterator[Directory]:
    directory = Directory(engine, settings, snapshot, now)
    await directory.start()
    try:
        yield directory
    finally:
        await directory.stop()


async def test_a_key_is_found_with_the_terms_of_its_tier_its_override_and_its_team(
    registry: Registry, directory: Directory
) -> None:
    await registry.create_terms("ops", "tier", "gold", {"max_output_tokens": 4_096, "models": ["a", "b"]})
    await registry.create_terms("ops", "team", "search", {"cap": {"tokens": 400_000, "seconds": 3_600}})
    draft = {"name": "bot", "tier": "gold", "team": "search", "tags": {"x": "y"}, "policy": {"burst": None}}
    key, credential = await registry.create_key("ops", read(KeyDraft, {**draft, "models": ["b", "c"]}))
    caller = await eventually(lambda: directory.by_key(key.id))
    assert directory.identify(credential, now()) is caller
    assert (caller.key_id, caller.name, caller.team_id, caller.tier_name) == (key.id, "bot", "search", "gold")
    assert (caller.tier.max_output_tokens, caller.tier.burst, caller.tier.max_n) == (4_096, None, 4)
    assert (caller.models, dict(caller.tags)) == (frozenset({"b"}), {"x": "y"})
    own, team = caller.account.scopes
    assert caller.account.slot == "team:search"
    assert (own.kind, own.name, own.policy) == ("key", key.id, Policy(burst=None))
    assert (team.kind, team.name) == ("team", "search")
    assert team.policy == Policy(rate=None, burst=None, cap=Limit(400_000, 3_600), max_parallel=None)


async def test_a_key_without_a_team_is_a_slot_of_its_own(registry: Registry, directory: Directory) -> None:
    key, _ = await registry.create_key("ops", KeyDraft(name="bot"))
    caller = await eventually(lambda: directory.by_key(key.id))
    assert caller.account.slot == f"key:{key.id}"
    assert [scope.policy for scope in caller.account.scopes] == [Policy()]
    assert caller.models is None


async def test_a_team_of_which_nothing_is_said_is_unlimited(registry: Registry, directory: Directory) -> None:
    await registry.create_terms("ops", "team", "free", {})
    key, _ = await registry.create_key("ops", KeyDraft(name="bot", team="free"))
    caller = await eventually(lambda: directory.by_key(key.id))
    assert caller.account.scopes[1].policy == UNLIMITED


async def test_what_opens_nothing_says_why(registry: Registry, directory: Directory) -> None:
    soon = now() + timedelta(hours=1)
    key, credential = await registry.create_key("ops", read(KeyDraft, {"name": "a", "expires_at": soon.isoformat()}))
    await eventually(lambda: directory.by_key(key.id))
    stranger = new_key()
    assert refusal(directory, "") == "missing"
    assert refusal(directory, "sk-something") == "malformed"
    assert refusal(directory, stranger.text) == "unknown"
    assert refusal(directory, f"wk-{key.id}-{stranger.secret}") == "unknown"
    assert refusal(directory, credential) == ""
    with pytest.raises(UnknownKey, match="expired"):
        directory.identify(credential, soon)
    with pytest.raises(UnknownKey) as caught:
        directory.identify(stranger.text, now())
    assert stranger.secret not in repr(caught.value)


async def test_a_rotated_secret_opens_until_its_grace_is_over(registry: Registry, directory: Directory) -> None:
    key, first = await registry.create_key("ops", KeyDraft(name="a"))
    _, second = await registry.rotate_key("ops", key.id, Rotation(grace_seconds=3_600))
    await eventually(lambda: directory.by_key(key.id) and not refusal(directory, second))
    assert directory.identify(first, now()).key_id == key.id
    with pytest.raises(UnknownKey, match="unknown"):
        directory.identify(first, now() + timedelta(hours=1))
    _, third = await registry.rotate_key("ops", key.id, Rotation())
    await eventually(lambda: not refusal(directory, third))
    assert (refusal(directory, first), refusal(directory, second)) == ("unknown", "unknown")


async def test_every_kind_of_edit_comes_into_force_in_every_other_process(
    engine: AsyncEngine, registry: Registry, directory: Directory, tmp_path: Path
) -> None:
    async with running(engine, tmp_path / "other.json") as other:
        both = (directory, other)
        key, credential = await registry.create_key("ops", KeyDraft(name="a"))
        await eventually(lambda: all(not refusal(one, credential) for one in both))
        await registry.set_override("ops", key.id, None, {"max_parallel": 1})
        await eventually(lambda: all(one.identify(credential, now()).tier.max_parallel == 1 for one in both))
        await registry.replace_terms("ops", "tier", "standard", None, {"max_n": 7})
        await eventually(lambda: all(one.identify(credential, now()).tier.max_n == 7 for one in both))
        await registry.add_price("ops", PriceDraft(model="m", backend="b", prompt=1, completion=1))
        await eventually(lambda: all(one.prices.at("m", "b", now()) for one in both))
        await registry.patch_key("ops", key.id, None, KeyPatch(state="disabled"))
        await eventually(lambda: all(refusal(one, credential) == "disabled" for one in both))
        assert other.by_key(key.id) is not None  # running requests still have their terms
        await registry.delete_key("ops", key.id, None)
        await eventually(lambda: all(refusal(one, credential) == "unknown" for one in both))


async def test_a_start_seeds_what_the_file_says(engine: AsyncEngine, tmp_path: Path) -> None:
    secret = new_key()
    keys = [{"id": "abcd", "name": "git", "tier": "gold", "secret_sha256": secret.secret_sha256}]
    settings = config(tiers={"gold": {"max_n": 2}}, keys=keys)
    async with running(engine, tmp_path / "snapshot", settings) as directory:
        assert directory.identify(f"wk-abcd-{secret.secret}", now()).tier.max_n == 2
        assert directory.stale_since is None


async def test_a_file_that_does_not_fit_stops_the_start(engine: AsyncEngine, tmp_path: Path) -> None:
    key = {"id": "abcd", "name": "x", "tier": "standard", "secret_sha256": "0" * 64}
    settings = config(keys=[key, {**key, "id": "efgh"}])
    with pytest.raises(Invalid, match="another key has the name"):
        await Directory(engine, settings, tmp_path / "snapshot", now).start()


async def test_the_snapshot_is_for_its_owner_alone_and_has_no_secret(
    registry: Registry, directory: Directory, tmp_path: Path
) -> None:
    key, credential = await registry.create_key("ops", KeyDraft(name="a"))
    file = tmp_path / "directory.json"
    await eventually(lambda: key.id in file.read_text())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert parse(credential).secret not in file.read_text()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".directory")] == []


async def test_no_repr_shows_a_hash(registry: Registry, directory: Directory) -> None:
    key, credential = await registry.create_key("ops", KeyDraft(name="a"))
    caller = await eventually(lambda: directory.by_key(key.id))
    digest = parse(credential).secret_sha256
    shown = f"{directory!r} {caller!r} {directory.known!r}"
    assert key.id in shown
    assert digest not in shown
    assert bytes.fromhex(digest) not in shown.encode("latin-1", "replace")


async def test_ten_thousand_keys_are_loaded(engine: AsyncEngine, registry: Registry, directory: Directory) -> None:
    row = {"tier": "standard", "tags": {}, "disabled": False, "managed_by": "rest", "created_at": now(), "version": 1}
    rows = [
        {**row, "id": f"k{i:05}", "name": f"n{i}", "secret_sha256": f"{i:064x}", "policy": {"max_parallel": i % 7}}
        for i in range(10_000)
    ]
    async with engine.begin() as connection:
        await next_revision(connection)
        await connection.execute(insert(api_key), rows)
    last = await eventually(lambda: directory.by_key("k09999"))
    assert len(directory.known.keys) == 10_000
    assert last.tier.max_parallel == 9_999 % 7
    assert last.tier is directory.by_key(f"k{9_999 % 7:05}").tier  # type: ignore[union-attr]


async def test_terms_that_a_newer_release_wrote_shut_nobody_out(
    engine: AsyncEngine, registry: Registry, directory: Directory
) -> None:
    key, credential = await registry.create_key("ops", KeyDraft(name="a"))
    async with engine.begin() as connection:
        await next_revision(connection)
        await connection.execute(update(tier).values(policy={"max_n": 2, "field_of_tomorrow": True}))
        await connection.execute(update(api_key).values(policy={"max_parallel": "many"}))
    await eventually(lambda: directory.by_key(key.id) and directory.known.keys[key.id].policy)
    caller = directory.identify(credential, now())
    assert (caller.tier.max_n, caller.tier.max_parallel) == (2, 8)


async def test_a_start_while_the_database_is_away_serves_from_the_snapshot_and_catches_up(tmp_path: Path) -> None:
    snapshot = tmp_path / "directory.json"
    with PostgresServer() as server:
        url = server.create_database()
        await migrate(url)
        engine = open_engine(url)
        registry = Registry(engine, now)
        await registry.seed(Config())
        key, credential = await registry.create_key("ops", KeyDraft(name="a"))
        async with running(engine, snapshot):
            pass
        server.kill()
        async with running(engine, snapshot) as directory, running(engine, tmp_path / "none") as empty:
            assert directory.identify(credential, now()).key_id == key.id
            assert directory.stale_since is not None
            assert (directory.loaded, empty.loaded) == (True, False)
            assert refusal(empty, credential) == "unknown"
            server.start()
            await eventually(lambda: directory.stale_since is None and empty.stale_since is None)
            assert empty.identify(credential, now()).key_id == key.id
            await registry.patch_key("ops", key.id, None, KeyPatch(state="disabled"))
            await eventually(lambda: refusal(directory, credential) == "disabled")
        await engine.dispose()


async def test_callers_stay_known_while_the_database_hangs(tmp_path: Path) -> None:
    with PostgresServer() as server:
        url = server.create_database()
        await migrate(url)
        engine = open_engine(url)
        registry = Registry(engine, now)
        async with running(engine, tmp_path / "directory.json") as directory:
            key, credential = await registry.create_key("ops", KeyDraft(name="a"))
            await eventually(lambda: directory.by_key(key.id))
            server.pause()
            await eventually(lambda: directory.stale_since)
            assert directory.identify(credential, now()).key_id == key.id
            server.resume()
            await eventually(lambda: directory.stale_since is None)
        await engine.dispose()


async def test_a_broken_snapshot_is_passed_over(tmp_path: Path) -> None:
    snapshot = tmp_path / "directory.json"
    snapshot.write_bytes(b'{"revision": 1, "keys": [')
    engine = open_engine("postgresql+asyncpg://weir@127.0.0.1:1/nowhere")
    async with running(engine, snapshot) as directory:
        assert not directory.loaded
        assert refusal(directory, new_key().text) == "unknown"
    await engine.dispose()
