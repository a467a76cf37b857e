"""The commands as processes of their own: what they print, where, and how they exit."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine_adapter.simulator import Simulator
from tests.services.postgres import PostgresServer

TLS = Path(__file__).parent.parent / "engine_adapter" / "tls"
SECONDS = 60.0
NOWHERE = "http://127.0.0.1:1"
MODEL = {"primary": [{"backend": "gpu", "model": "x"}]}

Weir = Callable[..., subprocess.CompletedProcess[str]]


def environment(**variables: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")} | variables


@pytest.fixture
def weir(tmp_path: Path) -> Weir:
    """Runs `weir …` in an empty directory to its end."""

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "meter", *words],
            cwd=tmp_path,
            env=environment(**variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert "Traceback" not in done.stdout + done.stderr
        return done

    return run


def written(directory: Path, name: str = "some.yaml", **sections: Any) -> str:
    """A file whose sites take free ports; a section that is given is laid over that."""
    tree: dict[str, Any] = {
        "listen": {"host": "127.0.0.1", "port": 0, "grace_seconds": 1},
        "health": {"host": "127.0.0.1", "port": 0},
        "admin": {"port": 0},
        "backends": {"gpu": {"url": NOWHERE}},
        "models": {"m": MODEL},
    }
    for section, terms in sections.items():
        tree[section] = {**tree.get(section, {}), **terms}
    (directory / name).write_text(yaml.safe_dump(tree), encoding="utf-8")
    return name


def lines(text: str) -> dict[str, tuple[str, str]]:
    """What `check` says: thing -> (ok or FAIL, sentence)."""
    found = [line.partition(": ") for line in text.splitlines()]
    return {head[6:]: (head[:6].strip(), said) for head, _, said in found}


def test_the_version_is_said(weir: Weir) -> None:
    done = weir("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"weir {version('tokenweir')}\n", "")


UNUSABLE: dict[str, Any] = {
    "listen": {"tls": {"cert_file": "no.pem", "key_file": "no.key"}},
    "admin": {"tokens": [{"name": "ops", "token_file": "no-token"}, {"name": "cfo", "token_env": "NO_TOKEN"}]},
    "ledger": {"url": "sqlite+aiosqlite:///no/weir.db", "journal_dir": "some.yaml/journal"},
    "quota_store": {"url": "redis://127.0.0.1:1/0"},
    "backends": {
        "filed": {"url": NOWHERE, "api_key_file": "no-key"},
        "unset": {"url": NOWHERE, "api_key_env": "NO_KEY"},
    },
    "models": {"filed": {**MODEL, "tokenizer": "file:no.json"}},
}


def test_check_says_one_line_of_each_thing_whatever_is_wrong_with_the_others(weir: Weir, tmp_path: Path) -> None:
    done = weir("check", "-c", written(tmp_path, **UNUSABLE))
    said = lines(done.stdout)
    assert (done.returncode, done.stderr) == (1, "")
    assert {what for what, (mark, _) in said.items() if mark == "ok"} == {"configuration", "models"}
    for what, place, reason in (
        ("TLS", "listen.tls.cert_file", "no.pem cannot be read"),
        ("TLS", "listen.tls.key_file", "no.key cannot be read"),
        ("admin token ops", "admin.tokens.0.token_file", "no-token cannot be read: No such file"),
        ("admin token cfo", "admin.tokens.1.token_env", "NO_TOKEN is not set"),
        ("backend filed", "backends.filed.api_key_file", "no-key cannot be read: No such file"),
        ("backend unset", "backends.unset.api_key_env", "NO_KEY is not set"),
        ("backend gpu", NOWHERE, ""),
        ("quota store", "quota_store.url", ""),
        ("database", "ledger.url", "directory no"),
        ("journal", "ledger.journal_dir", "no directory"),
        ("tokenizer of filed", "models.filed.tokenizer", "no.json"),
    ):
        mark, sentence = said[what]
        assert mark == "FAIL"
        assert place in sentence
        assert reason in sentence


def test_serve_refuses_files_it_cannot_use_with_their_place_in_the_configuration(weir: Weir, tmp_path: Path) -> None:
    done = weir("serve", "-c", written(tmp_path, **UNUSABLE))
    assert (done.returncode, done.stdout) == (2, "")
    assert {line.partition(": ")[0] for line in done.stderr.splitlines()} == {
        "listen.tls.cert_file",
        "listen.tls.key_file",
        "admin.tokens.0.token_file",
        "backends.filed.api_key_file",
        "ledger.journal_dir",
    }
    assert "no.pem cannot be read: No such file" in done.stderr


def test_a_key_that_is_not_the_certificates_is_refused(weir: Weir, tmp_path: Path) -> None:
    tls = {"cert_file": str(TLS / "cert.pem"), "key_file": str(TLS / "cert.pem")}
    done = weir("serve", "-c", written(tmp_path, listen={"tls": tls}))
    assert done.returncode == 2
    assert done.stderr.startswith("listen.tls: ")


@pytest.mark.parametrize(("command", "code"), [("check", 1), ("serve", 2)])
def test_without_models_both_check_and_serve_say_no(weir: Weir, command: str, code: int) -> None:
    done = weir(command)
    assert done.returncode == code
    assert "models: none is configured" in done.stdout + done.stderr


@pytest.mark.parametrize("command", ["check", "serve"])
def test_a_wrong_file_is_refused_with_every_mistake(weir: Weir, tmp_path: Path, command: str) -> None:
    file = written(tmp_path, health={"port": "x"}, tiers={"t": {"models": ["gone"]}})
    done = weir(command, "-c", file, WEIR_LISTN__PORT="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert [line.partition(": ")[0] for line in done.stderr.splitlines()] == [
        "health.port",
        "listn",
        "tiers.t.models.0",
    ]
    assert "WEIR_LISTN__PORT" in done.stderr


def test_the_file_weir_yaml_here_is_read_without_being_named(weir: Weir, tmp_path: Path) -> None:
    assert lines(weir("check").stdout)["configuration"][1].startswith("defaults")
    written(tmp_path, "weir.yaml", ledger={"url": "sqlite+aiosqlite:///mine.db"})
    assert lines(weir("check").stdout)["configuration"] == ("ok", "weir.yaml")
    assert weir("keys", "create", "--name", "alice").returncode == 0
    assert "alice" in weir("keys", "list").stdout
    assert (tmp_path / "mine.db").exists()
    other = written(tmp_path, models={"gone": {"primary": [{"backend": "gone", "model": "x"}]}})
    assert "models.gone" in weir("check", "-c", other).stderr


async def test_check_is_content_when_everything_answers_and_says_what_serve_will_do(weir: Weir, tmp_path: Path) -> None:
    worker = Simulator("x")
    port = await worker.start("127.0.0.1")
    try:
        (tmp_path / "token").write_text("secret\n")
        file = written(
            tmp_path,
            listen={"tls": {"cert_file": str(TLS / "cert.pem"), "key_file": str(TLS / "key.pem")}},
            admin={"tokens": [{"name": "ops", "token_file": "token"}]},
            backends={"gpu": {"url": f"http://127.0.0.1:{port}", "api_key_env": "KEY"}},
        )
        first = await asyncio.to_thread(weir, "check", "-c", file, KEY="k")
        await asyncio.to_thread(weir, "migrate", "-c", file)
        second = await asyncio.to_thread(weir, "check", "-c", file, KEY="k")
    finally:
        await worker.stop()
    assert (first.returncode, first.stderr) == (0, "")
    said = lines(first.stdout)
    assert said["database"] == ("ok", "can be opened; `weir serve` brings its schema up to date")
    assert said["backend gpu"] == ("ok", "serves x")
    assert said["admin token ops"] == ("ok", "is set (admin)")
    assert lines(second.stdout) == {**said, "database": ("ok", "answers, its schema is the newest")}


def test_check_sends_a_new_postgres_to_migrate(weir: Weir, tmp_path: Path, postgres_server: PostgresServer) -> None:
    file = written(tmp_path, ledger={"url": postgres_server.create_database()})
    mark, sentence = lines(weir("check", "-c", file).stdout)["database"]
    assert mark == "FAIL"
    assert "run `weir migrate`" in sentence
    assert weir("migrate", "-c", file).returncode == 0
    assert lines(weir("check", "-c", file).stdout)["database"] == ("ok", "answers, its schema is the newest")


@pytest.mark.parametrize("section", ["listen", "health", "admin"])
def test_a_port_in_use_is_said_with_its_place_in_the_configuration(weir: Weir, tmp_path: Path, section: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sections: dict[str, Any] = {section: {"port": port}}
        done = weir("serve", "-c", written(tmp_path, **sections))
    assert done.returncode == 1
    assert done.stderr == (
        f"{section}.port: 127.0.0.1:{port} is in use. Stop what listens there, or choose another port.\n"
    )


def test_an_address_that_is_not_this_machines_is_said_with_its_place(weir: Weir, tmp_path: Path) -> None:
    done = weir("serve", "-c", written(tmp_path, admin={"host": "192.0.2.1"}))
    assert done.returncode == 1
    assert done.stderr.startswith("admin.host: 192.0.2.1 is no address to listen on: ")


def warnings_of_serve(directory: Path, *words: str) -> dict[str, str]:
    """place -> reason of what `serve` warns of until it has started."""
    command = [sys.executable, "-m", "meter", "serve", *words]
    with subprocess.Popen(command, cwd=directory, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = [json.loads(line) for line in iter(process.stderr.readline, "") if not started(line, process)]
        finally:
            process.kill()
    assert said[-1]["event"] == "stopped"
    return {line["where"]: line["reason"] for line in said if line["event"] == "a secret is empty"}


def started(line: str, process: subprocess.Popen[str]) -> bool:
    """Stops the process at the line that says it has started."""
    if json.loads(line)["event"] != "started":
        return False
    process.send_signal(signal.SIGTERM)
    return True


def test_serve_warns_once_of_each_secret_that_is_empty(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    tokens = [{"name": "ops", "token_env": "NO_TOKEN"}, {"name": "cfo", "token_file": "empty"}]
    gpu = {"url": NOWHERE, "api_key_env": "NO_KEY"}
    file = written(tmp_path, admin={"tokens": tokens}, backends={"gpu": gpu})
    said = warnings_of_serve(tmp_path, "-c", file)
    assert said.keys() == {"admin.tokens.0.token_env", "admin.tokens.1.token_file", "backends.gpu.api_key_env"}
    assert said["admin.tokens.0.token_env"].endswith("the token 'ops' opens nothing")
    assert "NO_KEY is not set" in said["backends.gpu.api_key_env"]


def test_a_site_that_is_not_served_needs_nothing(tmp_path: Path) -> None:
    admin = written(
        tmp_path, listen={"tls": UNUSABLE["listen"]["tls"]}, backends={"gpu": UNUSABLE["backends"]["filed"]}
    )
    assert warnings_of_serve(tmp_path, "-c", admin, "--only", "admin") == {}
    traffic = written(tmp_path, admin=UNUSABLE["admin"])
    assert warnings_of_serve(tmp_path, "-c", traffic, "--only", "traffic") == {}
