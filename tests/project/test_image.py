"""deploy/Dockerfile: what the linter says, and that what it names is there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from meter.config import Config
from tests.project import product
from tests.project.demo import Demo
from tests.project.deployment import urls, weir_names
from tests.project.product import ROOT

TEXT = re.sub(r"\\\n\s*", "", (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8"))
STEPS = [line.split(maxsplit=1) for line in TEXT.splitlines() if line and not line.startswith("#")]


def said(word: str) -> list[str]:
    return [rest for step, rest in STEPS if step == word]


def test_the_linter_has_no_complaint() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, "--failure-threshold", "style", ROOT / "deploy/Dockerfile"], capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_it_is_built_in_two_stages_from_the_lock() -> None:
    assert len(said("FROM")) == 2
    assert all("-slim" in image for image in said("FROM"))
    assert any("PIP_CONSTRAINT=constraints.txt" in line for line in said("ENV"))


def test_it_copies_what_is_there_and_what_the_ignore_file_lets_through() -> None:
    sources = [word for line in said("COPY") if "--from" not in line for word in shlex.split(line)[:-1]]
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {"meter", "quotas", "engine_adapter", "migrations", "constraints.txt"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in allowed


def test_it_runs_without_root_and_stops_politely() -> None:
    assert re.fullmatch(r"\d+:\d+", said("USER")[-1])
    assert said("STOPSIGNAL") == ["SIGTERM"]


def test_it_runs_a_command_that_exists() -> None:
    assert json.loads(said("ENTRYPOINT")[0]) == ["weir"]
    assert not product.problems(json.loads(said("CMD")[-1]))


def test_it_names_the_ports_of_the_product() -> None:
    terms = Config()
    assert {int(port) for port in said("EXPOSE")[0].split()} == {terms.listen.port, terms.admin.port, terms.health.port}


def test_its_health_check_asks_what_the_health_site_answers(demo: Demo) -> None:
    ((host, port, path),) = urls(said("HEALTHCHECK")[0])
    assert (host, port) == ("127.0.0.1", Config().health.port)
    assert demo.get(f"{demo.health}{path}").status == 200


@pytest.mark.parametrize("name", sorted(weir_names("deploy/Dockerfile")))
def test_every_variable_is_one_the_product_reads(name: str) -> None:
    assert product.reads(name)
