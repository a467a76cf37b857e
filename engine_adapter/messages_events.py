"""The event streams of /v1/messages: a message's start, its content block by block, its figures and its stop.

Standard: https://docs.anthropic.com/en/docs/build-with-claude/streaming. vLLM says all of the input when a message starts,
and leaves out of its last `input_tokens` what stands beside it as cached. An answer that it gives up has no stop reason, or,
with nothing made, seems to be the end of the turn: an empty reply costs a token.
"""

from __future__ import annotations

import msgspec

from engine_adapter import vllm
from engine_adapter.body import NULL
from engine_adapter.choices import read_small
from engine_adapter.estimate import bytes_of, bytes_said
from engine_adapter.figures import InputFigures
from engine_adapter.lenient import NOT_JSON, read_object
from engine_adapter.scanner import Scanner, typed_event
from engine_adapter.splice import rename_model


class _Words(msgspec.Struct, gc=False):
    """A block when it starts, a piece of one, or (stop reason) the end of the message."""

    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    name: str | None = None
    """of a tool"""
    stop_reason: str | None = None

    def text_bytes(self) -> int:
        return sum(bytes_of(text) for text in (self.text, self.thinking, self.partial_json, self.name) if text)


class _Message(msgspec.Struct):
    model: str | None = None
    usage: InputFigures | None = None


class _Event(msgspec.Struct):
    type: str = ""
    index: int = 0
    delta: _Words | None = None
    content_block: _Words | None = None
    message: _Message | None = None
    usage: InputFigures | None = None
    error: msgspec.Raw = NULL


class MessagesScanner(Scanner):
    """One message's event stream. Nothing of it is hidden but errors."""

    cut_reason = "max_tokens"

    def __init__(self, *, prompt_estimate: int, rename: tuple[str, str] | None) -> None:
        super().__init__(prompt_estimate=prompt_estimate, rename=rename)
        self._started = False
        self._said = InputFigures(output_tokens=0)
        """the newest of each figure"""
        self._open: set[int] = set()

    def _read(self, data: bytes) -> bytes:
        try:
            event, well_typed = read_object(_Event, data)
        except NOT_JSON:
            return data
        if event is None:
            return data
        if event.type == "error" or event.error != NULL:
            return self._fail(_error_of(event.error), data)
        if event.type.startswith("content_block_"):
            self._read_block(event, None if well_typed else data)
        elif event.type == "message_delta":
            self._read_end(event)
        elif event.type == "message_stop":
            self._stop()
        elif event.type == "message_start" and event.message is not None:
            self._start(event.message)
            return data if self._name is None else rename_model(data, event.message.model, self._name, "message")
        return data

    def _start(self, message: _Message) -> None:
        self._started = True
        if message.usage is not None:
            self._count(message.usage, summed=False)

    def _read_block(self, event: _Event, odd: bytes | None) -> None:
        self.content_seen = True
        said = event.delta if event.type == "content_block_delta" else event.content_block
        if event.type == "content_block_start":
            self._open.add(event.index)
        elif event.type == "content_block_stop":
            self._open.discard(event.index)
        size = said.text_bytes() if said is not None else 0
        if size or (odd and (size := bytes_said(odd))):
            self._tally.text(size)
        self._advance()

    def _read_end(self, event: _Event) -> None:
        if event.usage is not None and event.usage.output_tokens is not None:
            self._count(event.usage, summed=True)
        reason = event.delta.stop_reason if event.delta is not None else None
        if reason is not None:
            self.finish_reason = reason if self._made() else "abort"
            self.aborted = self.finish_reason == "abort"
            self.content_seen |= not self.aborted

    def _stop(self) -> None:
        self.done = True
        if self.finish_reason is None:
            self.finish_reason, self.aborted = "abort", True

    def _made(self) -> bool:
        """Whether anything was made of the message, as far as that is known."""
        return self.content_seen or not self._tally.summed or self._tally.told > 0

    def _count(self, usage: InputFigures, *, summed: bool) -> None:
        self._said = usage.after(self._said)
        figures = self._said.figures()
        if figures.valid():
            self._tally.whole(figures, summed=summed)
            self._advance()

    # Events of our own

    def _ending(self) -> bytes:
        """What is open is closed; why it stops, and its figures, if that was not said yet."""
        events = [] if self._started else [typed_event("message_start", {"message": self._opening()})]
        events += [typed_event("content_block_stop", {"index": b"%d" % index}) for index in sorted(self._open)]
        if self.finish_reason is None:
            self.finish_reason = self.cut_reason
            usage = self._figures(self.usage().completion)
            delta = b'{"stop_reason":"%b","stop_sequence":null}' % self.cut_reason.encode()
            events.append(typed_event("message_delta", {"delta": delta, "usage": usage}))
        events.append(typed_event("message_stop", {}))
        return b"".join(events)

    def _opening(self) -> bytes:
        name = msgspec.json.encode(self._name or "")
        return (
            b'{"id":"msg_","type":"message","role":"assistant","content":[],"model":%b,'
            b'"stop_reason":null,"stop_sequence":null,"usage":%b}' % (name, self._figures(0))
        )

    def _figures(self, output: int) -> bytes:
        """The input as the engine said it, which counts beside what it named as cached."""
        said = self._prompt_estimate if self._said.input_tokens is None else self._said.input_tokens
        return b'{"input_tokens":%d,"output_tokens":%d}' % (said, output)


_STATUS = {"overloaded_error": 503, "rate_limit_error": 429}
"""By the type of an error, which has no code of its own here."""


def _error_of(error: msgspec.Raw) -> object:
    said = read_small(error)
    if not isinstance(said, dict):
        return said
    message = said.get("message")
    if isinstance(message, str) and (status := vllm.status_of_lost_error(message)) is not None:
        return {"code": status}
    return {**said, "code": _STATUS.get(str(said.get("type")))}
