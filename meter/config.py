"""File and environment into typed values; all mistakes are reported together, each with its path in the file."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from engine_adapter.http1 import Origin
from meter.callers.tiers import LimitTerms, ScopeTerms, Terms, Tier, Whole
from quotas import nodes

NAME = r"^[^\s@\x00-\x1f]+$"
TOKENIZER = r"^(bytes|engine|tiktoken:.+|file:.+)$"
KEY_ID = r"^[A-Za-z0-9]{4,64}$"
SHA256 = r"^[0-9a-f]{64}$"

Port = Annotated[Whole, Field(ge=0, le=65_535)]
Positive = Annotated[float, Field(gt=0, le=86_400)]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=NAME)]


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
        if _scheme(url) != "memory":
            try:
                nodes.parse(url)
            except ValueError as mistake:
                raise PydanticCustomError("url", "{mistake}", {"mistake": str(mistake)}) from mistake
        return url

    @field_validator("local_share", mode="wrap")
    @classmethod
    def _share(cls, value: object, judged: ValidatorFunctionWrapHandler) -> object:
        try:
            return judged(value)
        except ValidationError as error:
            raise PydanticCustomError("share", "must be auto, or a number above 0 and up to 1") from error


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
        if _scheme(url) not in {"sqlite+aiosqlite", "postgresql+asyncpg"}:
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
        if not _is_address(url):
            raise PydanticCustomError("url", "must be http://host:port or https://host:port, with a path prefix if any")
        return url.rstrip("/")


def _scheme(url: str) -> str:
    """Of a URL whose host and port are ones; otherwise ""."""
    try:
        parts = urlsplit(url)
        return parts.scheme if parts.port != 0 else ""
    except ValueError:
        return ""


def _is_address(url: str) -> bool:
    """Whether a backend can be asked there."""
    try:
        Origin.parse(url)
        parts = urlsplit(url)
        return not (parts.query or parts.fragment or parts.username)
    except ValueError:
        return False


class TargetTerms(Terms):
    """A model as one backend serves it: the model's name there, its context, a rate of its own (overflow only)."""

    backend: str
    model: Annotated[str, Field(min_length=1)]
    context_tokens: Annotated[Whole, Field(ge=1)] | None = None
    rate: LimitTerms | None = None


class ModelTerms(Terms):
    primary: Annotated[tuple[TargetTerms, ...], Field(min_length=1)]
    overflow: tuple[TargetTerms, ...] = ()
    tokenizer: Annotated[str, Field(pattern=TOKENIZER)] = "bytes"
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
    id: Annotated[str, Field(pattern=KEY_ID)]
    name: Annotated[str, Field(min_length=1, max_length=300)]
    tier: str
    team: str | None = None
    secret_sha256: Annotated[str, Field(pattern=SHA256)]


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
    def _fits_together(self) -> Self:
        if found := _misfits(self.model_dump()):
            reason = "; ".join(f"{path}: {said}" for path, said in found)
            raise PydanticCustomError(_MISFITS, "{reason}", {"reason": reason})
        return self


def load(path: Path | None, environ: Mapping[str, str] = os.environ) -> Config:
    """Reads the file (None: nothing but defaults), lays the environment over it, validates. Raises ConfigError."""
    tree, mistakes = _read(path) if path is not None else ({}, [])
    variables, unread = _overlay(tree, environ)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        found = _mistakes(error) + _hidden_policies(tree, error) + _misfits(tree)
        mistakes += [(where, reason + _origin(where, variables)) for where, reason in found]
    if mistakes or unread:
        raise ConfigError(list(dict.fromkeys(mistakes + unread)))
    return config


Mistake = tuple[str, str]
_MISFITS = "misfits"
LIMITS = ("rate", "burst", "cap", "max_parallel")
SHADOW = ("shadow",)


def _mistakes(error: ValidationError) -> list[Mistake]:
    found: list[Mistake] = []
    for item in error.errors(include_url=False):
        if item["type"] == "policy":
            found += [(_path((*item["loc"], field)), reason) for field, reason in item["ctx"]["problems"]]
        elif item["type"] != _MISFITS:
            found.append((_path(item["loc"]), _plain(item)))
    return found


