"""The output items of a streamed response: what is said of each, and the events that close those still open.

Standard: https://platform.openai.com/docs/api-reference/responses-streaming. Constant work for each event; what was said is
kept, since closing an item repeats it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from engine_adapter.body import Members, write_object
from engine_adapter.estimate import bytes_said
from engine_adapter.splice import read_members

Event = tuple[str, dict[str, msgspec.Raw | bytes]]
"""An event's type, and its members without type and number."""

_PARTS: Final = {
    "output_text": ("response.output_text", "text"),
    "refusal": ("response.refusal", "refusal"),
    "reasoning_text": ("response.reasoning_text", "text"),
    "summary_text": ("response.reasoning_summary_text", "text"),
}
"""By the type of a part: the events that tell of its text, and the member that has it."""

_ITEMS: Final = {
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
    "mcp_call": ("response.mcp_call_arguments", "arguments"),
    "code_interpreter_call": ("response.code_interpreter_call_code", "code"),
}
"""The same of items that have no parts."""


class _Part:
    """`shown`: as it came last; `said`: its text, in UTF-8."""

    __slots__ = ("closed", "said", "shown")

    def __init__(self, shown: bytes) -> None:
        self.shown = shown
        self.said = bytearray()
        self.closed = False


class _Item:
    __slots__ = ("parts", "said", "shown", "size")

    def __init__(self, shown: bytes) -> None:
        self.shown = shown
        self.said = bytearray()
        self.parts: dict[int, _Part] = {}
        self.size = 0
        """bytes said of it"""


class OpenItems:
    def __init__(self) -> None:
        self._open: dict[int, _Item] = {}
        self._closed: dict[int, bytes] = {}

    def opened(self, index: int, item: bytes) -> None:
        self._open[index] = _Item(item)

    def part_opened(self, index: int, place: int, part: bytes) -> None:
        if (item := self._open.get(index)) is not None:
            item.parts[place] = _Part(part)

    def grew(self, index: int, place: int | None, delta: str) -> int:
        """A piece of text of a part, or (`place` None) of the item itself. Returns its bytes."""
        said = delta.encode()
        if (item := self._open.get(index)) is not None:
            item.size += len(said)
            if place is None:
                item.said += said
            elif (part := item.parts.get(place)) is not None:
                part.said += said
        return len(said)

    def part_closed(self, index: int, place: int, part: bytes) -> None:
        if (item := self._open.get(index)) is not None and place in item.parts:
            item.parts[place].shown, item.parts[place].closed = part, True

    def closed(self, index: int, item: bytes) -> int:
        """Returns the bytes that were not said in pieces before, a function's name for example."""
        was = self._open.pop(index, None)
        self._closed[index] = item
        return max(0, bytes_said(item) - (was.size if was is not None else 0))

    def close(self) -> Iterator[Event]:
        """Closes what is open, as incomplete."""
        for index in sorted(self._open):
            item = self._open.pop(index)
            yield from _close(item, index)
            self._closed[index] = item.shown

    def output(self) -> bytes:
        """All items that are closed, as a JSON list."""
        return b"[" + b",".join(self._closed[index] for index in sorted(self._closed)) + b"]"


def _close(item: _Item, index: int) -> Iterator[Event]:
    members = read_members(item.shown)
    at: dict[str, msgspec.Raw | bytes] = {"item_id": members.get("id", b"null"), "output_index": b"%d" % index}
    for place in sorted(item.parts):
        part = item.parts[place]
        if not part.closed:
            yield from _close_part(part, place, at)
    parts = b"[" + b",".join(item.parts[place].shown for place in sorted(item.parts)) + b"]"
    ending: dict[str, msgspec.Raw | bytes] = {"status": b'"incomplete"'} if "status" in members else {}
    if (kind := _ITEMS.get(_type_of(members))) is not None:
        text = _quoted(item.said)
        ending[kind[1]] = text
        yield f"{kind[0]}.done", {**at, kind[1]: text}
    elif item.parts:
        ending["summary" if _is_summary(item) else "content"] = parts
    item.shown = write_object({**members, **ending})
    yield "response.output_item.done", {"item": item.shown, "output_index": at["output_index"]}


def _close_part(part: _Part, place: int, at: dict[str, msgspec.Raw | bytes]) -> Iterator[Event]:
    members = read_members(part.shown)
    kind = _PARTS.get(_type_of(members))
    summary = kind is not None and kind[0] == "response.reasoning_summary_text"
    where = {**at, "summary_index" if summary else "content_index": b"%d" % place}
    if kind is not None:
        text = _quoted(part.said)
        part.shown = write_object({**members, kind[1]: text})
        logprobs: dict[str, msgspec.Raw | bytes] = {"logprobs": b"[]"} if kind[0] == "response.output_text" else {}
        yield f"{kind[0]}.done", {**where, **logprobs, kind[1]: text}
    name = "reasoning_summary_part" if summary else "content_part"
    yield f"response.{name}.done", {**where, "part": part.shown}


def _is_summary(item: _Item) -> bool:
    return any(_type_of(read_members(part.shown)) == "summary_text" for part in item.parts.values())


def _type_of(members: Members) -> str:
    try:
        return msgspec.json.decode(members["type"], type=str)
    except (KeyError, msgspec.ValidationError):
        return ""


def _quoted(said: bytearray) -> bytes:
    return msgspec.json.encode(said.decode())
