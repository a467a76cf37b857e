"""File and environment into typed values; all mistakes are reported together, each with its path in the file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from meter.callers.tiers import LimitTerms, ScopeTerms, Terms, Tier, Whole

Port = Annotated[Whole, Field(ge=0, le=65_535)]
Positive = Annotated[float, Field(gt=0, le=86_400)]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\s@\x00-\x1f]+$")]


class ConfigError(Exception):
    """The file or the environment is wrong; `mistakes` lists every (path, what would be right)."""

    def __init__(self, mistakes: list[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{path}: {reason}" for path, reason in mistakes))
        self.mistakes = mistakes


class Secret(Terms):
    """A secret is named, never written: by an environment variable or a file."""

    def _read(self, env: str | None, file: Path | None) -> str | None:
        if env is not None:
            return os.environ.get(env) or None
        if file is not None:
            return file.read_text(encoding="utf-8").strip() or None
        return None


class TlsTerms(Terms):
    cert_file: Path
    key_file: Path


class ListenTerms(Terms):
    host: str = "0.0.0.0"  # noqa: S104  a sidecar is reached from outside its pod
    port: Port = 8080
    workers: Annotated[Whole, Field(ge=1, le=1)] = 1
    max_body_mb: Positive = 8
    grace_seconds: Annotated[float, Field(ge=0, le=3_600)] = 30
    cors_origins: tuple[str, ...] = ()
    tls: TlsTerms | None = None


class HealthTerms(Terms):
    host: str = "0.0.0.0"  # noqa: S104  probes come from the node
    port: Port = 8082


class AdminToken(Secret):
    name: Name
    role: Literal["admin", "operator", "finance"] = "admin"
    token_env: str | None = None
    token_file: Path | None = None

    @property
    def token(self) -> str | None:
        """None: unset. An unset token opens nothing."""
        return self._read(self.token_env, self.token_file)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.token_env is None) == (self.token_file is None):
            raise PydanticCustomError("secret", "give exactly one of token_env, token_file")
        return self


class AdminTerms(Terms):
    host: str = "127.0.0.1"
    port: Port = 8081
    tokens: tuple[AdminToken, ...] = ()


class QuotaStoreTerms(Terms):
    url: str = "memory://"
    timeout_ms: Positive = 50
    on_down: Literal["local", "deny", "allow"] = "local"
    local_share: Literal["auto"] | Annotated[float, Field(gt=0, le=1)] = "auto"
    lease_seconds: Annotated[float, Field(ge=1, le=3_600)] = 30

    @field_validator("url")
    @classmethod
    def _known(cls, url: str) -> str:
        if urlsplit(url).scheme not in {"memory", "redis", "rediss"}:
            raise PydanticCustomError("url", "must be memory://, redis://host:port/db or rediss://host:port/db")
        return url


class LedgerTerms(Terms):
    url: str = "sqlite+aiosqlite:///weir.db"
    journal_dir: Path = Path("./journal")
    fsync_ms: Annotated[float, Field(ge=0, le=60_000)] = 100
    retention_months: Annotated[Whole, Field(ge=1, le=1_200)] = 24
    batch_rows: Annotated[Whole, Field(ge=1, le=100_000)] = 1_000
    batch_ms: Positive = 200
    journal_max_mb: Positive = 1_024
    on_journal_full: Literal["deny", "drop"] = "deny"

    @field_validator("url")
    @classmethod
    def _known(cls, url: str) -> str:
        if urlsplit(url).scheme not in {"sqlite+aiosqlite", "postgresql+asyncpg"}:
            raise PydanticCustomError("url", "must be sqlite+aiosqlite:///file.db or postgresql+asyncpg://user@host/db")
        return url


class BackendTerms(Secret):
    url: str
    kind: Literal["vllm", "openai"] = "vllm"
    api_key_env: str | None = None
    api_key_file: Path | None = None
    connect_seconds: Positive = 2
    first_event_seconds: Positive = 60
    idle_seconds: Positive = 30

    @property
    def api_key(self) -> str | None:
        return self._read(self.api_key_env, self.api_key_file)

    @field_validator("url")
    @classmethod
    def _http(cls, url: str) -> str:
        parts = urlsplit(url)
        if (
            parts.scheme not in {"http", "https"}
            or not parts.hostname
            or parts.query
            or parts.fragment
            or parts.username
        ):
            raise PydanticCustomError("url", "must be http://host:port or https://host:port, with a path prefix if any")
        return url.rstrip("/")


class TargetTerms(Terms):
    """A model as one backend serves it: the model's name there, its context, a rate of its own (overflow only)."""

    backend: str
    model: Annotated[str, Field(min_length=1)]
    context_tokens: Annotated[Whole, Field(ge=1)] | None = None
    rate: LimitTerms | None = None


