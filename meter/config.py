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
        if missing := list(self._dangling()):
            raise PydanticCustomError("names", "{reason}", {"reason": "; ".join(missing)})
        return self

    def _dangling(self) -> list[str]:
        found = []
        for name, model in self.models.items():
            for route in ("primary", "overflow"):
                found += [
                    f"models.{name}.{route}.{position}.backend: there is no backend {target.backend!r}"
                    for position, target in enumerate(getattr(model, route))
                    if target.backend not in self.backends
                ]
        for pair in self.prices:
            model_name, _, backend = pair.partition("@")
            if model_name not in self.models or backend not in self.backends:
                found.append(f"prices.{pair}: must be model@backend of this file")
        found += [
            f"keys.{position}.tier: there is no tier {key.tier!r}"
            for position, key in enumerate(self.keys)
            if key.tier not in self.tiers and key.tier != "standard"
        ]
        return found


def load(path: Path | None, environ: Mapping[str, str] = os.environ) -> Config:
    """Reads the file (None: nothing but defaults), lays the environment over it, validates. Raises ConfigError."""
    tree = _read(path) if path is not None else {}
    mistakes = _overlay(tree, environ)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        mistakes += [(_path(item["loc"]), item["msg"]) for item in error.errors()]
    if mistakes:
        raise ConfigError(mistakes)
    return config


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
    return tree


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
