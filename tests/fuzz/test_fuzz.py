"""Inputs that coverage leads to, for a while."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.product import ROOT


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", ["request_bodies", "event_streams"])
def test_nothing_that_coverage_leads_to_does_worse_than_a_refusal(target: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", f"tests.fuzz.{target}", str(tmp_path), "-max_total_time=60", "-print_final_stats=1"]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "stat::number_of_executed_units" in ran.stderr
