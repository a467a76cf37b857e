"""The scanner of event streams: bytes in, bytes to forward out; it remembers usage, text size and how it ended. No I/O.

Standard: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream. An event goes on when
its closing blank line is here, as the very bytes that came unless something in it had to change. However the bytes are
cut into chunks, the same bytes come out and the same usage is known at the end.

How tokens are counted, best knowledge first:

1. the engine's own sum, in an event without choices: the last valid one wins, zero is zero;
2. running figures in events with choices. With several choices vLLM counts in each event that event's choice (and its
   prompt) alone, so the newest of each are added up;
3. what came after the newest figure, or without any: the larger of the number of pieces with text in them (text, tool
   calls, reasoning; at least a token each) and a quarter of their bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from engine_adapter.answers import (
    LARGEST,
    NULL,
    Answer,
    Choice,
    Figures,
    NotAnAnswer,
    read,
    read_small,
    rename_model,
    tokens_of_text,
    without_usage,
)
from engine_adapter.errors import EngineBroke
from engine_adapter.request import Endpoint, write_object
from engine_adapter.usage import Usage

LARGEST_EVENT: Final = 16 * 1024 * 1024
"""Bytes an unfinished event may hold back: above every real one, and a bound for a worker that never ends a line."""

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_DONE: Final = b"[DONE]"


@dataclass(frozen=True, slots=True)
class EngineErrorEvent:
    """`data: {"error": …}` inside a 200. `code` as the engine gave it, if it is a number; `raw` is the event's JSON."""

    code: int | None
    message: str
    raw: bytes


