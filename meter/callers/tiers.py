"""A tier's terms: its quota policy and what else a caller on it may do. Also a key's override, which is a part of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from quotas.policy import MAX_SECONDS, MAX_TOKENS, Limit, Policy, problems


def _whole(value: object) -> object:
    """100.0 is 100; true, "100" and 1.5 are not whole numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole), Field(strict=True)]
Tokens = Annotated[Whole, Field(ge=0, le=MAX_TOKENS)]
Seconds = Annotated[Whole, Field(ge=1, le=MAX_SECONDS)]
Count = Annotated[Whole, Field(ge=1, le=MAX_TOKENS)]


class Terms(BaseModel):
    """What all bodies of configuration and REST share: unknown fields are mistakes, values cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LimitTerms(Terms):
    tokens: Tokens
    seconds: Seconds

    @property
    def limit(self) -> Limit:
        return Limit(self.tokens, self.seconds)


class ScopeTerms(Terms):
    """The four limits of a scope. In a team an absent one is unlimited."""

    rate: LimitTerms | None = None
    burst: LimitTerms | None = None
    cap: LimitTerms | None = None
    max_parallel: Annotated[Whole, Field(ge=0, le=MAX_TOKENS)] | None = None

    @property
    def policy(self) -> Policy:
        rate, burst, cap = (terms.limit if terms else None for terms in (self.rate, self.burst, self.cap))
        return Policy(rate, burst, cap, self.max_parallel)

    def _problems(self) -> list[tuple[str, str]]:
        """Everything that makes no sense, as (field, what would be right)."""
        return problems(self.policy)

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if found := self._problems():
            raise PydanticCustomError(
                "policy",
                "{reason}",
                {"reason": "; ".join(f"{field}: {reason}" for field, reason in found), "problems": found},
            )
        return self


class ShadowTerms(Terms):
    """Limits that are evaluated and counted, never enforced. An absent one is not asked about; whether they make sense
    is judged with the tier that carries them."""

    rate: LimitTerms | None = None
    burst: LimitTerms | None = None
    cap: LimitTerms | None = None

    @property
    def policy(self) -> Policy:
        rate, burst, cap = (terms.limit if terms else None for terms in (self.rate, self.burst, self.cap))
        return Policy(rate, burst, cap, max_parallel=None)


class Tier(ScopeTerms):
    """All terms of a tier; an absent field is the product's default. `null` is unlimited (`burst: null`: no burst)."""

    rate: LimitTerms | None = LimitTerms(tokens=2_000, seconds=60)
    burst: LimitTerms | None = LimitTerms(tokens=4_000, seconds=5)
    cap: LimitTerms | None = LimitTerms(tokens=50_000, seconds=3_600)
    max_parallel: Annotated[Whole, Field(ge=0, le=MAX_TOKENS)] | None = 8
    max_output_tokens: Count | None = 1_024
    default_output_tokens: Count | None = 512
    min_output_tokens: Count = 16
    max_n: Count | None = 4
    on_overage: Literal["overflow", "reject"] = "overflow"
    on_cap: Literal["clamp", "refuse"] = "clamp"
    on_outage: Literal["overflow", "reject"] = "overflow"
    on_hangup: Literal["abort", "drain"] = "abort"
    on_break: Literal["error", "continue"] = "error"
    priority: Annotated[Whole, Field(ge=-(2**31), lt=2**31)] = 0
    shadow: ShadowTerms | None = None
    models: tuple[Annotated[str, Field(min_length=1)], ...] | None = None

    def _problems(self) -> list[tuple[str, str]]:
        of_shadow = problems(self.shadow.policy) if self.shadow else []
        return super()._problems() + [(f"shadow.{field}", reason) for field, reason in of_shadow]


class Override(Tier):
    """The part of a tier's terms that one key has of its own. Whether they make sense shows only in `merged`."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        return self


def given(terms: ScopeTerms) -> dict[str, Any]:
    """The fields that were said, as they are stored; the rest stays open to the tier's or the product's defaults."""
    return terms.model_dump(mode="json", exclude_unset=True, exclude={"managed_by"})


def merged(tier: Mapping[str, Any], override: Mapping[str, Any]) -> Tier:
    """The terms in force for a key: the tier's given fields, then the override's. ValidationError if they do not fit."""
    return Tier.model_validate({**tier, **override})
