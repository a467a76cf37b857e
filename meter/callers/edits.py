"""What may be asked of the registry: the bodies of REST, the options of the command line. Typed, every mistake found."""

from __future__ import annotations

import unicodedata
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from meter.callers.errors import Invalid, mistakes_in
from meter.callers.tiers import Override, Terms, Whole

Body = TypeVar("Body", bound=Terms)

LONGEST_GRACE_SECONDS = 30 * 86_400


def _printable(text: str) -> str:
    if any(unicodedata.category(char) == "Cc" for char in text):
        raise PydanticCustomError("text", "must not have control characters")
    return text


def _written_out(value: object) -> object:
    """A moment is text with a day and a time: a bare number could be anything."""
    if isinstance(value, datetime) or (isinstance(value, str) and "-" in value[1:]):
        return value
    raise PydanticCustomError("moment", "must be a moment such as 2030-01-31T12:00:00Z")


def _in_utc(moment: datetime) -> datetime:
    if not 1970 < moment.year < 9999:
        raise PydanticCustomError("moment", "must lie between the years 1971 and 9998")
    return moment.astimezone(UTC)


def _nano(dollars: float) -> float:
    if 0 < dollars < 1e-9:
        raise PydanticCustomError("price", "must be 0, or at least 0.000000001 (a nano-dollar per million tokens)")
    return dollars


KeyName = Annotated[str, Field(min_length=1, max_length=300), AfterValidator(_printable)]
Reference = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_printable)]
"""The name of a tier, team, model or backend."""
Models = Annotated[tuple[Reference, ...], Field(max_length=1_000)]
TagName = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_printable)]
TagValue = Annotated[str, Field(max_length=256), AfterValidator(_printable)]
Tags = Annotated[dict[TagName, TagValue], Field(max_length=32)]
Moment = Annotated[AwareDatetime, AfterValidator(_in_utc), BeforeValidator(_written_out)]
Dollars = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False, strict=True), AfterValidator(_nano)]


class KeyDraft(Terms):
    """A key to be made. `models` None: what the tier allows; `policy`: the terms in which it differs from the tier."""

    name: KeyName
    tier: Reference = "standard"
    team: Reference | None = None
    models: Models | None = None
    tags: Tags = {}
    expires_at: Moment | None = None
    policy: Override = Override()


class KeyPatch(Terms):
    """Changes to a key; what is absent stays as it is. The defaults here are never used."""

    name: KeyName = ""
    state: Literal["active", "disabled"] = "active"
    tier: Reference = ""
    team: Reference | None = None
    models: Models | None = None
    tags: Tags = {}
    expires_at: Moment | None = None

    def changes(self) -> dict[str, Any]:
        """Columns of `api_key` and their new values."""
        said = self.model_dump(exclude_unset=True)
        if said.get("models") is not None:
            said["models"] = list(said["models"])
        if "state" in said:
            said["disabled"] = said.pop("state") == "disabled"
        return said


class Rotation(Terms):
    """A new secret; the old one opens for another `grace_seconds` (0: it is dead at once)."""

    grace_seconds: Annotated[Whole, Field(ge=0, le=LONGEST_GRACE_SECONDS)] = 0


class PriceDraft(Terms):
    """US dollars per million tokens, in force from `effective_from` (absent: now) until a later price takes over."""

    model: Reference
    backend: Reference
    prompt: Dollars
    completion: Dollars
    cached_prompt: Dollars | None = None
    effective_from: Moment | None = None


def read(model: type[Body], values: object) -> Body:
    """`values` as the model has it; raises Invalid with every mistake."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise Invalid(mistakes_in(error, model=model)) from None
