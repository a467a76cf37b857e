from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from meter.callers.keys import parse
from meter.keys_cli import keys
from tests.services.postgres import PostgresServer

Run = Callable[..., Result]


@pytest.fixture
def weir_keys(database_url: str, tmp_path: Path) -> Run:
    """`weir keys <words> -c <a file with this database>`"""
    file = tmp_path / "weir.yaml"
    settings = {"ledger": {"url": database_url}, "tiers": {"gold": {"max_n": 2}}, "teams": {"search": {}}}
    file.write_text(yaml.safe_dump(settings))

    def run(*words: str) -> Result:
        return CliRunner().invoke(keys, [*words, "-c", str(file)])

    return run


def test_a_key_is_made_shown_listed_rotated_disabled_enabled_and_deleted(weir_keys: Run) -> None:
    created = weir_keys("create", "--name", "бот", "--tier", "gold", "--team", "search", "--tag", "a=b=c", "--json")
    assert created.exit_code == 0, created.output
    made = json.loads(created.stdout)
    assert parse(made["secret"]).public_id == made["id"]
    assert (made["name"], made["tier"], made["team"], made["tags"]) == ("бот", "gold", "search", {"a": "b=c"})
    shown = json.loads(weir_keys("show", "бот", "--json").stdout)
    assert (shown["id"], shown["effective"]["max_n"], "secret" in shown) == (made["id"], 2, False)
    listed = weir_keys("list").stdout.splitlines()
    assert listed[0].split()[:4] == ["id", "name", "tier", "team"]
    assert listed[1].split()[:5] == [made["id"], "бот", "gold", "search", "active"]
    rotated = weir_keys("rotate", made["id"], "--grace-seconds", "60")
    assert parse(rotated.stdout.strip()).secret != parse(made["secret"]).secret
    assert weir_keys("disable", made["id"]).exit_code == 0
    assert json.loads(weir_keys("list", "--json").stdout)[0]["state"] == "disabled"
    enabled = weir_keys("enable", "бот")
    assert (enabled.exit_code, enabled.stdout) == (0, f"Key 'бот' ({made['id']}) is enabled.\n")
    assert json.loads(weir_keys("enable", made["id"], "--json").stdout)["state"] == "active"
    assert weir_keys("delete", "бот").exit_code == 0
    assert "no keys yet" in weir_keys("list").stdout


def test_the_key_alone_is_on_stdout_for_scripts(weir_keys: Run) -> None:
    created = weir_keys("create", "--name", "bot")
    assert parse(created.stdout.strip())
    assert "once" in created.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("show", "nobody"), 1, "no key with the id or name 'nobody'"),
        (("show", "\udcff"), 1, "no key with the id or name"),
        (("show", "a\x00"), 1, "no key with the id or name"),
        (("disable", "nobody"), 1, "nobody"),
        (("enable", "nobody"), 1, "nobody"),
        (("rotate", "nobody"), 1, "nobody"),
        (("delete", "nobody"), 1, "nobody"),
        (("create", "--name", "taken"), 1, "names are unique"),
        (("create", "--name", ""), 2, "name:"),
        (("create", "--name", "\udcff"), 2, "name:"),
        (("create", "--name", "a", "--tier", "none", "--team", "none"), 2, "team: there is no team 'none'"),
        (("create", "--name", "a", "--tag", "b"), 2, "must be name=value"),
        (("create", "--name", "a", "--expires-at", "soon"), 2, "expires_at: must be a moment"),
        (("rotate", "taken", "--grace-seconds", "-1"), 2, "grace_seconds:"),
        (("create",), 2, "--name"),
    ],
)
def test_what_cannot_be_is_said_in_plain_words(weir_keys: Run, words: tuple[str, ...], code: int, says: str) -> None:
    assert weir_keys("create", "--name", "taken").exit_code == 0
    result = weir_keys(*words)
    assert (result.exit_code, result.stdout) == (code, "")
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_a_wrong_file_is_exit_2_with_every_mistake(tmp_path: Path) -> None:
    file = tmp_path / "weir.yaml"
    file.write_text("tiers: {gold: {max_n: 0}}\nlisten: {port: high}\n")
    result = CliRunner().invoke(keys, ["list", "-c", str(file)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "tiers.gold.max_n" in result.stderr
    assert "listen.port" in result.stderr


def test_a_database_that_is_away_or_has_no_tables_is_exit_1(tmp_path: Path, postgres_server: PostgresServer) -> None:
    for url, says in (
        (postgres_server.create_database(), "missing or not the newest: run `weir migrate`"),
        ("postgresql+asyncpg://weir:hidden@127.0.0.1:1/weir", "cannot be reached"),
        (f"sqlite+aiosqlite:///{tmp_path}/new.db", "weir migrate"),
    ):
        file = tmp_path / "weir.yaml"
        file.write_text(yaml.safe_dump({"ledger": {"url": url}}))
        result = CliRunner().invoke(keys, ["list", "-c", str(file)])
        assert (result.exit_code, result.stdout) == (1, "")
        assert says in result.stderr
        assert "hidden" not in result.stderr