class Scanner:
    """One answer's event stream.

    What is hidden: events that only carry usage, from a client that did not ask for it; the `usage` of other events,
    from one that did not ask for running figures. An error event is not forwarded, nor anything after it: whoever
    relays the stream reads `error` and says it in his own words.

    `choices` counts the answers of all `prompts` together. `rename` is the name the engine serves and the caller's name
    for it, which takes its place in every event.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        wants_usage: bool,
        wants_live_usage: bool,
        choices: int,
        prompt_estimate: int,
        rename: tuple[str, str] | None,
        prompts: int = 1,
    ) -> None:
        self.events = 0
        """events so far, comments too: each is a sign of life"""
        self.content_seen = False
        """an event with choices came, be it the opening one without text"""
        self.error: EngineErrorEvent | None = None
        self.done = False
        """`[DONE]` came, or the answer was cut here. It does not mean success: see `error` and `aborted`"""
        self.finish_reason: str | None = None
        """the first choice's"""
        self.aborted = False
        """a choice ended with "abort": the engine broke it off (vLLM on SIGTERM)"""
        self.live_prompt = 0
        """tokens used by now, for charging: by the engine's figures alone, 0 before any of them …"""
        self.live_completion = 0
        """… since what was charged cannot be taken back if its last figure says less. Neither ever falls"""
        self.live_most = 0
        """what may have been used by now in all, for staying within a hold: without figures the prompt's estimate, and
        text by its size"""

        self._endpoint = endpoint
        self._wants_usage = wants_usage
        self._wants_live_usage = wants_live_usage
        self._choices = choices
        self._choices_per_prompt = max(1, choices // max(1, prompts))
        self._prompt_estimate = prompt_estimate
        self._name = rename[1] if rename else None

        self._rest = bytearray()
        self._searched = 0
        self._line_feed: bytes | None = None
        self._over = False
        self._opening = b""
        self._finished: set[int] = set()
        self._tally = _Tally()
        self._usage_taken = False

    def feed(self, chunk: bytes) -> bytes:
        """The bytes to forward now. Raises EngineBroke (protocol) if an event does not end within LARGEST_EVENT."""
        if self._over or not chunk:
            return b""
        if self._line_feed is not None:
            return self._after_cr(chunk)
        return self._scan(self._with_rest(chunk))

    def end(self) -> bytes:
        """The backend's stream ended properly: what is left to forward. A last event may lack its blank line."""
        if self._over:
            return b""
        last = bytes(self._rest)
        self._rest.clear()
        shown = self._read_event(last)
        owed = b"" if self._over or self.done else self._usage_owed()
        return shown + b"\n\n" + owed if shown and owed else shown or owed

    def cut(self) -> bytes:
        """Ends the answer cleanly now, for want of tokens: each unfinished choice with "length", usage if asked for."""
        if self._over or self.done:
            return b""
        self._over = self.done = True
        self._rest.clear()
        unfinished = [index for index in range(self._choices) if index not in self._finished]
        if 0 in unfinished or self.finish_reason is None:
            self.finish_reason = "length"
        pieces = [self._event([self._last_piece(index)]) for index in unfinished]
        if self._wants_usage and not self._tally.summed:
            pieces.append(self._event([], self.usage()))
        return b"".join((*pieces, b"data: ", _DONE, b"\n\n"))

    def usage(self) -> Usage:
        """The best final truth as of now."""
        complete = len(self._finished) >= self._choices
        return self._tally.usage(
            complete=complete, prompt_estimate=self._prompt_estimate if self.content_seen else None
        )

    def __repr__(self) -> str:
        end = "error" if self.error else self.finish_reason or ("done" if self.done else "open")
        return (
            f"<Scanner {self._endpoint} {self.events} events, {self.live_prompt}+{self.live_completion} tokens, {end}>"
        )

    # Bytes into events

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
            if self._over:
                return b"".join(changed)
        if start < len(data):
            self._keep(data[start:])
        elif data.endswith(b"\r"):
            self._line_feed = b"\n" if shown or kept < start else b""
        elif not changed:
            return data
        changed.append(data[kept:start])
        return b"".join(changed)

    # Events into what they mean

    def _read_event(self, event: bytes) -> bytes:
        """What to show of one event (its bytes without the blank line): the same object, other bytes, or none."""
        if not event:
            return event
        self.events += 1
        if event.startswith(b"data:") and b"\n" not in event and b"\r" not in event:
            name, data = _field(event)
            shown = self._read_data(data)
            return event if shown is data else shown and name + shown
        return self._read_lines(event)

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
        shown = self._read_data(data)
        if shown is data:
            return event
        if not shown:
            return b""
        last = lines[places[-1]]
        line_end = last[len(last.rstrip(b"\r\n")) :]
        lines[places[-1]] = fields[-1][0] + shown + line_end
        return mark + b"".join(line for place, line in enumerate(lines) if place not in places[:-1])

    def _read_data(self, data: bytes) -> bytes:
        if len(data) < 16 and data.strip() == _DONE:
            return self._read_done(data)
        try:
            answer = read(data)
        except NotAnAnswer:
            return data
        if answer is None:
            return data
        if answer.error != NULL:
            self._read_error(read_small(answer.error), data)
            return b""
        self._count(answer, data)
        return self._shown(answer, data)

    def _read_done(self, data: bytes) -> bytes:
        self.done = True
        owed = self._usage_owed()
        return owed.removeprefix(b"data: ") + b"data: " + data if owed else data  # an event before this one

    def _read_error(self, error: Any, data: bytes) -> None:
        members = error if isinstance(error, dict) else {"message": error}
        code, message = members.get("code"), members.get("message")
        number = code if isinstance(code, int) and not isinstance(code, bool) else None
        self.error = EngineErrorEvent(number, message if isinstance(message, str) else "", data.strip())
        self._over = True

    def _shown(self, answer: Answer, data: bytes) -> bytes:
        if answer.usage is not None:
            if not answer.choices and not self._wants_usage:
                return b""
            if answer.choices and not self._wants_live_usage:
                self._usage_taken = True
                data = without_usage(data)
        return data if self._name is None else rename_model(data, answer.model, self._name)

    # What they cost

    def _count(self, answer: Answer, data: bytes) -> None:
        figures = answer.usage if answer.usage is not None and answer.usage.valid() else None
        if answer.choices:
            if not self.content_seen:
                self.content_seen, self._opening = True, data
            self._count_choices(answer.choices, figures)
        elif figures is not None:
            self._tally.whole(figures, summed=True)
        if self.content_seen or figures is not None:
            self._advance()

    def _advance(self) -> None:
        tally = self._tally
        self.live_prompt = max(self.live_prompt, tally.prompt or 0)
        self.live_completion = max(self.live_completion, tally.told)
        prompt = self._prompt_estimate if tally.prompt is None else tally.prompt
        self.live_most = max(self.live_most, prompt + tally.completion)

    def _count_choices(self, choices: list[Choice], figures: Figures | None) -> None:
        for choice in choices:
            if choice.finish_reason is not None:
                self._finish(choice)
        if figures is None:
            self._tally.text(choices)
        elif self._choices == 1 or len(choices) > 1:
            self._tally.whole(figures, summed=False)
        else:
            index = choices[0].index
            self._tally.part(figures, index, index // self._choices_per_prompt)

    def _finish(self, choice: Choice) -> None:
        self._finished.add(choice.index)
        if choice.index == 0 or self.finish_reason is None:
            self.finish_reason = choice.finish_reason
        self.aborted |= choice.finish_reason == "abort"

    # Events of our own

    def _usage_owed(self) -> bytes:
        """The usage event of a client that asked for one, when the engine said its figures only in events with choices."""
        if not self._wants_usage or not self._usage_taken or self._tally.summed:
            return b""
        return self._event([], self.usage())

    def _event(self, choices: list[bytes], usage: Usage | None = None) -> bytes:
        members = self._identity() | {"choices": b"[" + b",".join(choices) + b"]"}
        if usage is not None:
            figures = {
                "prompt_tokens": usage.prompt,
                "total_tokens": usage.total,
                "completion_tokens": usage.completion,
            }
            members["usage"] = msgspec.json.encode(figures)
        return b"data: " + write_object(members) + b"\n\n"

    def _last_piece(self, index: int) -> bytes:
        said = b'"text":""' if self._endpoint == "completions" else b'"delta":{}'
        return b'{"index":%d,%b,"logprobs":null,"finish_reason":"length"}' % (index, said)

    def _identity(self) -> dict[str, msgspec.Raw | bytes]:
        """What all events of the stream have in common, as the first one said it."""
        opening = _READ_MEMBERS.decode(self._opening) if self._opening else {}
        members: dict[str, msgspec.Raw | bytes] = {
            name: opening[name] for name in ("id", "object", "created", "model") if name in opening
        }
        if self._name is not None:
            members["model"] = msgspec.json.encode(self._name)
        return members


def scanner(
    endpoint: Endpoint,
    *,
    wants_usage: bool,
    wants_live_usage: bool,
    wants_token_ids: bool,
    choices: int,
    prompt_estimate: int,
    rename: tuple[str, str] | None,
    prompts: int = 1,
) -> Scanner:
    """The scanner of an endpoint's streams. What a client did not ask for (`wants_…`) is taken out for it."""
    if endpoint not in ("chat", "completions"):
        raise NotAnAnswer(f"Streams of {endpoint} cannot be read yet.")
    return Scanner(
        endpoint,
        wants_usage=wants_usage,
        wants_live_usage=wants_live_usage,
        choices=choices,
        prompt_estimate=prompt_estimate,
        rename=rename,
        prompts=prompts,
    )


_READ_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


_EVENT_END = re.compile(rb"\n(?:\n|\r\n?)|\r\r\n?")


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


class _Tally:
    """Tokens so far: the newest figures, and what came after them. Constant work for each event."""

    def __init__(self) -> None:
        self.prompt: int | None = None
        """by the newest figures, None without any"""
        self.summed = False
        """the newest figures are the engine's own sum over everything, and no text came after"""
        self._figures = Figures()
        self._covered = 0
        """completion tokens by the newest figures"""
        self._prompts: dict[int, int] = {}
        self._completions: dict[int, int] = {}
        self._pieces = 0
        self._bytes = 0

    @property
    def told(self) -> int:
        """Completion tokens by the newest figures."""
        return self._covered

    @property
    def completion(self) -> int:
        """Completion tokens, those too of which several share a piece."""
        return self._covered + max(self._pieces, tokens_of_text(self._bytes))

    def whole(self, figures: Figures, *, summed: bool) -> None:
        """Figures of the whole answer; `summed`: in an event without choices. They are valid ones, here and below."""
        self._renew(figures)
        self.prompt, self._covered = figures.prompt_tokens, figures.completion_tokens or 0
        self.summed = summed
        self._prompts.clear()
        self._completions.clear()

    def part(self, figures: Figures, choice: int, prompt: int) -> None:
        """Figures of one of several choices, and of its prompt. Sums that cannot be true are not taken up."""
        usage = figures.usage()
        known = (self.prompt or 0, self._covered) if self._completions else (0, 0)
        prompt_sum = known[0] + usage.prompt - self._prompts.get(prompt, 0)
        covered = known[1] + usage.completion - self._completions.get(choice, 0)
        if prompt_sum + covered > LARGEST:
            return
        self._renew(figures)
        self.prompt, self._covered = prompt_sum, covered
        self._prompts[prompt], self._completions[choice] = usage.prompt, usage.completion

    def text(self, choices: list[Choice]) -> None:
        """Pieces that came without figures."""
        for choice in choices:
            if size := choice.text_bytes():
                self.summed = False
                self._pieces += 1
                self._bytes += size

    def usage(self, *, complete: bool, prompt_estimate: int | None) -> Usage:
        """`complete`: every choice has ended. `prompt_estimate` is None as long as nothing was produced."""
        if self.prompt is not None:
            final = self.summed or (complete and not self._pieces)
            # parts of figures are told for the whole answer only
            last = Usage() if self._completions else self._figures.usage()
            return Usage(self.prompt, last.cached, self.completion, last.reasoning, "engine" if final else "counted")
        if prompt_estimate is None:
            return Usage()
        counted = self._pieces and self._pieces >= tokens_of_text(self._bytes)
        return Usage(prompt_estimate, 0, self.completion, 0, "counted" if counted else "estimated")

    def _renew(self, figures: Figures) -> None:
        self._figures = figures
        self.summed = False
        self._pieces = self._bytes = 0
