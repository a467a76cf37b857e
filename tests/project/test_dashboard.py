"""The dashboard asks only for metrics, labels and variables that exist; docs/operations.md lists the same metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.project.demo import Demo
from tests.project.deployment import compose
from tests.project.product import ROOT, read_yaml

FILE = "deploy/grafana/dashboards/weir.json"
DASHBOARD: dict[str, Any] = json.loads((ROOT / FILE).read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SUFFIXES = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
ADDED = {"le", "instance", "job"}
"""Labels that Prometheus itself brings."""


def expressions() -> Iterator[str]:
    yield from (target["expr"] for panel in PANELS for target in panel["targets"])
    yield from (
        variable["query"]["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"
    )


def documented() -> dict[str, set[str]]:
    """Metrics and their labels as the table in docs/operations.md has them."""
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(weir_\w+)(?:\{([\w,]+)\})?` \|", text, re.MULTILINE)
    return {name: set(labels.split(",")) - {""} for name, labels in rows}


@pytest.fixture(scope="module")
def exposition(demo: Demo, tour: dict[str, str]) -> str:
    """What a scrape brings after the tour: answers, refusals and booked records of every kind."""
    assert tour
    return demo.get(f"{demo.health}/metrics").body


def exposed(text: str) -> dict[str, str]:
    """Metric families that are ours, with their types; when a series began is not one."""
    found = re.findall(r"^# TYPE (weir_\w+) (\w+)$", text, re.MULTILINE)
    return {name: kind for name, kind in found if not name.endswith("_created")}


def test_every_metric_of_a_query_exists(exposition: str) -> None:
    known = {name + end for name, kind in exposed(exposition).items() for end in SUFFIXES[kind]}
    for query in expressions():
        assert set(re.findall(r"\bweir_\w+", query)) <= known, query


def test_every_label_of_a_query_exists() -> None:
    labels = documented()
    for query in expressions():
        names = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bweir_\w+", query)}
        used = set(re.findall(r"(\w+)=~?\"", query)) | {
            label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")
        }
        for name in names:
            assert used <= labels[name] | ADDED, query


def test_every_legend_is_made_of_labels_the_query_keeps() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            kept = {
                label.strip() for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(",")
            }
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept | ADDED, target


def test_every_variable_of_a_query_is_defined() -> None:
    defined = {variable["name"] for variable in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    for query in expressions():
        assert set(re.findall(r"\$(?:\{)?(\w+)", query)) <= defined, query


def test_the_documented_metrics_are_the_exposed_ones(exposition: str) -> None:
    assert set(documented()) == set(exposed(exposition))


def test_the_documented_labels_are_the_exposed_ones(exposition: str) -> None:
    seen: dict[str, set[str]] = {}
    for sample, labels in re.findall(r"^(weir_\w+)(?:\{(.*)\})? ", exposition, re.MULTILINE):
        name = re.sub(r"_(bucket|sum|count|created)$", "", sample)
        seen.setdefault(name, set()).update(set(re.findall(r"(\w+)=\"", labels)) - ADDED)
    known = documented()
    for name in seen.keys() & known.keys():
        assert seen[name] == known[name], name


def test_the_important_questions_are_on_it() -> None:
    asked = " ".join(expressions())
    for name in (
        "weir_requests_total", "weir_tokens_total", "weir_cost_usd_total", "weir_refusals_total", "weir_inflight",
        "weir_request_duration_seconds", "weir_first_token_seconds", "weir_overhead_seconds", "weir_quota_store_up",
        "weir_quota_store_seconds", "weir_journal_bytes", "weir_ledger_lag_seconds", "weir_backend_up",
    ):  # fmt: skip
        assert name in asked


def test_panels_say_what_they_show_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"]
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_ids_and_letters_are_unique() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in PANELS:
        letters = [target["refId"] for target in panel["targets"]]
        assert len(letters) == len(set(letters))


def test_its_data_source_is_the_provisioned_kind() -> None:
    (source,) = read_yaml("deploy/grafana/provisioning/datasources/prometheus.yml")["datasources"]
    (variable,) = (each for each in DASHBOARD["templating"]["list"] if each["name"] == "datasource")
    assert (variable["type"], variable["query"]) == ("datasource", source["type"])
    assert "grafana" in compose()
