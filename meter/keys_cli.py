"""`weir keys …`: what REST does with keys, straight in the database. Tables for people, `--json` for scripts.

Exit codes: 0 done, 1 the answer is no, 2 the words or the file are wrong.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from meter.callers.book import terms_in_force
from meter.callers.edits import KeyDraft, KeyPatch, Rotation, read
from meter.callers.errors import Conflict, Invalid, Mistake, NotFound, ReadOnly, Stale
from meter.callers.registry import Registry
from meter.callers.stored import StoredKey
from meter.config import Config, ConfigError, load
from meter.ledger.database import DatabaseUnavailable, migrate, open_engine

ACTOR = "cli"
NO, WRONG = 1, 2
PAGE = 1_000
COLUMNS = ("id", "name", "tier", "team", "state", "created_at", "expires_at")

Result = TypeVar("Result")
Work = Callable[[Registry], Awaitable[Result]]

keys = typer.Typer(no_args_is_help=True)

ConfigPath = Annotated[
    Path | None,
    typer.Option("-c", "--config", help="The YAML file. Without -c: ./weir.yaml if there is one, else defaults."),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]
WhichKey = Annotated[str, typer.Argument(metavar="KEY", help="A key's id or its name.")]


@keys.command()
def create(
    name: Annotated[str, typer.Option(help="A unique name, in any script.")],
    tier: Annotated[str, typer.Option(help="Whose limits it has.")] = "standard",
    team: Annotated[str | None, typer.Option(help="The team it belongs to.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="A model it may use; may be given again. None: all.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="name=value, for reports; may be given again.")] = None,
    expires_at: Annotated[str | None, typer.Option(help="Such as 2030-01-31T12:00:00Z.")] = None,
    config: ConfigPath = None,
    as_json: AsJson = False,
) -> None:
    """Make a key. Its secret is shown now and never again."""

    async def work(registry: Registry) -> tuple[StoredKey, str]:
        tags = dict(_pair(text) for text in tag or ())
        fields = {"name": name, "tier": tier, "team": team, "models": model or None, "tags": tags}
        return await registry.create_key(ACTOR, read(KeyDraft, {**fields, "expires_at": expires_at}))

    key, secret = _with_registry(config, work, prepare=True)
    _say_secret(key, secret, as_json)


@keys.command("list")
def list_keys(config: ConfigPath = None, as_json: AsJson = False) -> None:
    """List all keys, the oldest first."""
    found = [_shown(key) for key in _with_registry(config, _all)]
    typer.echo(_json(found) if as_json else _table(found))


@keys.command()
def show(key: WhichKey, config: ConfigPath = None, as_json: AsJson = False) -> None:
    """Show a key and the terms in force for it."""

    async def work(registry: Registry) -> dict[str, Any]:
        found, tier = await registry.key_and_tier((await _find(registry, key)).id)
        return {**_shown(found), "effective": terms_in_force(tier.policy, found.policy)[0].model_dump(mode="json")}

    fields = _with_registry(config, work)
    typer.echo(_json(fields) if as_json else _lines(fields))


@keys.command()
def disable(key: WhichKey, config: ConfigPath = None, as_json: AsJson = False) -> None:
    """Shut a key: within a second it opens nothing any more."""
    found = _with_registry(config, _turned("disabled", key))
    typer.echo(_json(_shown(found)) if as_json else f"Key {found.name!r} ({found.id}) is disabled.")


@keys.command()
def enable(key: WhichKey, config: ConfigPath = None, as_json: AsJson = False) -> None:
    """Open a key that was shut: within a second it opens again."""
    found = _with_registry(config, _turned("active", key))
    expired = " It has expired all the same, and opens nothing." if found.state(_now()) == "expired" else ""
    typer.echo(_json(_shown(found)) if as_json else f"Key {found.name!r} ({found.id}) is enabled.{expired}")


@keys.command()
def rotate(
    key: WhichKey,
    grace_seconds: Annotated[int, typer.Option(help="So long the old secret still opens.")] = 0,
    config: ConfigPath = None,
    as_json: AsJson = False,
) -> None:
    """Give a key a new secret. It is shown now and never again."""

    async def work(registry: Registry) -> tuple[StoredKey, str]:
        rotation = read(Rotation, {"grace_seconds": grace_seconds})
        return await registry.rotate_key(ACTOR, (await _find(registry, key)).id, rotation)

    found, secret = _with_registry(config, work)
    _say_secret(found, secret, as_json)


@keys.command()
def delete(key: WhichKey, config: ConfigPath = None) -> None:
    """Delete a key. Its usage records stay."""

    async def work(registry: Registry) -> StoredKey:
        found = await _find(registry, key)
        await registry.delete_key(ACTOR, found.id, None)
        return found

    found = _with_registry(config, work)
    typer.echo(f"Key {found.name!r} ({found.id}) is deleted.")


def _with_registry(path: Path | None, work: Work[Result], *, prepare: bool = False) -> Result:
    """Does `work`; what went wrong becomes plain sentences and an exit code."""
    try:
        return asyncio.run(_connected(load(path), work, prepare))
    except (ConfigError, Invalid) as error:
        _complain(error.mistakes)
        raise typer.Exit(WRONG) from None
    except (NotFound, Conflict, Stale, ReadOnly, DatabaseUnavailable) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(NO) from None


async def _connected(config: Config, work: Work[Result], prepare: bool) -> Result:
    """`prepare`: an embedded database is brought to the newest schema, and what the file says is put in, as `serve` does."""
    if prepare and config.ledger.url.startswith("sqlite"):
        await migrate(config.ledger.url)
    engine = open_engine(config.ledger.url)
    try:
        registry = Registry(engine, _now)
        if prepare:
            await registry.seed(config)
        return await work(registry)
    finally:
        await engine.dispose()


def _turned(state: Literal["active", "disabled"], key: str) -> Work[StoredKey]:
    async def work(registry: Registry) -> StoredKey:
        found = await _find(registry, key)
        return await registry.patch_key(ACTOR, found.id, None, KeyPatch(state=state))

    return work


async def _all(registry: Registry) -> list[StoredKey]:
    found: list[StoredKey] = []
    page = await registry.keys(None, PAGE)
    while page:
        found += page
        page = await registry.keys((page[-1].created_at, page[-1].id), PAGE)
    return found


async def _find(registry: Registry, id_or_name: str) -> StoredKey:
    """An id goes before a name. What could be neither (a NUL, bytes that are no text) is not asked for."""
    if not any(char == "\x00" or "\ud800" <= char <= "\udfff" for char in id_or_name):
        for look in (registry.key, registry.key_named):
            with suppress(NotFound):
                return await look(id_or_name)
    raise NotFound(f"There is no key with the id or name {id_or_name!r}; `weir keys list` shows all.")


def _now() -> datetime:
    return datetime.now(UTC)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise Invalid([("--tag", f"{text!r} must be name=value")])
    return name, value


def _complain(mistakes: Iterable[Mistake]) -> None:
    for field, reason in mistakes:
        typer.echo(f"{field}: {reason}" if field else reason, err=True)


def _say_secret(key: StoredKey, secret: str, as_json: bool) -> None:
    if as_json:
        typer.echo(_json({**_shown(key), "secret": secret}))
    else:
        typer.echo(f"Key {key.name!r} ({key.id}), tier {key.tier}. Its secret is shown this once:", err=True)
        typer.echo(secret)


def _shown(key: StoredKey) -> dict[str, Any]:
    return key.shown(_now())


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2)


def _table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "There are no keys yet; `weir keys create --name …` makes one."
    cells = [COLUMNS, *(tuple(_cell(row[column]) for column in COLUMNS) for row in rows)]
    widths = [max(len(row[position]) for row in cells) for position in range(len(COLUMNS))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def _lines(fields: dict[str, Any]) -> str:
    width = max(map(len, fields))
    return "\n".join(f"{name.ljust(width)}  {_cell(value)}" for name, value in fields.items())


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
