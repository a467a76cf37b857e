"""What is written is true: keys and defaults, commands, targets, ports, links; and the project speaks of itself alone."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.project import product
from tests.project.product import ROOT, WEIR_NAME, files

DOCUMENTS = list(files("*.md", "docs/**/*.md", "bench/*.md", "deploy/**/*.md"))
TEXTS = [*DOCUMENTS, *files("*.yml", "*.toml", "Makefile", ".ci/run", "deploy/**/*", "docs/**/*", "bench/**/*")]
SOURCES = list(files("meter/**/*", "quotas/**/*", "engine_adapter/**/*", "migrations/**/*", "tests/**/*"))
UNFINISHED = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX")))
SOMEBODYS = re.compile("|".join((r"(?<![\w.])/ho" + "me/", "/Use" + "rs/", r"[A-Z]:\\\\", "file" + "://")))


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str) -> list[str]:
    """The lines of fenced code, continued lines joined."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line.strip() for block in fenced for line in re.sub(r"\\\n\s*", "", block).splitlines()]


# ---- configuration ---------------------------------------------------------------------------------------------------


def documented_keys() -> dict[str, str]:
    """The reference's table: key and default."""
    rows = re.findall(
        r"^\| `([a-z0-9_.*\[\]]+)` \| (?:`([^`]*)`|(required)) \|", read("docs/operations.md"), re.MULTILINE
    )
    return {key: default or required for key, default, required in rows}


def test_the_reference_lists_every_configuration_key_and_no_other() -> None:
    assert set(documented_keys()) == set(product.config_keys())


@pytest.mark.parametrize("key", sorted(product.config_keys()))
def test_the_reference_gives_the_default_that_is_in_force(key: str) -> None:
    assert documented_keys()[key] == product.config_keys()[key]


# ---- commands, targets, variables ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names(DOCUMENTS))
def test_commands_in_documents_exist(name: str) -> None:
    for line in blocks(read(name)):
        if line.startswith("weir "):
            assert not product.problems(shlex.split(line.partition(" #")[0])[1:]), line


@pytest.mark.parametrize("name", names(DOCUMENTS))
def test_targets_in_documents_exist(name: str) -> None:
    text = read(name)
    used = set(re.findall(r"`make ([a-z-]+)", text)) | set(
        re.findall(r"^make ([a-z-]+)", "\n".join(blocks(text)), re.MULTILINE)
    )
    assert used <= set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))


@pytest.mark.parametrize("name", names(DOCUMENTS))
def test_variables_in_documents_are_read(name: str) -> None:
    for variable in set(WEIR_NAME.findall(read(name))) - {"WEIR_SECTION__NAME"}:
        assert product.reads(variable), variable


# ---- links -----------------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Headings as GitHub makes anchors of them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", names(DOCUMENTS))
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", read(name)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        found = (ROOT / name).parent / path if path else ROOT / name
        assert found.exists(), target
        assert not anchor or anchor in anchors(found.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("name", names(DOCUMENTS))
def test_files_in_documents_exist(name: str) -> None:
    """Paths of the rooms, said in `code`, with a suffix or a slash at the end."""
    rooms = r"(?:meter|quotas|engine_adapter|migrations|tests|deploy|docs|bench)"
    for path in re.findall(rf"`({rooms}/[\w./-]*(?:/|\.\w+))`", read(name)):
        assert (ROOT / path).exists(), path


# ---- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names([*TEXTS, *SOURCES]))
def test_nothing_is_unfinished_or_bound_to_one_machine(name: str) -> None:
    raw = (ROOT / name).read_bytes()
    text = raw.decode("utf-8", errors="ignore")
    for pattern in (UNFINISHED, SOMEBODYS):
        assert not pattern.search(text), pattern.search(text)
    assert str(ROOT) not in text or len(ROOT.parts) < 3
