"""docs/rest.md and docs/callers.md are true and whole: routes, fields, defaults, error codes. The daily jobs run as written."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from engine_adapter import request
from engine_adapter.prompts import IN_EVERY_PAIR, JSON_FIELDS
from engine_adapter.request import ENDPOINTS
from meter.admin.asked import Page
from meter.admin.audit import AuditQuery
from meter.admin.deps import AdminDeps
from meter.admin.refusals import RefusalsQuery
from meter.admin.site import admin_app
from meter.admin.usage import RecordsQuery, UsageQuery
from meter.app import Sidecar, now
from meter.callers.directory import Directory
from meter.callers.edits import KeyDraft, KeyPatch, PriceDraft, Rotation
from meter.callers.registry import Registry
from meter.callers.tiers import ScopeTerms, Tier
from meter.config import Config
from meter.gateway import replies
from meter.gateway.free import PATHS as FREE
from meter.gateway.replies import Reply
from meter.gateway.server import MODELS, QUOTA
from meter.ledger.database import open_engine
from quotas.memory import MemoryStore
from quotas.store import Verdict
from tests.project import demo as demonstration
from tests.project.product import ROOT, files

REST, CALLERS = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("rest.md", "callers.md"))
ROUTE = re.compile(r"`((?:GET|POST|PUT|PATCH|DELETE) /[^`\s]*)`")


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, heading
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of the table's rows, without its head."""
    table = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table]


# ---- the admin REST --------------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path) -> set[str]:
    """The routes of the admin site, which is built but not started. HEAD comes with each GET."""
    config, engine = Config(), open_engine(f"sqlite+aiosqlite:///{tmp_path / 'weir.db'}")
    sidecar = Sidecar(config)
    deps = AdminDeps(
        config=config,
        engine=engine,
        registry=Registry(engine, now),
        directory=Directory(engine, config, tmp_path / "snapshot", now),
        store=MemoryStore(lambda: 0.0),
        state=sidecar.state,
        condition=sidecar,
        metrics=CollectorRegistry(),
        clock=now,
    )
    routes = ((route.method, route.resource) for route in admin_app(deps).router.routes())
    return {f"{method} {resource.canonical}" for method, resource in routes if resource and method != "HEAD"}


async def test_rest_names_every_route_and_no_other(served: set[str]) -> None:
    named = [ROUTE.fullmatch(row[0]) for row in rows(section(REST, "Routes"))]
    assert {found[1] for found in named if found} == served
    assert len(named) == len(served)


FIELDS: Mapping[str, type[BaseModel]] = {
    "A new key": KeyDraft,
    "A change to a key": KeyPatch,
    "A new secret": Rotation,
    "A tier, or a key's override": Tier,
    "A team": ScopeTerms,
    "A new price": PriceDraft,
    "Queries": Page,
    "Usage": UsageQuery,
    "Records of usage": RecordsQuery,
    "Refusals": RefusalsQuery,
    "Audit log": AuditQuery,
}
"""Headings, and what reads the body or the query that they describe."""


def fields_of(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


@pytest.mark.parametrize("heading", FIELDS)
def test_rest_names_every_field_and_no_other(heading: str) -> None:
    model = FIELDS[heading]
    everywhere = fields_of(Page) if issubclass(model, Page) and model is not Page else set()
    assert {row[0] for row in rows(section(REST, heading))} == {f"`{name}`" for name in fields_of(model) - everywhere}


@pytest.mark.parametrize("heading", [heading for heading, model in FIELDS.items() if not issubclass(model, Page)])
def test_rest_says_which_fields_are_required(heading: str) -> None:
    required = {f"`{name}`" for name, field in FIELDS[heading].model_fields.items() if field.is_required()}
    assert {row[0] for row in rows(section(REST, heading)) if row[-1] == "required"} == required


def test_rest_names_every_error_code_and_no_other() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in files("meter/admin/*.py"))
    made = set(re.findall(r'Refusal\(\s*(\d{3}), "(\w+)"', sources))
    made |= {("400", "invalid_request")}  # whatever else is wrong with the HTTP
    assert {(row[0], row[1].strip("`")) for row in rows(section(REST, "Errors"))} == made


