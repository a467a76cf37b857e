"""What an answer cost in tokens, and from where we know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UsageSource = Literal["engine", "counted", "estimated", "none"]
"""engine: its own final figures · counted: live figures or events of a stream that did not end · estimated: from text
seen · none: nothing was produced."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one exchange. `cached` ⊆ `prompt`, `reasoning` ⊆ `completion`; total = prompt + completion, always."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    source: UsageSource = "none"

    @property
    def total(self) -> int:
        return self.prompt + self.completion
