"""Tokens of an answer so far, best knowledge first. Constant work for each event.

1. The engine's own sum over everything: the last valid one wins, zero is zero.
2. Running figures. With several choices vLLM counts in each event that event's choice (and its prompt) alone, so the
   newest of each are added up.
3. The ids of the tokens that came after the newest figures, or without any: as many as the engine made.
4. For what came without either: the larger of the number of pieces with text in them (text, tool calls, reasoning; at
   least a token each) and a quarter of their bytes.
"""

from __future__ import annotations

from engine_adapter.estimate import tokens_of_text
from engine_adapter.figures import LARGEST, Figures
from engine_adapter.usage import Usage


class Tally:
    def __init__(self) -> None:
        self.prompt: int | None = None
        """as far as the engine said it, None before"""
        self.summed = False
        """the newest figures are the engine's own sum over everything, and no text came after"""
        self.told = 0
        """completion tokens that the engine itself counted, by figures or ids"""
        self._figures = Figures()
        self._prompts: dict[int, int] = {}
        self._completions: dict[int, int] = {}
        self._listed: set[int] = set()
        """prompts whose ids came"""
        self._pieces = 0
        self._bytes = 0

    @property
    def completion(self) -> int:
        """Completion tokens, those too of which several share a piece."""
        return self.told + max(self._pieces, tokens_of_text(self._bytes))

    def whole(self, figures: Figures, *, summed: bool) -> None:
        """Figures of the whole answer; `summed`: they are the last ones to be expected. Valid ones, here and below."""
        self._renew(figures)
        self.prompt, self.told = figures.prompt_tokens, figures.completion_tokens or 0
        self.summed = summed
        self._prompts.clear()
        self._completions.clear()

    def part(self, figures: Figures, choice: int, prompt: int) -> None:
        """Figures of one of several choices, and of its prompt. Sums that cannot be true are not taken up."""
        usage = figures.usage()
        known = (self.prompt or 0, self.told) if self._completions else (0, 0)
        prompt_sum = known[0] + usage.prompt - self._prompts.get(prompt, 0)
        told = known[1] + usage.completion - self._completions.get(choice, 0)
        if prompt_sum + told > LARGEST:
            return
        self._renew(figures)
        self.prompt, self.told = prompt_sum, told
        self._prompts[prompt], self._completions[choice] = usage.prompt, usage.completion

    def prompt_ids(self, count: int, prompt: int) -> None:
        """A prompt's ids; each choice of it may repeat them. Figures say more, and so they win."""
        if not self._figures.valid() and prompt not in self._listed:
            self._listed.add(prompt)
            self.prompt = (self.prompt or 0) + count

    def ids(self, count: int) -> None:
        """Ids of tokens that came without figures."""
        self.told += count
        self.summed = self.summed and not count

    def text(self, size: int) -> None:
        """A piece of so many bytes, none of them empty, that came without figures and ids."""
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
        counted = (self.told or self._pieces) and self._pieces >= tokens_of_text(self._bytes)
        return Usage(prompt_estimate, 0, self.completion, 0, "counted" if counted else "estimated")

    def _renew(self, figures: Figures) -> None:
        self._figures = figures
        self.summed = False
        self._pieces = self._bytes = 0
