"""Answers in the shape of /v1/messages, byte for byte as vLLM 0.32.0 writes them. Pure."""

from __future__ import annotations

from engine_adapter.simulator.calls import Prompt, dumps
from engine_adapter.simulator.wire import LAST_CHUNK, Words, named_event

_STOP_REASONS = {"length": "max_tokens", "abort": "end_turn"}


class MessagesWire(Words):
    end = LAST_CHUNK

    def opening(self, choice: int) -> bytes:
        return self._start() + _event("content_block_start", content_block={"type": "text", "text": ""}, index=0)

    def token(self, choice: int, made: int, finish: str | None) -> bytes:
        text = self._text_of(choice, made)
        return _event("content_block_delta", delta={"type": "text_delta", "text": text}, index=0)

    def closing(self, made: int, finish: str) -> bytes:
        """An answer that was given up before its first token says that it ended of itself."""
        before = _event("content_block_stop", index=0) if made else self._start()
        delta = {"stop_reason": _STOP_REASONS[finish], "stop_sequence": None}
        return before + _event("message_delta", delta=delta, usage=self._counted(made)) + _event("message_stop")

    def whole(self, made: int, finish: str) -> bytes:
        content = [{"type": "text", "text": self._text(0, made)}]
        return dumps(
            {
                "id": self._name,
                "type": "message",
                "role": "assistant",
                "content": content,
                "model": self._model,
                "stop_reason": _STOP_REASONS[finish],
                "usage": self._counted(made),
            }
        )

    def broken(self, message: str) -> bytes:
        """vLLM stumbles over its own engine's words here."""
        return _event("error", error={"type": "internal_error", "message": message}) + self.end

    def _start(self) -> bytes:
        message: dict[str, object] = {
            "id": self._name,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._model,
        }
        message |= {"stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": self.call.prompt_tokens, "output_tokens": 0}
        return _event("message_start", message={**message, "usage": usage if self._usage else None})

    def _counted(self, made: int) -> dict[str, int] | None:
        if not self._usage:
            return None
        usage = {"input_tokens": self.call.prompt_tokens, "output_tokens": made}
        return usage | {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0} if made else usage

    def _text_of(self, choice: int, made: int) -> str:
        return self._text(choice, made)[len(self._text(choice, made - 1)) :]


def counted_tokens(prompt: Prompt) -> bytes:
    return dumps({"input_tokens": prompt.size, "context_management": {"original_input_tokens": prompt.size}})


def _event(kind: str, **members: object) -> bytes:
    return named_event(kind.encode(), dumps({"type": kind, **members}))
