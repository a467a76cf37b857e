"""What the scanners of all dialects have in common: bytes in, bytes to forward out; each remembers what the answer cost,
how much was said and how it ended. No I/O.

Framing tells the events apart, a dialect's scanner says what their data means, the tally counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import msgspec

from engine_adapter.body import write_object
from engine_adapter.framing import Framing
from engine_adapter.tally import Tally
from engine_adapter.usage import Usage

DONE: Final = b"[DONE]"


def typed_event(kind: str, members: dict[str, msgspec.Raw | bytes]) -> bytes:
    """An event of our own that names its type twice, as responses and messages do."""
    name = kind.encode()
    return b"event: %b\ndata: %b\n\n" % (name, write_object({"type": b'"%b"' % name, **members}))


@dataclass(frozen=True, slots=True)
class EngineErrorEvent:
    """An error inside a 200. `code` is an HTTP status as the engine gave it, if it is a number; `raw` the event's JSON."""

    code: int | None
    message: str
    raw: bytes


class Scanner(ABC):
    """One answer's event stream.

    An error event is not forwarded, nor anything after it: whoever relays the stream reads `error` and says it in his own
    words. `rename` is the name the engine serves and the caller's name for it, which takes its place in every event.
    """

    cut_reason: ClassVar[str]
    """the dialect's word for an answer that ended for want of tokens"""

    def __init__(self, *, prompt_estimate: int, rename: tuple[str, str] | None) -> None:
        self.content_seen = False
        """something of the answer itself came, be it an opening without text: until then another engine can be asked"""
        self.error: EngineErrorEvent | None = None
        self.done = False
        """the stream's own end came, or the answer was cut here. It does not mean success: see `error` and `aborted`"""
        self.finish_reason: str | None = None
        """in the engine's words; the first choice's"""
        self.aborted = False
        """the engine broke the answer off without calling it an error (vLLM on SIGTERM)"""
        self.live_prompt = 0
        """tokens used by now, for charging: by the engine's figures alone, 0 before any of them …"""
        self.live_completion = 0
        """… since what was charged cannot be taken back if its last figure says less. Neither ever falls"""
        self.live_most = 0
        """what may have been used by now in all, for staying within a hold: without figures the prompt's estimate, and
        text by its size"""

        self.next_number = 0
        """of the next event, where the dialect numbers them: for who ends the stream with an event of his own"""

        self.ids_seen = False
        """the engine sent token ids: it knows `return_token_ids`"""

        self._prompt_estimate = prompt_estimate
        self._name = rename[1] if rename else None
        self._framing = Framing(self._read)
        self._tally = Tally()

    @property
    def events(self) -> int:
        """Events so far, comments too: each is a sign of life."""
        return self._framing.events

    def feed(self, chunk: bytes) -> bytes:
        """The bytes to forward now. Raises EngineBroke (protocol) if an event does not end within LARGEST_EVENT."""
        return self._framing.feed(chunk)

    def end(self) -> bytes:
        """The backend's stream ended properly: what is left to forward. A last event may lack its blank line."""
        return self._framing.end()

    def cut(self) -> bytes:
        """Ends the answer cleanly now, for want of tokens; none if it has ended already."""
        if self._framing.over or self.done:
            return b""
        self._framing.close()
        self.done = True
        return self._ending()

    def usage(self) -> Usage:
        """The best final truth as of now."""
        return self._tally.usage(
            complete=self._complete(), prompt_estimate=self._prompt_estimate if self.content_seen else None
        )

    def __repr__(self) -> str:
        end = "error" if self.error else self.finish_reason or ("done" if self.done else "open")
        return f"<{type(self).__name__} {self.events} events, {self.live_prompt}+{self.live_completion} tokens, {end}>"

    @abstractmethod
    def _read(self, data: bytes) -> bytes:
        """One event's data: takes in what it says, and returns what to show of it."""

    @abstractmethod
    def _ending(self) -> bytes:
        """The events that end the answer properly after what was shown of it."""

    def _complete(self) -> bool:
        """Whether all of the answer came, so that the engine's counts on the way are its sum."""
        return False

    def _fail(self, error: Any, data: bytes) -> bytes:
        """An error event. `error` is what stands under that name, mostly an object."""
        members = error if isinstance(error, dict) else {"message": error}
        code, message = members.get("code"), members.get("message")
        number = code if isinstance(code, int) and not isinstance(code, bool) else None
        self.error = EngineErrorEvent(number, message if isinstance(message, str) else "", data.strip())
        self._framing.close()
        return b""

    def _advance(self) -> None:
        tally = self._tally
        self.live_prompt = max(self.live_prompt, tally.prompt or 0)
        self.live_completion = max(self.live_completion, tally.told)
        prompt = self._prompt_estimate if tally.prompt is None else tally.prompt
        self.live_most = max(self.live_most, prompt + tally.completion)
