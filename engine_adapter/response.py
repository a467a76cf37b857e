"""The response object of /v1/responses: a plain answer, and part of a stream's events.

Standard: https://platform.openai.com/docs/api-reference/responses/object.
"""

from __future__ import annotations

import msgspec

from engine_adapter.body import NULL
from engine_adapter.figures import Figures, InputFigures


class Incomplete(msgspec.Struct):
    reason: str | None = None


class Response(msgspec.Struct):
    model: str | None = None
    status: str | None = None
    incomplete_details: Incomplete | None = None
    usage: InputFigures | None = None
    output: msgspec.Raw = NULL
    error: msgspec.Raw = NULL

    def finish_reason(self) -> str | None:
        """What it lacks, or else its status. An engine that gave it up (vLLM on SIGTERM) says "cancelled", or that it is
        complete with nothing made: an empty reply costs a token."""
        if self.incomplete_details is not None and self.incomplete_details.reason:
            return self.incomplete_details.reason
        return "abort" if self.status == "cancelled" or self._is_void() else self.status

    def figures(self) -> Figures:
        return (self.usage or InputFigures()).figures()

    def _is_void(self) -> bool:
        made = self.usage.output_tokens if self.usage is not None else None
        return made == 0 and self.status == "completed" and bytes(self.output) in (b"[]", b"null")
