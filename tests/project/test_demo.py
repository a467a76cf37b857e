"""`weir demo` shows what it says: each step of its tour, pasted into a shell, does what the README tells."""

from __future__ import annotations

import json
import re
import time
from typing import Any

from tests.project import demo as demonstration
from tests.project.demo import Demo
from tests.project.product import ROOT

SPILL = "the base rate, the burst, the spill to the cheaper backend, and in the end the 429 at the hard cap"


def test_a_plain_answer_says_what_it_used(tour: dict[str, str]) -> None:
    answer = json.loads(tour["a plain answer"])
    assert answer["model"] == "assistant"
    assert answer["usage"]["completion_tokens"] == 16


def test_a_stream_comes_event_by_event(tour: dict[str, str]) -> None:
    events = re.findall(r"^data: (.*)$", tour["a stream"], re.MULTILINE)
    assert events[-1] == "[DONE]"
    assert len(events) > 16


def test_requests_go_from_base_to_burst_to_overflow_to_the_cap(tour: dict[str, str]) -> None:
    lines = [line.split() for line in tour[SPILL].splitlines()]
    assert len(lines) == 60
    assert list(dict.fromkeys(map(tuple, lines))) == [
        ("200", "base", "large"),
        ("200", "burst", "large"),
        ("200", "overflow", "cheap"),
        ("429", "cap"),
    ]


def test_the_429_says_whose_limit_it_was_and_when_to_come_back(tour: dict[str, str]) -> None:
    error = json.loads(tour["what the 429 says"])["error"]
    assert error["code"] == "insufficient_quota"
    assert re.search(r"key's limit of 50000 tokens in 3600 s .* Try again in \d+ s", error["message"])


def test_the_quota_shows_the_windows(tour: dict[str, str]) -> None:
    windows = json.loads(tour["the key's own windows"])["windows"]
    assert {window["name"]: window["limit"] for window in windows} == {"minute": 2000, "burst": 4000, "hour": 50000}


def test_the_report_adds_up_to_what_the_hour_shows(demo: Demo, tour: dict[str, str]) -> None:
    (hour,) = (w for w in json.loads(tour["the key's own windows"])["windows"] if w["name"] == "hour")
    deadline, rows = time.monotonic() + 20, reported(demo)
    while sum(row["total_tokens"] for row in rows) != hour["used"]:
        assert time.monotonic() < deadline, f"{rows} do not add up to {hour}"
        rows = reported(demo)
    assert {row["backend"] for row in rows} == {"large", "cheap"}


def reported(demo: Demo) -> list[dict[str, Any]]:
    """The last records may still be on their way to the ledger, so this step may have to be asked again."""
    rows: list[dict[str, Any]] = json.loads(demo.paste("the usage report, by model and backend"))["rows"]
    return rows


def test_ctrl_c_ends_it_cleanly() -> None:
    with demonstration.running() as demo:
        assert demo.get(f"{demo.callers}/v1/models", demo.key).status == 200
    assert demo.process.returncode == 0  # and it had nothing to complain of: see running()


def test_the_readme_tells_every_step_of_the_tour(demo: Demo) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [heading for heading in demo.headings if f"**{heading}**" not in readme] == []
