"""The house stands: one direction of imports, no cycle, and what is called pure is pure."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.project.product import ROOT, files

ROOMS = ("quotas", "engine_adapter", "meter", "migrations")
PURE = (
    "quotas/policy.py",
    "quotas/windows.py",
    "quotas/decision.py",
    "engine_adapter/body.py",
    "engine_adapter/prompts.py",
    "engine_adapter/request.py",
    "engine_adapter/usage.py",
    "engine_adapter/answers.py",
    "engine_adapter/choices.py",
    "engine_adapter/estimate.py",
    "engine_adapter/figures.py",
    "engine_adapter/lenient.py",
    "engine_adapter/response.py",
    "engine_adapter/splice.py",
    "engine_adapter/events.py",
    "engine_adapter/framing.py",
    "engine_adapter/tally.py",
    "engine_adapter/scanner.py",
    "engine_adapter/chat_events.py",
    "engine_adapter/responses_events.py",
    "engine_adapter/open_items.py",
    "engine_adapter/messages_events.py",
    "engine_adapter/vllm.py",
    "engine_adapter/prompt_size.py",
    "engine_adapter/health.py",
    "engine_adapter/routing.py",
    "meter/ledger/pricing.py",
    "meter/ledger/record.py",
    "meter/gateway/replies.py",
)
WORLD = {"aiohttp", "redis", "sqlalchemy", "asyncio", "socket", "time"}
ASYNC = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)


def sources() -> list[Path]:
    return list(files(*(f"{room}/**/*.py" for room in ROOMS)))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of what is imported, `from a import b` as a.b. There are no relative imports: see the first test."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def run_time(tree: ast.Module) -> ast.Module:
    """Without the imports that only the type checker sees: a part and its whole may name each other there."""
    kept = [node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")]
    return ast.Module(kept, [])


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_the_import_linter_has_no_complaint() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_module_imports_itself_by_a_detour() -> None:
    names = {module_of(path) for path in sources()}
    needs = {module_of(path): modules_of(imported(run_time(tree_of(path))), names) for path in sources()}
    list(TopologicalSorter(needs).static_order())  # raises CycleError, which names the cycle


def modules_of(imports: Iterator[str], names: set[str]) -> set[str]:
    """`a.b` is the module a.b if there is one, else something of the module a."""
    return {name if name in names else name.rpartition(".")[0] for name in imports} & names


@pytest.mark.parametrize("room", ["quotas", "engine_adapter"])
def test_quotas_and_the_engine_adapter_import_nothing_of_ours(room: str) -> None:
    for path in files(f"{room}/**/*.py"):
        others = {name.partition(".")[0] for name in imported(tree_of(path))} & set(ROOMS) - {room}
        assert not others, f"{path.relative_to(ROOT)} imports {others}"


def test_nothing_imports_tests_or_bench() -> None:
    for path in sources():
        roots = {name.partition(".")[0] for name in imported(tree_of(path))}
        assert not roots & {"tests", "bench", "deploy"}, path


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_do_not_wait_and_touch_no_neighbour(name: str) -> None:
    tree = tree_of(ROOT / name)
    waits = [node.lineno for node in ast.walk(tree) if isinstance(node, ASYNC)]
    assert not waits, f"{name} waits in lines {waits}"
    assert not {root.partition(".")[0] for root in imported(tree)} & WORLD


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_never_ask_for_the_time(name: str) -> None:
    asked = [
        node.lineno
        for node in ast.walk(tree_of(ROOT / name))
        if isinstance(node, ast.Attribute) and node.attr in {"now", "utcnow", "today", "monotonic"}
        if isinstance(node.value, ast.Name) and node.value.id in {"datetime", "date", "time"}
    ]
    assert not asked, f"{name} looks at the clock in lines {asked}"
