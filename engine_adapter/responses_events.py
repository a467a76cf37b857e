"""The event streams of /v1/responses: typed events, numbered, closed by the one that has the whole response.

Standard: https://platform.openai.com/docs/api-reference/responses-streaming. vLLM closes a response that ran out of tokens
with `response.completed` too, and says so in its status. There are no figures before the last event.
"""

from __future__ import annotations

import msgspec

from engine_adapter.body import NULL, Members, write_object
from engine_adapter.choices import read_small
from engine_adapter.estimate import bytes_said
from engine_adapter.lenient import NOT_JSON, read_object
from engine_adapter.open_items import OpenItems
from engine_adapter.response import Response
from engine_adapter.scanner import Scanner, typed_event
from engine_adapter.splice import read_members, rename_model
from engine_adapter.usage import Usage

_WAITING = ("response.created", "response.in_progress", "response.queued")
"""Events that come before the engine has begun, at once."""

_ENDINGS = ("response.completed", "response.incomplete", "response.failed")


class _Event(msgspec.Struct):
    type: str = ""
    delta: str | None = None
    output_index: int = 0
    content_index: int | None = None
    summary_index: int | None = None
    sequence_number: int | None = None
    item: msgspec.Raw = NULL
    part: msgspec.Raw = NULL
    response: Response | None = None
    error: msgspec.Raw = NULL
    code: msgspec.Raw = NULL
    message: msgspec.Raw = NULL

    @property
    def place(self) -> int | None:
        """Of a part in its item."""
        return self.summary_index if self.content_index is None else self.content_index


class ResponsesScanner(Scanner):
    """One response's event stream. Nothing of it is hidden but errors."""

    cut_reason = "max_output_tokens"

    def __init__(self, *, prompt_estimate: int, rename: tuple[str, str] | None) -> None:
        super().__init__(prompt_estimate=prompt_estimate, rename=rename)
        self._opening = b""
        self._items = OpenItems()

    def _read(self, data: bytes) -> bytes:
        try:
            event, well_typed = read_object(_Event, data)
        except NOT_JSON:
            return data
        if event is None:
            return data
        if event.type == "error" or event.error != NULL:
            return self._fail(_error_of(event), data)
        if event.sequence_number is not None:
            self.next_number = event.sequence_number + 1
        if event.response is not None or event.type in _ENDINGS:
            return self._read_response(event.type, event.response or Response(), data)
        if event.type.startswith("response.") and event.type not in _WAITING:
            self.content_seen = True
            self._follow(event)
            if not well_typed and event.delta is None and event.type.endswith(".delta"):
                self._say(bytes_said(data))
            self._advance()
        return data

    def _follow(self, event: _Event) -> None:
        """What an event tells of the output's items."""
        index, place = event.output_index, event.place
        if event.delta is not None:
            self._say(self._items.grew(index, place, event.delta))
        elif event.type == "response.output_item.added" and _is_object(event.item):
            self._items.opened(index, bytes(event.item))
        elif event.type == "response.output_item.done" and _is_object(event.item):
            self._say(self._items.closed(index, bytes(event.item)))
        elif place is not None and _is_object(event.part):
            follow = self._items.part_opened if event.type.endswith(".added") else self._items.part_closed
            follow(index, place, bytes(event.part))

    def _say(self, size: int) -> None:
        if size:
            self._tally.text(size)

    def _read_response(self, kind: str, response: Response, data: bytes) -> bytes:
        if kind in _WAITING and not self._opening:
            self._opening = data
        if kind in _ENDINGS:
            self._end(response)
        if kind == "response.failed":
            return self._fail(read_small(response.error), data)
        return data if self._name is None else rename_model(data, response.model, self._name, "response")

    def _end(self, response: Response) -> None:
        figures = response.figures()
        if figures.valid():
            self._tally.whole(figures, summed=True)
        self.done = True
        self.finish_reason = response.finish_reason() or "completed"
        self.aborted = self.finish_reason == "abort"
        self.content_seen |= not self.aborted
        self._advance()

    # Events of our own

    def _ending(self) -> bytes:
        """What is open is closed, and the response is incomplete."""
        self.finish_reason = self.cut_reason
        events = [self._event(kind, members) for kind, members in self._items.close()]
        events.append(self._event("response.incomplete", {"response": self._incomplete()}))
        return b"".join(events)

    def _incomplete(self) -> bytes:
        opening = _response_of(self._opening) if self._opening else {}
        changed: dict[str, bytes] = {
            "object": b'"response"',
            "status": b'"incomplete"',
            "incomplete_details": b'{"reason":"%b"}' % self.cut_reason.encode(),
            "output": self._items.output(),
            "usage": _figures(self.usage()),
        }
        if self._name is not None:
            changed["model"] = msgspec.json.encode(self._name)
        return write_object({**opening, **changed})

    def _event(self, kind: str, members: dict[str, msgspec.Raw | bytes]) -> bytes:
        number = b"%d" % self.next_number
        self.next_number += 1
        return typed_event(kind, {**members, "sequence_number": number})


def _figures(usage: Usage) -> bytes:
    return msgspec.json.encode(
        {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.total,
        }
    )


def _response_of(data: bytes) -> Members:
    response = read_members(data).get("response", NULL)
    return read_members(response) if _is_object(response) else {}


def _error_of(event: _Event) -> object:
    """The error's own object, or the event itself, as the standard has it."""
    if event.error != NULL:
        return read_small(event.error)
    return {"code": read_small(event.code), "message": read_small(event.message)}


def _is_object(value: msgspec.Raw) -> bool:
    return bytes(memoryview(value)[:1]) == b"{"
