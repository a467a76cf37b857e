"""What a backend's streams are asked to count: found out by asking, remembered, given up where an engine does not know it.

Running figures make exact what a caller is charged who leaves in the middle of a stream, and how far it may go at the cap.
An engine may refuse a field of ours that it does not know: then the same request is sent again without it, and the field is
held unknown only if that was accepted, so that no caller's own mistake makes us ask for less. Or it may pass the field over
without a word: its first stream shows that. Whatever is held unknown is forgotten when the backend fails: what answers
again may be another engine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from engine_adapter import vllm
from engine_adapter.body import FALSE, TRUE, given
from engine_adapter.request import SEVERAL, Call, Kind, Live

Field = str

RETURN_IDS: Final = "return_token_ids"

MOST_PROMPT_IDS: Final = 65_536
"""So many take some 5 ms to read, in which no other request goes on."""

_NEEDS: Final[dict[Live, tuple[Field, ...]]] = {
    "token_ids": (RETURN_IDS, "stream_options"),
    "usage": ("continuous_usage_stats", "stream_options"),
    "none": ("stream_options",),
    "nothing": (),
}
"""Best first: ids also count what tool and reasoning parsers swallow without an event."""

_NAMES: Final = {
    RETURN_IDS: (RETURN_IDS,),
    "continuous_usage_stats": ("continuous_usage_stats",),
    "stream_options": ("stream_options", "include_usage"),
}
"""By which a refusal may name each, the narrower first: `stream_options` also stands before its own members."""


class Capabilities:
    """Of one backend."""

    __slots__ = ("_levels", "_unknown")

    def __init__(self, kind: Kind) -> None:
        self._levels = [live for live in _NEEDS if kind == "vllm" or live in ("none", "nothing")]
        self._unknown: frozenset[Field] = frozenset()

    def best(self, without: Collection[Field] = ()) -> Live:
        """What to ask for, with none of the fields that the engine does not know, nor of `without`."""
        avoided = self._unknown.union(without)
        return next(live for live in self._levels if avoided.isdisjoint(_NEEDS[live]))

    def learn(self, unknown: Iterable[Field]) -> bool:
        """Holds these fields unknown; whether that is news."""
        before, self._unknown = self._unknown, self._unknown.union(unknown)
        return self._unknown != before

    def forget(self) -> None:
        self._unknown = frozenset()

    def __repr__(self) -> str:
        return f"asked for {self.best()}" + (f", knows no {', '.join(sorted(self._unknown))}" if self._unknown else "")


def unfit(call: Call, prompt_tokens: int) -> frozenset[Field]:
    """Fields that this call, of so many prompt tokens as it seems, is better sent on without: with ids, vLLM leaves the
    echoed prompt's text out of completions; where a parser hides the reasoning it hides all ids with it; and those of the
    prompt come once for each answer, however many they are."""
    hidden = call.members.get("include_reasoning") == FALSE
    echoed = call.members.get("echo") == TRUE
    return frozenset({RETURN_IDS} if hidden or echoed or prompt_tokens * call.answers > MOST_PROMPT_IDS else ())


def refused_field(call: Call, live: Live, status: int, body: bytes) -> Field | None:
    """Which of the fields that we added to the call a refusal names; None if it is about something else."""
    if not call.stream or call.endpoint not in SEVERAL:
        return None
    ours = set(_NEEDS[live]).difference(_own(call))
    for field, names in _NAMES.items():
        if field in ours and any(vllm.refuses(name, status, body) for name in names):
            return field
    return None


def _own(call: Call) -> Iterable[Field]:
    """Fields that the client sent itself: what the engine says of them is for the client to hear."""
    if call.wants_token_ids:
        yield RETURN_IDS
    if call.wants_live_usage:
        yield "continuous_usage_stats"
    if given(call.members, "stream_options"):
        yield "stream_options"
