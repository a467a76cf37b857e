"""The configured models and the backends that serve them, with what is known of each backend now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from engine_adapter.health import Fitness
from engine_adapter.http1 import Origin
from meter.config import BackendTerms, Config, ModelTerms, TargetTerms
from meter.gateway.capabilities import Capabilities
from quotas import store
from quotas.policy import Limit

OF_OPENAI = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"})
"""What a backend of kind openai serves of our endpoints. vLLM serves all of them, so a backend of kind vllm does."""

PACE_WEIGHT = 0.2
"""How much one answer moves a backend's recent speed."""


@dataclass(slots=True)
class Backend:
    """One worker URL. `pace`: recent tokens per second and answer, 0 before the first answer."""

    name: str
    terms: BackendTerms
    origin: Origin
    headers: list[tuple[bytes, bytes]]
    fitness: Fitness
    capabilities: Capabilities
    outstanding: int = 0
    pace: float = 0.0

    def learn_pace(self, tokens: int, seconds: float) -> None:
        if tokens > 0 and seconds > 0:
            seen = tokens / seconds
            self.pace = seen if not self.pace else self.pace + PACE_WEIGHT * (seen - self.pace)

    def __repr__(self) -> str:
        return (
            f"Backend({self.name}: {self.fitness!r}, {self.outstanding} tokens outstanding, {self.pace:.0f} tokens/s,"
            f" {self.capabilities!r})"
        )


@dataclass(frozen=True, slots=True)
class Target:
    """A model as one backend serves it."""

    backend: Backend
    model: str
    context: int | None
    rate: Limit | None

    @property
    def name(self) -> str:
        """Unique among a model's targets; names the target's own rate in the quota store."""
        return f"{self.backend.name}/{self.model}"

    def serves(self, path: str) -> bool:
        return self.backend.terms.kind == "vllm" or path in OF_OPENAI

    @property
    def as_overflow(self) -> store.Target:
        return store.Target(self.name, self.rate)


@dataclass(frozen=True, slots=True)
class Model:
    """A model by the name that callers use."""

    name: str
    primary: tuple[Target, ...]
    overflow: tuple[Target, ...]
    tokenizer: str
    expose_served_model: bool

    def at(self, path: str) -> Model:
        """The same with those targets alone that serve this endpoint."""
        if all(target.serves(path) for target in (*self.primary, *self.overflow)):
            return self
        primary, overflow = (
            tuple(target for target in route if target.serves(path)) for route in (self.primary, self.overflow)
        )
        return replace(self, primary=primary, overflow=overflow)


@dataclass(slots=True)
class Fleet:
    """All of it, as configured."""

    backends: dict[str, Backend]
    models: Mapping[str, Model] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config) -> Fleet:
        backends = {name: _backend(name, terms) for name, terms in config.backends.items()}
        return cls(backends, {name: _model(name, terms, backends) for name, terms in config.models.items()})


def _backend(name: str, terms: BackendTerms) -> Backend:
    headers = [(b"content-type", b"application/json")]
    if key := terms.api_key:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    return Backend(name, terms, Origin.parse(terms.url), headers, Fitness(), Capabilities(terms.kind))


def _model(name: str, terms: ModelTerms, backends: Mapping[str, Backend]) -> Model:
    def targets(route: tuple[TargetTerms, ...]) -> tuple[Target, ...]:
        return tuple(_target(item, backends) for item in route)

    return Model(name, targets(terms.primary), targets(terms.overflow), terms.tokenizer, terms.expose_served_model)


def _target(terms: TargetTerms, backends: Mapping[str, Backend]) -> Target:
    rate = terms.rate.limit if terms.rate else None
    return Target(backends[terms.backend], terms.model, terms.context_tokens, rate)
