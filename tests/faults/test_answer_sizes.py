"""What learning the size of answers brings and costs, as the bench prints it."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass

import pytest

from tests.project.product import ROOT


@dataclass(frozen=True)
class Row:
    key: str
    offered: int
    held: float
    learned: float
    allowed: int
    most_over: int
    mean_over: float
    debt: int
    fullest_hour: int


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    bench = [sys.executable, str(ROOT / "bench" / "answer_sizes.py"), "--requests", "2000"]
    printed = subprocess.run(bench, capture_output=True, text=True, timeout=100, check=True).stdout
    return [_row(line) for line in printed.splitlines()[2:]]


def _row(line: str) -> Row:
    key, *cells = (cell.strip() for cell in line.strip("|").split("|"))
    offered, held, learned, allowed, over, mean, debt, hour = (
        float(re.match(r"[\d.,]+", cell)[0].replace(",", ""))  # type: ignore[index]
        for cell in cells
    )
    return Row(key, int(offered), held, learned, int(allowed), int(over), mean, int(debt), int(hour))


def test_learned_sizes_refuse_far_less_and_are_paid_back(rows: list[Row]) -> None:
    """Far less: half, where a request of full length is half of the rate; where hardly any is refused, no more."""
    assert len(rows) == 9
    for row in rows:
        assert row.learned <= row.held
        assert row.fullest_hour <= 100
        assert row.most_over < row.allowed
        assert row.mean_over < row.allowed / 50
    crowded = [row for row in rows if row.held > 10 and row.offered < 100]
    assert len(crowded) >= 4
    for row in crowded:
        assert row.learned < row.held / 2
