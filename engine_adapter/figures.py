"""The figures that engines report, in the names of each dialect, and when they are believed.

Chat and completions say `prompt_tokens` and `completion_tokens` (https://platform.openai.com/docs/api-reference/chat),
responses and messages `input_tokens` and `output_tokens` (https://docs.anthropic.com/en/api/messages).
"""

from __future__ import annotations

from typing import Final

import msgspec

from engine_adapter.usage import Usage, UsageSource

LARGEST: Final = 10**15
"""More tokens in one answer are not believed: no engine makes them, and sums of what is believed must stay exact in a
double, as every JSON reader has them (below 2**53: RFC 8259, section 6)."""


class Details(msgspec.Struct):
    """Parts of a figure, already counted in it."""

    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class Figures(msgspec.Struct):
    """The `usage` object. Its total is not read where its parts are there: at times it is absent or wrong."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None
    completion_tokens_details: Details | None = None

    def valid(self) -> bool:
        """Both figures are there and can be true."""
        prompt, completion = self.prompt_tokens, self.completion_tokens
        if prompt is None or completion is None or prompt < 0 or completion < 0:
            return False
        return prompt + completion <= LARGEST

    def usage(self, source: UsageSource = "engine") -> Usage:
        """Valid figures as Usage. A part that cannot be true (negative, more than its whole) counts as 0."""
        prompt, completion = self.prompt_tokens or 0, self.completion_tokens or 0
        cached = reasoning = 0
        if (details := self.prompt_tokens_details) is not None:
            cached = _part(details.cached_tokens, prompt)
        if (details := self.completion_tokens_details) is not None:
            reasoning = _part(details.reasoning_tokens, completion)
        return Usage(prompt, cached, completion, reasoning, source)


class ReadingFigures(msgspec.Struct):
    """The `usage` of endpoints that only read: embeddings, score, rerank (at times nothing but a total)."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: Details | None = None

    def figures(self) -> Figures:
        prompt = self.total_tokens if self.prompt_tokens is None else self.prompt_tokens
        return Figures(prompt, self.completion_tokens or 0, self.prompt_tokens_details)


class InputFigures(msgspec.Struct):
    """The `usage` object of responses, and of messages, whose input is the sum of three figures: what was read from the
    cache or written to it is not in `input_tokens`."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: Details | None = None
    output_tokens_details: Details | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None

    def after(self, earlier: InputFigures) -> InputFigures:
        """Figures that are not said again stay in force."""
        said = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return msgspec.structs.replace(earlier, **said)

    def figures(self) -> Figures:
        """In the names of chat."""
        return Figures(
            self._input(),
            self.output_tokens,
            self.input_tokens_details or Details(self.cache_read_input_tokens),
            self.output_tokens_details,
        )

    def _input(self) -> int | None:
        """Below zero, and so not believed, if a part of it is."""
        if self.input_tokens is None:
            return None
        parts = (self.input_tokens, self.cache_creation_input_tokens or 0, self.cache_read_input_tokens or 0)
        return sum(parts) if min(parts) >= 0 else -1


def _part(part: int | None, whole: int) -> int:
    return part if part is not None and 0 <= part <= whole else 0