_PLAIN = {
    "extra_forbidden": "is not a name here; the configuration reference lists those that are",
    "missing": "is required",
    "too_short": "must have at least one entry",
    "string_too_short": "must not be empty",
    "string_type": "must be text; put it in quotes if it looks like a number or a date",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping of names to values",
    "model_type": "must be a mapping of names to values",
    "path_type": "must be a path, as text",
    NAME: "must be a name without spaces and without @",
    TOKENIZER: "must be bytes, engine, tiktoken:<encoding> or file:<path>",
    KEY_ID: "must be 4 to 64 letters and digits",
    SHA256: "must be the secret's SHA-256 as 64 hexadecimal digits in lower case",
}
"""What would be right, by the kind of mistake, or by the pattern that was missed."""


def _plain(item: ErrorDetails) -> str:
    pattern = item.get("ctx", {}).get("pattern")
    return _PLAIN.get(pattern or item["type"]) or item["msg"].replace("Input should be", "must be")


def _origin(where: str, variables: Mapping[str, str]) -> str:
    """Which variables had a say in the value `where`; "" for what is the file's alone."""
    steps = where.split(".")
    named = [
        name for path, name in variables.items() if all(a == b for a, b in zip(path.split("."), steps, strict=False))
    ]
    return f" (set by {', '.join(named)})" if named else ""


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


def _misfits(tree: Mapping[str, Any]) -> list[Mistake]:
    """What is right alone and wrong beside the rest; `tree` may be of any shape."""
    return [*_dangling(tree), *_same_name(tree), *_same_address(tree)]


def _dangling(tree: Mapping[str, Any]) -> Iterator[Mistake]:
    """Names that are used and not there."""
    backends, models, tiers, teams = (_named(tree, section) for section in ("backends", "models", "tiers", "teams"))
    for name, model in models.items():
        for route in ("primary", "overflow"):
            for position, target in enumerate(_listed(model, route)):
                place = f"models.{name}.{route}.{position}.backend"
                yield from _unknown(place, "backend", _value(target, "backend"), backends)
    for name, tier in tiers.items():
        for position, model in enumerate(_listed(tier, "models")):
            yield from _unknown(f"tiers.{name}.models.{position}", "model", model, models)
    for pair in _named(tree, "prices"):
        model, _, backend = str(pair).partition("@")
        if model not in models or backend not in backends:
            yield f"prices.{pair}", "must be model@backend of this file"
    for position, key in enumerate(_listed(tree, "keys")):
        yield from _unknown(f"keys.{position}.tier", "tier", _value(key, "tier"), {*tiers, "standard"})
        yield from _unknown(f"keys.{position}.team", "team", _value(key, "team"), teams)


def _unknown(place: str, kind: str, name: object, known: Container[object]) -> Iterator[Mistake]:
    if isinstance(name, str) and name not in known:
        yield place, f"there is no {kind} {name!r} in this configuration"


def _same_name(tree: Mapping[str, Any]) -> Iterator[Mistake]:
    """The audit log knows who it was by the token's name."""
    seen: set[str] = set()
    for position, token in enumerate(_listed(tree.get("admin"), "tokens")):
        name = _value(token, "name")
        if isinstance(name, str) and name in seen:
            yield f"admin.tokens.{position}.name", f"there is another token {name!r}; each needs a name of its own"
        elif isinstance(name, str):
            seen.add(name)


SITES: Mapping[str, ListenTerms | HealthTerms | AdminTerms] = {
    "listen": ListenTerms(),
    "health": HealthTerms(),
    "admin": AdminTerms(),
}
"""The sections that say where a site listens, with their defaults."""


def _same_address(tree: Mapping[str, Any]) -> Iterator[Mistake]:
    for one, other in combinations(SITES, 2):
        (host, port), (other_host, other_port) = (_address(tree, section) for section in (one, other))
        if port == other_port and port != 0 and _same_host(host, other_host):
            yield f"{other}.port", f"{one}.port is {port} on the same address; each site needs a port of its own"


