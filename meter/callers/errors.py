"""Why an edit did not happen, named by what its author may do now. Every message is a plain sentence; none has a secret."""

from __future__ import annotations

from pydantic import ValidationError

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


def mistakes_in(error: ValidationError, prefix: str = "") -> list[Mistake]:
    """Every mistake pydantic found (at most 100), with its field's path in the body."""
    found: list[Mistake] = []
    for item in error.errors(include_url=False, include_input=False)[:100]:
        path = [prefix] * bool(prefix) + [str(step)[:100] for step in item["loc"]]
        if item["type"] == "policy":
            found += [(".".join([*path, field]), reason) for field, reason in item["ctx"]["problems"]]
        else:
            found.append((".".join(path), _reason(item["type"], item["msg"])))
    return found


def _reason(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "is not a field here; see the list of fields in the documentation"
    return message.removeprefix("Value error, ")