class ModelTerms(Terms):
    primary: Annotated[tuple[TargetTerms, ...], Field(min_length=1)]
    overflow: tuple[TargetTerms, ...] = ()
    tokenizer: Annotated[str, Field(pattern=r"^(bytes|engine|tiktoken:.+|file:.+)$")] = "bytes"
    expose_served_model: bool = False


class PriceTerms(Terms):
    """USD per million tokens."""

    prompt: Annotated[float, Field(ge=0, le=1e6)]
    completion: Annotated[float, Field(ge=0, le=1e6)]
    cached_prompt: Annotated[float, Field(ge=0, le=1e6)] | None = None
    managed_by: Literal["file", "rest"] = "rest"


class FileTier(Tier):
    managed_by: Literal["file", "rest"] = "rest"


class FileTeam(ScopeTerms):
    managed_by: Literal["file", "rest"] = "rest"


class FileKey(Terms):
    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9]{4,64}$")]
    name: Annotated[str, Field(min_length=1, max_length=300)]
    tier: str
    team: str | None = None
    secret_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class LogTerms(Terms):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "text"] = "json"


class Config(Terms):
    """The whole configuration; what is not said is the default of the contract."""

    listen: ListenTerms = ListenTerms()
    health: HealthTerms = HealthTerms()
    admin: AdminTerms = AdminTerms()
    quota_store: QuotaStoreTerms = QuotaStoreTerms()
    ledger: LedgerTerms = LedgerTerms()
    backends: dict[Name, BackendTerms] = {}
    models: dict[Annotated[str, Field(min_length=1, max_length=200)], ModelTerms] = {}
    tiers: dict[Name, FileTier] = {}
    teams: dict[Name, FileTeam] = {}
    prices: dict[str, PriceTerms] = {}
    keys: tuple[FileKey, ...] = ()
    log: LogTerms = LogTerms()

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        if missing := _dangling(self.model_dump()):
            reason = "; ".join(f"{path}: {said}" for path, said in missing)
            raise PydanticCustomError(_DANGLING, "{reason}", {"reason": reason})
        return self


def load(path: Path | None, environ: Mapping[str, str] = os.environ) -> Config:
    """Reads the file (None: nothing but defaults), lays the environment over it, validates. Raises ConfigError."""
    tree = _read(path) if path is not None else {}
    mistakes = _overlay(tree, environ)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        mistakes += _mistakes(error) + _hidden_policies(tree, error) + _dangling(tree)
    if mistakes:
        raise ConfigError(list(dict.fromkeys(mistakes)))
    return config


Mistake = tuple[str, str]
_DANGLING = "dangling"
LIMITS = ("rate", "burst", "cap", "max_parallel")
SHADOW = ("shadow",)


