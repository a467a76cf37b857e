"""Why an edit did not happen, named by what its author may do now. Every message is a plain sentence; none has a secret."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ValidationError

Mistake = tuple[str, str]
"""(field, what would be right)"""


class NotFound(Exception):
    """There is nothing of that name or id."""


class Conflict(Exception):
    """The name is taken, or the thing is in use."""


class Stale(Exception):
    """Somebody was faster: read it again, then decide again."""


class ReadOnly(Exception):
    """The configuration file rules this entry."""


class Invalid(Exception):
    """What was given makes no sense; `mistakes` lists everything that is wrong."""

    def __init__(self, mistakes: list[Mistake]) -> None:
        super().__init__("; ".join(f"{field}: {reason}" if field else reason for field, reason in mistakes))
        self.mistakes = mistakes


def mistakes_in(error: ValidationError, prefix: str = "", model: type[BaseModel] | None = None) -> list[Mistake]:
    """Every mistake pydantic found (at most 100), with its field's path in the body; `model`: what was to be read."""
    found: list[Mistake] = []
    for item in error.errors(include_url=False, include_input=False)[:100]:
        path = [prefix] * bool(prefix) + [str(step)[:100] for step in item["loc"]]
        if item["type"] == "policy":
            found += [(".".join([*path, field]), reason) for field, reason in item["ctx"]["problems"]]
        elif item["type"] == "extra_forbidden":
            found.append((".".join(path), f"is not a field here{_which_are(model, item['loc'][:-1])}"))
        else:
            found.append((".".join(path), item["msg"].removeprefix("Value error, ")))
    return found


def _which_are(model: type[BaseModel] | None, path: tuple[int | str, ...]) -> str:
    """The fields that there are, at this place in a body."""
    for step in path:
        model = _model_in(model.model_fields[step].annotation) if model and step in model.model_fields else None
    if model is None:
        return ""
    return "; there are: " + ", ".join(field.alias or name for name, field in model.model_fields.items())


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model among the types that a field may have."""
    kinds = [annotation, *get_args(annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
