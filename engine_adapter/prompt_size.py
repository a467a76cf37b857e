"""How many tokens a prompt has, before the engine says so: a bound, an estimate that learns.

The bound is for limits that must hold. It rests on this: a token stands for at least one byte of text. That is so for
byte-level BPE and for byte-fallback vocabularies, the ones current models use (https://arxiv.org/abs/1909.03341 for the
former), after NFKC where they normalize; and on what JSON becomes at most when it is written anew. What a chat template
writes around all this is covered by an allowance, which grows for a model as soon as its engine reports more than the bound.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

from engine_adapter.prompts import PromptParts

ALLOWANCE_PER_REQUEST: Final = 8
"""Template tokens around all messages: a beginning of text, and the opening of the answer."""
ALLOWANCE_PER_MESSAGE: Final = 8
"""Template tokens around one message: markers, line ends; its role counts as text."""
ALLOWANCE_PER_TEXT: Final = 4
"""Special tokens around a prompt without a template: beginning, end, a separator."""
ALLOWANCE_PER_RESULT: Final = 40
"""What templates write around a tool's result: `<tool_response>`, `</tool_response>` and line ends."""
ALLOWANCE_FOR_TOOLS: Final = 256
"""What templates write before tool schemas: a paragraph of instructions."""
ALLOWANCE_PER_TOOL: Final = 80
"""`{"type": "function", "function": {…, "description": null, "parameters": null}}`: what vLLM adds to a tool at most."""
LARGEST_ALLOWANCE: Final = 128
"""Beyond this an engine's figure is not learned from: one odd figure must not shut small requests out. A template that
adds more (a long system prompt) is among what the cap may overrun by."""

IMAGE_BOUND: Final = 4096
"""Tokens of one picture. LLaVA-NeXT makes at most 2,928, Pixtral 4,096 of 1,024 × 1,024 pixels; a model set up for larger
pictures may make more: the engine's figure is what is charged."""
AUDIO_BOUND: Final = 4096
"""Tokens of one sound: more than two minutes at 25 tokens a second (Qwen2-Audio)."""
VIDEO_BOUND: Final = 16384
"""Tokens of one film: 64 frames of 256."""
TYPICAL_MEDIA_SHARE: Final = 4
"""What one picture or sound probably takes is its bound divided by this."""

START_TOKENS_PER_BYTE: Final = 1 / 3
PRIOR_BYTES: Final = 2000
"""The start value weighs as much as so many bytes of prompts seen."""
FORGET: Final = 0.95
"""What a prompt seen weighs after the next one: the last twenty or so count."""
MODELS: Final = 1024
"""Models remembered at most, the least recently used forgotten."""


def bound(parts: PromptParts) -> int:
    """Tokens the prompt cannot exceed; exact where it came as token ids."""
    around = ALLOWANCE_PER_TEXT * parts.texts + ALLOWANCE_PER_MESSAGE * parts.messages + parts.parts
    around += ALLOWANCE_PER_RESULT * parts.results
    if parts.messages:
        around += ALLOWANCE_PER_REQUEST
    if parts.tools:
        around += ALLOWANCE_FOR_TOOLS + ALLOWANCE_PER_TOOL * parts.tools
    return parts.text_bytes + parts.text_growth + parts.json_growth + parts.token_ids + around + _media(parts)


def _media(parts: PromptParts) -> int:
    return IMAGE_BOUND * parts.images + AUDIO_BOUND * parts.audios + VIDEO_BOUND * parts.videos


# ---- learned sizes ---------------------------------------------------------------------------------------------------

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class _Recent(Generic[_Key, _Value]):
    """A dictionary of at most `most` entries: the least recently used goes."""

    def __init__(self, most: int, make: Callable[[], _Value]) -> None:
        self._most = most
        self._make = make
        self._entries: OrderedDict[_Key, _Value] = OrderedDict()

    def get(self, key: _Key) -> _Value | None:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def get_or_make(self, key: _Key) -> _Value:
        entry = self.get(key)
        if entry is None:
            entry = self._entries[key] = self._make()
            if len(self._entries) > self._most:
                self._entries.popitem(last=False)
        return entry


class _Prompts:
    """One model's prompts: tokens per byte as a ratio of fading sums, so that long prompts weigh more, and allowance."""

    __slots__ = ("allowance", "bytes", "tokens")

    def __init__(self) -> None:
        self.bytes = float(PRIOR_BYTES)
        self.tokens = PRIOR_BYTES * START_TOKENS_PER_BYTE
        self.allowance = 0


