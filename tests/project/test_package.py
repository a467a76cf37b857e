"""What is installed: the four packages and nothing else, from versions that are all written down."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.project.product import ROOT, files

PACKAGES = {"meter", "quotas", "engine_adapter", "migrations"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=ROOT, check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_installs_the_four_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES


def test_the_wheel_has_every_file_of_the_packages(wheel: zipfile.ZipFile) -> None:
    ours = {str(path.relative_to(ROOT)) for package in PACKAGES for path in files(f"{package}/**/*")}
    assert ours <= set(wheel.namelist())


def test_the_wheel_brings_the_command_and_the_licence(wheel: zipfile.ZipFile) -> None:
    info = f"tokenweir-{PROJECT['project']['version']}.dist-info"
    assert b"weir = meter.cli:main" in wheel.read(f"{info}/entry_points.txt")
    assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def needed() -> set[str]:
    """Everything that a fresh install with all extras but `vllm` brings, found from what is installed here."""
    project = PROJECT["project"]
    extras = [line for extra in ("postgres", "test", "bench") for line in project["optional-dependencies"][extra]]
    found: set[str] = set()
    waiting = [Requirement(line) for line in (*project["dependencies"], *extras, *PROJECT["build-system"]["requires"])]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name in found and not wanted.extras:
            continue
        found.add(name)
        for line in distribution(name).requires or []:
            inner = Requirement(line)
            if any(inner.marker is None or inner.marker.evaluate({"extra": e}) for e in (*wanted.extras, "")):
                waiting.append(inner)
    return found


def test_the_lock_pins_everything_a_fresh_install_brings() -> None:
    assert needed() - set(pinned()) == set()


def test_the_lock_allows_what_the_project_asks_for() -> None:
    locked = pinned()
    for line in PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["test"]:
        wanted = Requirement(line)
        assert wanted.specifier.contains(locked[canonicalize_name(wanted.name)]), line


def test_the_lock_names_packages_and_versions_only() -> None:
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line), line


def test_the_builder_that_tests_use_is_the_one_that_builds() -> None:
    assert PROJECT["build-system"]["requires"][0] in PROJECT["project"]["optional-dependencies"]["test"]
    assert Path(ROOT / PROJECT["project"]["readme"]).is_file()
