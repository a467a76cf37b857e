"""What the product really has: configuration keys, commands, metrics. What is written about it is compared with this."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import typer
import yaml
from pydantic import BaseModel
from typer.core import TyperCommand, TyperGroup

from meter.callers.tiers import LimitTerms, ShadowTerms
from meter.cli import cli
from meter.config import Config

ROOT = Path(__file__).resolve().parents[2]
WEIR_NAME = re.compile(r"\bWEIR_[A-Z0-9_]+[A-Z0-9]")
_SHAPES = (LimitTerms, ShadowTerms)
"""Written on one line in the file, so one row in the documentation."""


def read_yaml(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def files(*patterns: str) -> Iterator[Path]:
    """The project's own files; nothing hidden but what is named, nothing built."""
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            parts = path.relative_to(ROOT).parts
            if path.is_file() and not any(part in {".venv", "__pycache__", "build", "dist"} for part in parts):
                yield path


# ---- configuration ---------------------------------------------------------------------------------------------------


def config_keys() -> dict[str, str]:
    """Every key of the configuration file (`tiers.*.cap`, `admin.tokens[].name`) with its default as YAML shows it."""
    return dict(_keys(Config, ""))


def _keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        nested, step = _nested(field.annotation)
        if nested is not None:
            yield from _keys(nested, f"{prefix}{name}{step}.")
        else:
            yield f"{prefix}{name}", "required" if field.is_required() else shown(field.default)


def _nested(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """The model inside an annotation and how the file reaches it: `` itself, `.*` by name, `[]` in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (None, "") if issubclass(annotation, _SHAPES) else (annotation, "")
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (dict, Mapping):
        return _nested(arguments[1])[0], ".*"
    if origin is tuple:
        return _nested(arguments[0])[0], "[]"
    candidates = arguments if origin in (Union, UnionType) else arguments[:1] if arguments else ()
    return next((found for found in map(_nested, candidates) if found[0] is not None), (None, ""))


def shown(value: object) -> str:
    """A default as the file would say it."""
    if isinstance(value, BaseModel):
        return "{" + ", ".join(f"{name}: {shown(part)}" for name, part in value) + "}"
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, tuple | dict):
        return "{}" if isinstance(value, dict) else "[" + ", ".join(map(shown, value)) + "]"
    return str(value)


def reads(variable: str) -> bool:
    """Whether the product looks at this environment variable."""
    if "__" in variable:
        return _leads_somewhere(Config, variable.removeprefix("WEIR_").lower().split("__"))
    sources = "".join(path.read_text(encoding="utf-8") for path in files("meter/**/*.py"))
    return variable in sources or variable in _named_in_examples()


def _leads_somewhere(model: type[BaseModel], steps: list[str]) -> bool:
    first, *rest = steps
    if first not in model.model_fields:
        return False
    if not rest:
        return True
    nested, step = _nested(model.model_fields[first].annotation)
    rest = rest[1:] if step == ".*" else rest
    return nested is not None and bool(rest) and _leads_somewhere(nested, rest)


def _named_in_examples() -> set[str]:
    """Variables that a configuration file of ours names as the place of a secret."""
    text = "".join(path.read_text(encoding="utf-8") for path in files("deploy/*.yaml", "deploy/k8s/*.yaml"))
    return set(re.findall(r"(?:token|api_key)_env: (\w+)", text))


# ---- command line ----------------------------------------------------------------------------------------------------


def command(words: list[str]) -> tuple[TyperCommand | TyperGroup, list[str]]:
    """The command that `weir …` would run, and the words left over for it. LookupError where there is none."""
    node: Any = typer.main.get_command(cli)
    while isinstance(node, TyperGroup) and words and not words[0].startswith("-"):
        if words[0] not in node.commands:
            raise LookupError(f"weir has no command {words[0]!r}")
        node, words = node.commands[words[0]], words[1:]
    return node, words


def problems(words: list[str]) -> list[str]:
    """What `weir …` would not understand."""
    try:
        node, rest = command(words)
    except LookupError as error:
        return [str(error)]
    known = {option for parameter in node.params for option in (*parameter.opts, *parameter.secondary_opts)}
    given = [word.partition("=")[0] for word in rest if word.startswith("-") and len(word) > 1]
    return [f"weir {node.name} has no option {word}" for word in given if word not in known | {"--help"}]
