"""Answers in the shape of /v1/responses, byte for byte as vLLM 0.32.0 writes them. Pure."""

from __future__ import annotations

from typing import Any

from engine_adapter.simulator.calls import dumps
from engine_adapter.simulator.wire import LAST_CHUNK, Words, named_event

_METRICS = (
    "time_to_first_token_ms",
    "generation_time_ms",
    "queue_time_ms",
    "mean_itl_ms",
    "tokens_per_second",
    "speculative_decoding",
)


class ResponsesWire(Words):
    end = LAST_CHUNK

    def opening(self, choice: int) -> bytes:
        item = self._item("in_progress", [])
        part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        return self._start() + b"".join(
            (
                _event("response.output_item.added", 2, {"item": item, "output_index": 0}),
                _event("response.content_part.added", 3, {**self._place(), "part": part}),
            )
        )

    def token(self, choice: int, made: int, finish: str | None) -> bytes:
        text = self._text(choice, made)[len(self._text(choice, made - 1)) :]
        delta = {"content_index": 0, "delta": text, "item_id": self._item_id, "logprobs": [], "output_index": 0}
        return _event("response.output_text.delta", made + 3, delta)

    def closing(self, made: int, finish: str) -> bytes:
        text, at = self._text(0, made), made + 4
        said = {"content_index": 0, "item_id": self._item_id, "logprobs": [], "output_index": 0}
        part = self._part(text)
        done = (
            _said_text(at, said, text),
            _event("response.content_part.done", at + 1, {**self._place(), "part": part}),
            _event("response.output_item.done", at + 2, {"item": self._item("completed", [part]), "output_index": 0}),
        )
        before = b"".join(done) if made else self._start()
        last = {"response": self._response(made, finish)}
        return before + _event("response.completed", at + 3 if made else 2, last)

    def whole(self, made: int, finish: str) -> bytes:
        return dumps(self._response(made, finish))

    def broken(self, message: str) -> bytes:
        error = {"code": "server_error", "message": message, "param": None}
        return named_event(b"error", dumps({"type": "error", **error})) + self.end

    @property
    def _item_id(self) -> str:
        return "msg_" + self._name.removeprefix("resp_")

    def _start(self) -> bytes:
        begun = {"response": self._response(0, None)}
        return _event("response.created", 0, begun) + _event("response.in_progress", 1, begun)

    def _place(self) -> dict[str, Any]:
        return {"content_index": 0, "item_id": self._item_id, "output_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}

    def _item(self, status: str, content: list[Any]) -> dict[str, Any]:
        item = {"id": self._item_id, "content": content, "role": "assistant", "status": status}
        return item | {"type": "message", "phase": None}

    def _response(self, made: int, finish: str | None) -> dict[str, Any]:
        """The response as it stands; `finish` None: it has only begun."""
        asked, cut = self.call.asked, finish == "length"
        status = "in_progress" if finish is None else "incomplete" if cut else "completed"
        output = [] if finish is None else [self._item("completed", [self._part(self._text(0, made))])]
        response = {
            "id": self._name,
            "created_at": self._created,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": asked.get("instructions"),
            "metadata": asked.get("metadata"),
            "model": self._model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "temperature": float(asked.get("temperature", 1.0)),
            "tool_choice": "none",
            "tools": asked.get("tools") or [],
            "top_p": 1.0,
            "background": False,
            "max_output_tokens": self.call.limit,
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": status,
            "text": None,
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": None if finish is None else self._counted(made),
            "user": None,
        }
        if finish is not None:
            response["metrics"] = dict.fromkeys(_METRICS)
        return response | {
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def _counted(self, made: int) -> dict[str, Any] | None:
        if not self._usage:
            return None
        prompt = self.call.prompt_tokens
        cached = {
            "cached_tokens": 0,
            "cache_write_tokens": 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        }
        thought = {"reasoning_tokens": 0, "tool_output_tokens": 0}
        thought |= {"output_tokens_per_turn": [], "tool_output_tokens_per_turn": []}  # type: ignore[dict-item]
        return {
            "input_tokens": prompt,
            "input_tokens_details": cached,
            "output_tokens": made,
            "output_tokens_details": thought,
            "total_tokens": prompt + made,
        }


def _said_text(at: int, said: dict[str, Any], text: str) -> bytes:
    kind = "response.output_text.done"
    return named_event(kind.encode(), dumps({**said, "sequence_number": at, "text": text, "type": kind}))


def _event(kind: str, number: int, members: dict[str, Any]) -> bytes:
    return named_event(kind.encode(), dumps({**members, "sequence_number": number, "type": kind}))
