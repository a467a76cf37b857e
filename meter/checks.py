"""`weir check`: reaches everything the configuration names, and says one line of each. What of it can be seen without
asking anybody stops `serve` too, before it opens anything."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Awaitable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine_adapter import exact_size
from engine_adapter.errors import EngineBroke, EngineUnavailable
from engine_adapter.http1 import Workers
from meter.app import Sites, quota_store
from meter.config import AdminTerms, AdminToken, BackendTerms, Config, HealthTerms, ListenTerms, Mistake, TlsTerms
from meter.gateway.fleet import Fleet
from meter.ledger.database import DatabaseUnavailable, open_engine, schema_current
from quotas.store import StoreUnavailable

PATIENCE = 5.0
"""Seconds for each answer."""

NO_MODELS = "none is configured: add backends: and models: to the file, or try `weir demo`"


@dataclass(frozen=True, slots=True)
class Result:
    what: str
    good: bool
    said: str


async def run(config: Config) -> list[Result]:
    """Everything at once."""
    workers = Workers()
    asked: list[Awaitable[Result]] = [_backend(workers, name, config) for name in config.backends]
    asked += [
        _store(config),
        _database(config),
        *(asyncio.to_thread(_tokenizer, *used) for used in _tokenizers(config)),
    ]
    try:
        found = await asyncio.gather(*asked)
    finally:
        await workers.close()
    return [*_seen(config), *_admin(config.admin), *found]


# ---- what can be seen from here --------------------------------------------------------------------------------------


def hindrances(config: Config, sites: Sites) -> list[Mistake]:
    """What keeps `serve` from starting although the configuration is well formed."""
    found = [*_journal(config.ledger.journal_dir)]
    if sites != "admin":
        found += [*_models(config), *_tls(config.listen.tls)]
    for secret in _secrets(config, sites):
        found += secret.unreadable()
    return found


def empty_secrets(config: Config, sites: Sites) -> list[Mistake]:
    """Secrets that are named and hold nothing: `serve` goes on without them."""
    return [mistake for secret in _secrets(config, sites) for mistake in secret.empty()]


@dataclass(frozen=True, slots=True)
class _Secret:
    """By its place in the configuration, without the ending _env or _file."""

    place: str
    env: str | None
    file: Path | None
    without: str

    def unreadable(self) -> Iterator[Mistake]:
        if self.env is None and self.file is not None:
            yield from _unreadable(f"{self.place}_file", self.file)

    def empty(self) -> Iterator[Mistake]:
        if self.env is not None and not os.environ.get(self.env):
            yield f"{self.place}_env", f"the variable {self.env} is not set or empty: {self.without}"
        elif (
            self.env is None
            and self.file is not None
            and not any(self.unreadable())
            and not self.file.read_text().strip()
        ):
            yield f"{self.place}_file", f"{self.file} is empty: {self.without}"

    def trouble(self) -> str | None:
        return "; ".join(f"{where}: {reason}" for where, reason in (*self.unreadable(), *self.empty())) or None


def _secrets(config: Config, sites: Sites) -> Iterator[_Secret]:
    if sites != "admin":
        yield from (_api_key(name, terms) for name, terms in config.backends.items())
    if sites != "traffic":
        yield from (_token(position, token) for position, token in enumerate(config.admin.tokens))


def _api_key(name: str, terms: BackendTerms) -> _Secret:
    return _Secret(f"backends.{name}.api_key", terms.api_key_env, terms.api_key_file, "it is asked without a key")


def _token(position: int, token: AdminToken) -> _Secret:
    place = f"admin.tokens.{position}.token"
    return _Secret(place, token.token_env, token.token_file, f"the token {token.name!r} opens nothing")


def _unreadable(place: str, file: Path) -> Iterator[Mistake]:
    try:
        file.read_text(encoding="utf-8")
    except OSError as error:
        yield place, f"{file} cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        yield place, f"{file} is not text in UTF-8"


def _tls(terms: TlsTerms | None) -> Iterator[Mistake]:
    if terms is None:
        return
    named = (("listen.tls.cert_file", terms.cert_file), ("listen.tls.key_file", terms.key_file))
    if found := [mistake for place, file in named for mistake in _unreadable(place, file)]:
        yield from found
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            terms.cert_file, terms.key_file, password=""
        )
    except (ssl.SSLError, ValueError) as error:
        files = f"{terms.cert_file} and {terms.key_file}"
        reason = getattr(error, "reason", None) or error
        yield "listen.tls", f"{files} are not a certificate and its own, unencrypted key in PEM ({reason})"


def _models(config: Config) -> Iterator[Mistake]:
    if not config.models:
        yield "models", NO_MODELS


def _journal(directory: Path) -> Iterator[Mistake]:
    """The directory is made when it is not there: what counts is the nearest one above it."""
    place = directory.absolute()
    nearest = next(path for path in (place, *place.parents) if os.access(path, os.F_OK))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        yield "ledger.journal_dir", f"{nearest} is no directory that can be written"


def _seen(config: Config) -> list[Result]:
    tls = [_result("TLS", _tls(config.listen.tls), "certificate and key fit")] if config.listen.tls else []
    models = Result("models", bool(config.models), ", ".join(config.models) or NO_MODELS)
    return [*tls, models, _result("journal", _journal(config.ledger.journal_dir), str(config.ledger.journal_dir))]


def _result(what: str, mistakes: Iterable[Mistake], otherwise: str) -> Result:
    said = "; ".join(f"{where}: {reason}" for where, reason in mistakes)
    return Result(what, not said, said or otherwise)


def _admin(terms: AdminTerms) -> list[Result]:
    if not terms.tokens:
        return [Result("admin tokens", True, "none: the admin REST is closed to everybody")]
    return [_admin_token(position, token) for position, token in enumerate(terms.tokens)]


def _admin_token(position: int, token: AdminToken) -> Result:
    trouble = _token(position, token).trouble()
    return Result(f"admin token {token.name}", trouble is None, trouble or f"is set ({token.role})")


# ---- where a site cannot listen --------------------------------------------------------------------------------------


def unbindable(config: Config, sites: Sites) -> str | None:
    """Which site cannot listen where the configuration says. Asked once listening failed: the system's error names
    neither the site nor, for some reasons, the address."""
    for section, terms in _listening(config, sites):
        try:
            _bind(terms.host, terms.port)
        except OSError as error:
            return _unbound(section, terms.host, terms.port, error)
    return None


def _listening(config: Config, sites: Sites) -> Iterator[tuple[str, ListenTerms | HealthTerms | AdminTerms]]:
    yield "health", config.health
    if sites != "admin":
        yield "listen", config.listen
    if sites != "traffic":
        yield "admin", config.admin


def _bind(host: str, port: int) -> None:
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)


def _unbound(section: str, host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{section}.port: {host}:{port} is in use. Stop what listens there, or choose another port."
    if error.errno == errno.EACCES:
        return f"{section}.port: {host}:{port} is not allowed to this user. Choose a port above 1023."
    return f"{section}.host: {host} is no address to listen on: {error.strerror}."


# ---- what has to be asked --------------------------------------------------------------------------------------------


async def _backend(workers: Workers, name: str, config: Config) -> Result:
    what, terms = f"backend {name}", config.backends[name]
    if (trouble := _api_key(name, terms).trouble()) is not None:
        return Result(what, False, trouble)
    backend = Fleet.of(Config(backends={name: terms})).backends[name]
    try:
        async with await workers.open(
            backend.origin,
            method=b"GET",
            path="/v1/models",
            headers=backend.headers,
            body=b"",
            connect_seconds=terms.connect_seconds,
            head_seconds=PATIENCE,
        ) as answer:
            body = await answer.read_all(PATIENCE, 16 * 1024 * 1024)
    except (EngineUnavailable, EngineBroke, TimeoutError) as error:
        return Result(what, False, f"{error} ({terms.url})")
    if answer.status in (401, 403):
        return Result(what, False, f"refused our key ({answer.status}): set api_key_env or api_key_file")
    if answer.status != 200:
        return Result(what, False, f"GET /v1/models answered {answer.status}")
    return _serves(what, _wanted(name, config), body)


def _wanted(backend: str, config: Config) -> set[str]:
    targets = (target for model in config.models.values() for target in (*model.primary, *model.overflow))
    return {target.model for target in targets if target.backend == backend}


def _serves(what: str, wanted: set[str], body: bytes) -> Result:
    try:
        listed = {item["id"] for item in msgspec.json.decode(body)["data"]}
    except (msgspec.DecodeError, KeyError, TypeError):
        return Result(what, False, "GET /v1/models answered something that lists no models")
    if missing := sorted(wanted - listed):
        return Result(what, False, f"does not serve {', '.join(missing)}; it lists {', '.join(sorted(listed))}")
    return Result(what, True, f"serves {', '.join(sorted(wanted)) or 'no configured model'}")


async def _store(config: Config) -> Result:
    try:
        store = quota_store(config.quota_store, lambda _: None)
    except (ValueError, TypeError) as error:
        return Result("quota store", False, f"quota_store.url: {error}")
    try:
        await store.ping()
    except StoreUnavailable as error:
        return Result("quota store", False, f"{error}; see quota_store.url and timeout_ms")
    finally:
        await store.close()
    return Result("quota store", True, "answers")


async def _database(config: Config) -> Result:
    try:
        engine = open_engine(config.ledger.url)
    except DatabaseUnavailable as error:
        return Result("database", False, str(error))
    try:
        current = await asyncio.wait_for(schema_current(engine), PATIENCE)
    except (DatabaseUnavailable, TimeoutError) as error:
        return Result("database", False, str(error) or "does not answer; see ledger.url")
    finally:
        await engine.dispose()
    if not current and engine.dialect.name == "sqlite":
        return Result("database", True, "can be opened; `weir serve` brings its schema up to date")
    if not current:
        return Result("database", False, "its schema is not the newest: run `weir migrate`")
    return Result("database", True, "answers, its schema is the newest")


def _tokenizers(config: Config) -> Iterator[tuple[str, str]]:
    """(model, tokenizer) of each that counts in this process."""
    return (
        (name, model.tokenizer) for name, model in config.models.items() if model.tokenizer not in ("bytes", "engine")
    )


def _tokenizer(model: str, spec: str) -> Result:
    try:
        exact_size.tokenizer(spec)
    except exact_size.TokenizerUnavailable as error:
        return Result(f"tokenizer of {model}", False, f"models.{model}.tokenizer: {error}")
    return Result(f"tokenizer of {model}", True, spec)