class Estimator:
    """Prompt sizes by model, learned from what engines report. One per process; a constant few numbers per model."""

    def __init__(self) -> None:
        self._models: _Recent[str, _Prompts] = _Recent(MODELS, _Prompts)

    def bound(self, model: str, parts: PromptParts) -> int:
        """`bound(parts)`, and the allowance that this model's engine has shown to need."""
        learned = self._models.get(model)
        return bound(parts) + (learned.allowance * _prompts_with_text(parts) if learned else 0)

    def estimate(self, model: str, parts: PromptParts) -> int:
        """Tokens it probably has, never more than `bound`."""
        learned = self._models.get(model)
        per_byte = learned.tokens / learned.bytes if learned else START_TOKENS_PER_BYTE
        text = math.ceil(per_byte * parts.text_bytes)
        media = _media(parts) // TYPICAL_MEDIA_SHARE
        return min(self.bound(model, parts), text + parts.token_ids + _template(parts) + media)

    def learn(self, model: str, parts: PromptParts, prompt_tokens: int) -> None:
        """What the engine counted for this prompt. One with pictures, or given as token ids, teaches nothing of text."""
        if parts.token_ids or _media(parts) or not parts.text_bytes:
            return
        learned = self._models.get_or_make(model)
        excess = math.ceil((prompt_tokens - self.bound(model, parts)) / _prompts_with_text(parts))
        if learned.allowance + excess > LARGEST_ALLOWANCE:
            return
        learned.allowance += max(0, excess)
        learned.bytes = learned.bytes * FORGET + parts.text_bytes
        learned.tokens = learned.tokens * FORGET + max(0, prompt_tokens - _template(parts))


def _prompts_with_text(parts: PromptParts) -> int:
    return 1 if parts.messages else parts.texts


def _template(parts: PromptParts) -> int:
    """Template tokens a prompt probably has: 3 around each message and 3 before the answer, as OpenAI counts
    (https://cookbook.openai.com/examples/how_to_count_tokens_with_tiktoken), one begin of text without a template."""
    return 3 * parts.messages + 3 if parts.messages else parts.texts


BINS: Final = 64
BINS_PER_DOUBLING: Final = 4
QUANTILE: Final = 0.8
PRIOR_ANSWERS: Final = 4
"""The default weighs as much as so many answers: two longer ones raise what is expected, sixteen shorter ones lower it."""
REMEMBERED: Final = 128
"""At so many answers all are halved: the newest hundred or so decide."""
SIZES: Final = 10_000
"""Pairs of key and model remembered at most, about 300 bytes each."""


class AnswerSizes:
    """The size of a key's answers on a model: the 80th percentile of the recent ones.

    Counts in 64 bins, each 19 % wider than the last (1 to 65,536 tokens), so the answer is right within a bin whatever
    the distribution's shape: the idea of DDSketch (https://arxiv.org/abs/1908.10693), with halving so that it follows
    a change. Constant time and memory per pair. Sizes are of one answer; with n of them, multiply.
    """

    def __init__(self) -> None:
        self._pairs: _Recent[tuple[str, str], array[int]] = _Recent(SIZES, lambda: array("H", bytes(2 * BINS)))

    def expected_output(self, key: str, model: str, default: int, ceiling: int | None = None) -> int:
        """Tokens an answer of this key probably has; `default` before any was seen; never above `ceiling`."""
        counts = self._pairs.get((key, model))
        expected = default if counts is None else _quantile(counts, default)
        return expected if ceiling is None else min(expected, ceiling)

    def learn(self, key: str, model: str, completion_tokens: int) -> None:
        counts = self._pairs.get_or_make((key, model))
        counts[_bin(completion_tokens)] += 1
        if sum(counts) >= REMEMBERED:
            counts[:] = array("H", [count // 2 for count in counts])


def _quantile(counts: array[int], default: int) -> int:
    prior = _bin(default)
    left = QUANTILE * (sum(counts) + PRIOR_ANSWERS)
    for number, count in enumerate(counts):
        left -= count + (PRIOR_ANSWERS if number == prior else 0)
        if left <= 0:
            return default if number == prior else _largest_in(number)
    return _largest_in(BINS - 1)


def _bin(tokens: int) -> int:
    return min(BINS - 1, int(math.log2(max(1, tokens)) * BINS_PER_DOUBLING))


def _largest_in(number: int) -> int:
    return math.ceil(2 ** ((number + 1) / BINS_PER_DOUBLING)) - 1
