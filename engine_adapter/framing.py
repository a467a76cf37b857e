"""Bytes into events: the framing of event streams, whatever their data means. No I/O.

Standard: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream. An event goes on when
its closing blank line is here, as the very bytes that came unless its data had to change. However the bytes are cut into
chunks, the same events are read and the same bytes come out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from engine_adapter.errors import EngineBroke

LARGEST_EVENT: Final = 16 * 1024 * 1024
"""Bytes an unfinished event may hold back: above every real one, and a bound for a worker that never ends a line."""

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class Framing:
    """Of one stream. `read` is given each event's data, its lines joined, and says what to show instead: the same object
    for no change, other bytes, or none to hide the whole event."""

    def __init__(self, read: Callable[[bytes], bytes]) -> None:
        self.events = 0
        """events so far, comments too: each is a sign of life"""
        self.over = False
        """nothing more is read or shown: set by `close`, which `read` too may call"""
        self._read = read
        self._rest = bytearray()
        self._searched = 0
        self._line_feed: bytes | None = None

    def feed(self, chunk: bytes) -> bytes:
        """The bytes to forward now. Raises EngineBroke (protocol) if an event does not end within LARGEST_EVENT."""
        if self.over or not chunk:
            return b""
        if self._line_feed is not None:
            return self._after_cr(chunk)
        return self._scan(self._with_rest(chunk))

    def end(self) -> bytes:
        """What is left to forward at the stream's end. A last event may lack its blank line."""
        if self.over:
            return b""
        last = bytes(self._rest)
        self._rest.clear()
        return self._read_event(last)

    def close(self) -> None:
        self.over = True
        self._rest.clear()

    def _after_cr(self, chunk: bytes) -> bytes:
        """An event ended with a CR at a chunk's end: an LF that comes first belongs to it, and is shown if it was."""
        line_feed, self._line_feed = self._line_feed, None
        if line_feed is None or not chunk.startswith(b"\n"):
            return self.feed(chunk)
        return line_feed + self.feed(chunk[1:])

    def _with_rest(self, chunk: bytes) -> bytes:
        """The chunk after what was left over, once an event ends in it: a long event is searched and copied once."""
        if not self._rest:
            return chunk
        self._rest += chunk
        if not _EVENT_END.search(self._rest, self._searched):
            self._keep(b"")
            return b""
        data = bytes(self._rest)
        self._rest.clear()
        return data

    def _keep(self, rest: bytes) -> None:
        self._rest += rest
        if len(self._rest) > LARGEST_EVENT:
            raise EngineBroke(
                f"An event of the worker's stream is larger than {LARGEST_EVENT} bytes.", phase="protocol"
            )
        self._searched = max(0, len(self._rest) - 2)

    def _scan(self, data: bytes) -> bytes:
        """All events that end in `data`. Runs of unchanged events are one slice, all of it the very object."""
        changed: list[bytes] = []
        start = kept = 0
        for stop, end in _event_ends(data):
            event = data[start:stop]
            shown = self._read_event(event)
            if shown is not event:
                changed += (data[kept:start], shown, data[stop:end]) if shown else (data[kept:start],)
                kept = end
            start = end
            if self.over:
                return b"".join(changed)
        if start < len(data):
            self._keep(data[start:])
        elif data.endswith(b"\r"):
            self._line_feed = b"\n" if shown or kept < start else b""
        elif not changed:
            return data
        changed.append(data[kept:start])
        return b"".join(changed)

    def _read_event(self, event: bytes) -> bytes:
        """What to show of one event (its bytes without the blank line): the same object, other bytes, or none."""
        if not event:
            return event
        self.events += 1
        start = _data_line(event)
        if start < 0:
            return self._read_lines(event)
        data = event[start:]
        shown = self._read(data)
        return event if shown is data else shown and event[:start] + shown

    def _read_lines(self, event: bytes) -> bytes:
        """The general form: comments, other fields, several lines of data, a byte-order mark at the stream's start."""
        mark = _BYTE_ORDER_MARK if self.events == 1 and event.startswith(_BYTE_ORDER_MARK) else b""
        lines = event[len(mark) :].splitlines(keepends=True)
        places = [
            place for place, line in enumerate(lines) if line.startswith(b"data:") or line.rstrip(b"\r\n") == b"data"
        ]
        if not places:
            return event
        fields = [_field(lines[place].rstrip(b"\r\n")) for place in places]
        data = b"\n".join(value for _, value in fields)
        shown = self._read(data)
        if shown is data:
            return event
        if not shown:
            return b""
        last = lines[places[-1]]
        line_end = last[len(last.rstrip(b"\r\n")) :]
        lines[places[-1]] = fields[-1][0] + shown + line_end
        return mark + b"".join(line for place, line in enumerate(lines) if place not in places[:-1])


_EVENT_END = re.compile(rb"\n(?:\n|\r\n?)|\r\r\n?")


def _data_line(event: bytes) -> int:
    """Where the data starts in an event of the usual form, one line of it with at most a name before; else -1."""
    start = event.find(b"\n") + 1 if event.startswith(b"event:") else 0
    if not event.startswith(b"data:", start) or event.find(b"\n", start) >= 0 or b"\r" in event:
        return -1
    return start + (6 if event.startswith(b" ", start + 5) else 5)


def _field(line: bytes) -> tuple[bytes, bytes]:
    """A data line's name, with the colon and the one space that may follow, and its value."""
    start = 6 if line.startswith(b"data: ") else 5
    return line[:start], line[start:]


def _event_ends(data: bytes) -> list[tuple[int, int]]:
    """Each event's blank line: where the event stops, and where the next one starts."""
    if b"\r" in data:
        return [match.span() for match in _EVENT_END.finditer(data)]
    ends = []
    end = 0
    while (stop := data.find(b"\n\n", end)) >= 0:
        end = stop + 2
        ends.append((stop, end))
    return ends