def _mistakes(error: ValidationError) -> list[Mistake]:
    found: list[Mistake] = []
    for item in error.errors(include_url=False):
        path = _path(item["loc"])
        if item["type"] == "policy":
            found += [(_path((*item["loc"], field)), reason) for field, reason in item["ctx"]["problems"]]
        elif item["type"] == "extra_forbidden":
            found.append((path, "is not a name here; the configuration reference lists those that are"))
        elif item["type"] != _DANGLING:
            found.append((path, item["msg"].replace("Input should be", "must be")))
    return found


def _hidden_policies(tree: dict[str, Any], error: ValidationError) -> list[Mistake]:
    """Limits that do not fit together, of tiers that have other mistakes too: pydantic stops at those."""
    found: list[Mistake] = []
    places = {item["loc"][:2] for item in error.errors() if item["loc"][:1] in {("tiers",), ("teams",)}}
    for section, name in (place for place in places if len(place) == 2):
        terms = _named(tree, str(section)).get(name)
        for fields in (LIMITS, SHADOW):
            limits = {field: terms[field] for field in fields if field in terms} if isinstance(terms, dict) else {}
            try:
                (FileTier if section == "tiers" else FileTeam).model_validate(limits)
            except ValidationError as of_limits:
                found += [(f"{section}.{name}.{path}", said) for path, said in _mistakes(of_limits)]
    return found


def _dangling(tree: Mapping[str, Any]) -> list[Mistake]:
    """Names that are used and not there; `tree` may be of any shape."""
    backends, models, tiers = (_named(tree, section) for section in ("backends", "models", "tiers"))
    found = [
        (f"models.{name}.{route}.{position}.backend", f"there is no backend {target['backend']!r}")
        for name, model in models.items()
        for route in ("primary", "overflow")
        for position, target in enumerate(_listed(model, route))
        if isinstance(target, dict) and isinstance(target.get("backend"), str) and target["backend"] not in backends
    ]
    for pair in _named(tree, "prices"):
        model, _, backend = str(pair).partition("@")
        if model not in models or backend not in backends:
            found.append((f"prices.{pair}", "must be model@backend of this file"))
    for position, key in enumerate(_listed(tree, "keys")):
        tier = key.get("tier") if isinstance(key, dict) else None
        if isinstance(tier, str) and tier not in {*tiers, "standard"}:
            found.append((f"keys.{position}.tier", f"there is no tier {tier!r}"))
    return found


def _named(tree: Mapping[str, Any], section: str) -> dict[Any, Any]:
    value = tree.get(section)
    return value if isinstance(value, dict) else {}


def _listed(tree: object, name: str) -> list[Any] | tuple[Any, ...]:
    value = tree.get(name) if isinstance(tree, dict) else None
    return value if isinstance(value, list | tuple) else []


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([(str(path), f"cannot be read: {error.strerror}")]) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([(str(path), f"is not YAML: {' '.join(str(error).split())}")]) from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError([(str(path), "must be a mapping of sections (listen:, backends:, models: …)")])
    return {name: section for name, section in tree.items() if section is not None}


def _overlay(tree: dict[str, Any], environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """WEIR_SECTION__NAME=value sets tree[section][name]; values are YAML, names match in any case."""
    mistakes = []
    for variable in sorted(environ):
        if not variable.startswith("WEIR_") or "__" not in variable:
            continue
        node, steps = tree, variable.removeprefix("WEIR_").split("__")
        try:
            for step in steps[:-1]:
                node = node.setdefault(_spelt(node, step), {})
            node[_spelt(node, steps[-1])] = yaml.safe_load(environ[variable])
        except (AttributeError, TypeError):
            mistakes.append((variable, "names a value inside something that has no named values"))
        except yaml.YAMLError:
            mistakes.append((variable, "is not a YAML value; put text in quotes"))
    return mistakes


def _spelt(node: Mapping[str, Any], step: str) -> str:
    return next((name for name in node if isinstance(name, str) and name.lower() == step.lower()), step.lower())


def _path(loc: tuple[int | str, ...]) -> str:
    return ".".join(str(step) for step in loc) or "(file)"
