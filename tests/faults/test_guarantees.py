"""What docs/guarantees.md promises is shown: its tests exist, its numbers are those of the formulas."""

from __future__ import annotations

import ast
import re

import pytest

from tests.faults.bounds import FOR_THE_DEFAULTS
from tests.project.product import ROOT

TEXT = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
PROMISES = dict(re.findall(r"^\| \*\*([^*]+)\*\*:? ?(.*)$", TEXT, re.MULTILINE))
"""The tables' rows: the promise's name, and the rest of its line."""
CITED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", TEXT)))


@pytest.mark.parametrize(("file", "name"), CITED, ids=[name for _, name in CITED])
def test_every_test_that_is_named_exists(file: str, name: str) -> None:
    found = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    assert name in {node.name for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("promise", sorted(PROMISES))
def test_every_promise_names_its_test_or_says_that_there_is_none(promise: str) -> None:
    shown_by = PROMISES[promise].rstrip(" |").rpartition(" | ")[2]
    assert "::test_" in shown_by or shown_by == "not shown"


@pytest.mark.parametrize("promise", sorted(FOR_THE_DEFAULTS))
def test_the_number_of_a_bound_is_what_its_formula_gives(promise: str) -> None:
    missed, with_the_defaults = PROMISES[promise].split(" | ")[1:3]
    assert missed
    assert FOR_THE_DEFAULTS[promise] in with_the_defaults
