"""The Makefile explains itself, and CI runs what the README says."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.project.product import ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[0].split()


def make(*words: str) -> subprocess.CompletedProcess[str]:
    """A make of its own: what an outer make was told (these tests run under one) is not for it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


def test_plain_make_lists_every_target_with_a_word_about_it() -> None:
    done = make()
    assert done.returncode == 0, done.stderr
    listed = dict(re.findall(r"^  make ([a-z-]+) +(\S.*)$", done.stdout, re.MULTILINE))
    assert set(listed) == set(TARGETS)
    assert all(listed.values())


def test_every_rule_for_people_is_declared_phony() -> None:
    assert set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE)) == set(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_can_be_made(target: str) -> None:
    done = make("--dry-run", target)
    assert done.returncode == 0, done.stderr


def test_without_a_python_it_says_what_to_install(tmp_path: object) -> None:
    done = make(f"VENV={tmp_path}/venv", "PYTHON=no-such-python", "run")
    assert done.returncode != 0
    assert "No Python 3.11 or newer" in done.stderr
    assert "apt install" in done.stderr


def test_ci_runs_the_commands_of_the_readme() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    commands = re.findall(r"^make [a-z-]+$", script, re.MULTILINE)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert commands == ["make check", "make test"]
    assert all(re.search(rf"^{command}\b", readme, re.MULTILINE) for command in commands)
    assert "set -euo pipefail" in script