def test_the_daily_jobs_run_as_written(tmp_path: Path) -> None:
    first, *jobs = re.findall(r"^```\n(.*?)^```", REST.partition("## Routes")[0], re.MULTILINE | re.DOTALL)
    assert first.startswith("A=")
    with demonstration.running() as demo:
        script = f"""
            set -euo pipefail
            A={demo.admin}/admin/v1
            curl() {{ command curl --fail-with-body "$@"; }}
        """ + "\n".join(jobs)
        words = {**os.environ, "ADMIN": demo.admin_token}
        words["PATH"] = f"{Path(sys.executable).parent}:{words['PATH']}"
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=words, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:]
        disabled = demo.get(f"{demo.admin}/admin/v1/keys", demo.admin_token).body
    assert '"name":"alice"' in disabled
    assert '"state":"disabled"' in disabled
    assert (tmp_path / "usage.csv").read_text(encoding="utf-8").startswith("bucket,team,model,requests,")


# ---- what callers see ------------------------------------------------------------------------------------------------

REFUSALS = [Verdict(kind="parallel", now=0.0), Verdict(kind="cap", now=0.0), Verdict(kind="rate", now=0.0)]
EVERY: Mapping[str, list[Reply]] = {
    "bad_request": [replies.bad_request("wrong"), replies.bad_request("compressed", status=415)],
    "unauthorized": [replies.unauthorized("missing")],
    "not_found": [replies.not_found("/")],
    "method_not_allowed": [replies.method_not_allowed("PUT", ["GET"])],
    "model_not_found": [replies.model_not_found("m")],
    "not_served": [replies.not_served("m", "/v1/rerank")],
    "too_large": [replies.too_large(1)],
    "too_slow": [replies.too_slow()],
    "too_many_at_once": [replies.too_many_at_once(4)],
    "unavailable": [],
    "quota_unavailable": [replies.quota_unavailable()],
    "ledger_full": [replies.ledger_full()],
    "shutting_down": [replies.shutting_down()],
    "engine_unavailable": [replies.engine_unavailable(status, "away") for status in (502, 503, 504)],
    "internal": [replies.internal()],
    "refused": [
        *(replies.refused(verdict, "") for verdict in REFUSALS),
        replies.refused(Verdict(kind="cap", now=0.0, by_holds=True), ""),
        replies.refused(REFUSALS[1], "", never=True),
    ],
}
"""Each function of `replies.py` that makes an answer, and all that it makes. `unavailable` is what others are made of."""


def test_every_function_that_makes_an_answer_is_looked_at() -> None:
    functions = inspect.getmembers(replies, inspect.isfunction)
    assert {name for name, made in functions if made.__annotations__.get("return") == "Reply"} == set(EVERY)


def test_callers_names_every_error_and_no_other() -> None:
    made = {(str(reply.status), reply.type, reply.code or "null") for answers in EVERY.values() for reply in answers}
    named = [tuple(cell.strip("`") for cell in row[:3]) for row in rows(section(CALLERS, "Errors"))]
    assert set(named) == made
    assert len(named) == len(made)


def test_callers_says_what_becomes_of_every_field_that_is_looked_at() -> None:
    policies = {tuple(re.findall(r"`(\w+)`", names)): policy for names, policy in rows(section(CALLERS, "Fields"))}
    left_out, refused = (
        {name for names, policy in policies.items() if policy.startswith(word) for name in names}
        for word in ("left out", "refused")
    )
    limits = {name for names in request.LIMITS.values() for name in names}
    named = {name for names in policies for name in names}
    assert left_out == set(request.DROPPED)
    assert refused == {*request.REFUSED, "padding"}
    assert named >= limits | {*request.FLAGS, *request.NUMBERS, *JSON_FIELDS, *IN_EVERY_PAIR}
    assert sum(map(len, policies)) == len(named)


def test_callers_names_every_endpoint_that_is_served_and_no_other() -> None:
    named = set(ROUTE.findall(section(CALLERS, "What is served")))
    assert named == {
        *(f"POST {path}" for path in (*ENDPOINTS, *FREE)),
        f"GET {MODELS}",
        f"GET {MODELS}/{{name}}",
        f"GET {QUOTA}",
    }