def _address(tree: Mapping[str, Any], section: str) -> tuple[str, object]:
    default, said = SITES[section], _named(tree, section)
    return str(said.get("host", default.host)), said.get("port", default.port)


def _same_host(one: str, other: str) -> bool:
    """Whether one port cannot be had on both: 0.0.0.0 is every IPv4 address, :: every IPv6 address."""
    one, other = ("127.0.0.1" if host == "localhost" else host for host in (one, other))
    every = "::" if ":" in one else "0.0.0.0"  # noqa: S104  compared, not listened on
    return one == other or ((":" in one) == (":" in other) and every in (one, other))


def _value(terms: object, name: str) -> object:
    return terms.get(name) if isinstance(terms, dict) else None


def _named(tree: Mapping[str, Any], section: str) -> dict[Any, Any]:
    value = tree.get(section)
    return value if isinstance(value, dict) else {}


def _listed(tree: object, name: str) -> list[Any] | tuple[Any, ...]:
    value = tree.get(name) if isinstance(tree, dict) else None
    return value if isinstance(value, list | tuple) else []


class _Loader(yaml.SafeLoader):
    """Notes names that stand twice in one mapping: YAML 1.2.2 (3.2.1.1) wants them unique, PyYAML takes the last."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.doubled: list[tuple[int, str]] = []

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    self.doubled.append((key.start_mark.line + 1, key.value))
                seen.add((key.tag, key.value))
        return node


def _parsed(text: str) -> tuple[Any, list[tuple[int, str]]]:
    """The value, and each (line, name) that stands a second time in its mapping. YAMLError, ValueError (a 13th month)."""
    loader = _Loader(text)
    try:
        return loader.get_single_data(), loader.doubled
    finally:
        loader.dispose()


def _read(path: Path) -> tuple[dict[str, Any], list[Mistake]]:
    try:
        tree, doubled = _parsed(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([(str(path), f"cannot be read: {error.strerror}")]) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError([(str(path), f"is not YAML: {' '.join(str(error).split())}")]) from error
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError([(str(path), "must be a mapping of sections (listen:, backends:, models: …)")])
    mistakes = [(f"{path}, line {line}", f"{name!r} stands there a second time; keep one") for line, name in doubled]
    return {name: section for name, section in (tree or {}).items() if section is not None}, mistakes


def _overlay(tree: dict[str, Any], environ: Mapping[str, str]) -> tuple[dict[str, str], list[Mistake]]:
    """WEIR_SECTION__NAME=value sets tree[section][name]; values are YAML, names match in any case.

    Gives the variables by the path of the value they set, and what is wrong with those that set none.
    """
    variables: dict[str, str] = {}
    mistakes: list[Mistake] = []
    for variable in sorted(environ):
        if not variable.startswith("WEIR_") or "__" not in variable:
            continue
        try:
            value, doubled = _parsed(environ[variable])
            if doubled:
                mistakes.append((variable, f"names {doubled[0][1]!r} twice; keep one"))
            variables[_path(_put(tree, variable.removeprefix("WEIR_").split("__"), value))] = variable
        except (AttributeError, TypeError):
            mistakes.append((variable, "names a value inside something that has no named values"))
        except (yaml.YAMLError, ValueError):
            mistakes.append((variable, "is not a YAML value; put text in quotes"))
    return variables, mistakes


def _put(tree: dict[str, Any], steps: list[str], value: object) -> tuple[str, ...]:
    """Sets the value; gives the path as the file spells it. AttributeError, TypeError: there are no names there."""
    node, path = tree, []
    for step in steps[:-1]:
        path.append(_spelt(node, step))
        node = node.setdefault(path[-1], {})
    path.append(_spelt(node, steps[-1]))
    node[path[-1]] = value
    return tuple(path)


def _spelt(node: Mapping[str, Any], step: str) -> str:
    return next((name for name in node if isinstance(name, str) and name.lower() == step.lower()), step.lower())


def _path(loc: tuple[int | str, ...]) -> str:
    return ".".join(str(step) for step in loc if step != "[key]") or "(file)"
