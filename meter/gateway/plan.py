"""What one call may cost, and so what is asked of the quota store: pure arithmetic of the rule's words."""

from __future__ import annotations

from dataclasses import dataclass

from meter.callers.tiers import Tier
from quotas.policy import MAX_TOKENS
from quotas.store import Ask, Target

SLICE = 256
"""Tokens by which a stream extends its hold."""

UNKNOWN_CONTEXT = 131_072
"""Output limit where neither the caller, nor the tier, nor the model's context names one: the largest context that
current open models are commonly served with. The cap's clamp lowers it to what is left."""


MOST = MAX_TOKENS + 1
"""More than any limit allows; sums stay exact below it."""


@dataclass(frozen=True, slots=True)
class Size:
    """Tokens of one call, before it ran. `choices`: answers in all (prompts × max(n, best_of)).

    `exact`: bound and estimate are the tokenizer's own figure; `prompt_floor`: it surely has as many."""

    prompt_bound: int
    prompt_estimate: int
    choices: int
    asked_output: int | None
    learned_output: int
    context: int | None
    prompt_floor: int = 0
    exact: bool = False


BYTES_A_TOKEN_AT_MOST = 8
"""Of running text: what no vocabulary in use exceeds over a whole prompt (about 4 in English). Only to tell apart what can
never fit from what may."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`output_limit`: per answer, None where nothing is generated. The other words are the rule's."""

    output_limit: int | None
    lowered: bool
    expected: int
    first_hold: int
    ceiling: int
    least: int

    def ask(self, lease: str, tier: Tier, targets: tuple[Target, ...], *, primary: bool = True) -> Ask:
        return Ask(
            lease=lease,
            expected=self.expected,
            first_hold=self.first_hold,
            ceiling=self.ceiling,
            least=self.least,
            on_cap=tier.on_cap,
            primary=primary,
            targets=targets,
        )


def generation(size: Size, tier: Tier, *, streamed: bool) -> Plan:
    """A call whose answers are generated."""
    asked = size.asked_output if size.asked_output is not None else tier.default_output_tokens
    bounds = (asked, tier.max_output_tokens, _context_room(size))
    limit = min((bound for bound in bounds if bound is not None), default=UNKNOWN_CONTEXT)
    ceiling = min(MOST, size.prompt_bound + size.choices * limit)
    expected = min(ceiling, size.prompt_estimate + size.choices * min(size.learned_output, limit))
    least = min(ceiling, size.prompt_bound + size.choices * min(tier.min_output_tokens, limit))
    first_hold = min(ceiling, max(expected, size.prompt_bound + SLICE, least)) if streamed else ceiling
    lowered = size.asked_output is not None and limit < size.asked_output
    return Plan(limit, lowered, expected, first_hold, ceiling, least)


def reading(size: Size) -> Plan:
    """A call that only reads its prompt (embeddings, rerank, score): nothing is generated."""
    bound = size.prompt_bound
    return Plan(None, False, min(bound, size.prompt_estimate), bound, bound, bound)


def _context_room(size: Size) -> int | None:
    """What the context can leave for the answer at most. Below that the engine itself cuts or refuses: by a mere bound of
    the prompt answers would be cut that have room."""
    if size.context is None or size.context <= size.prompt_floor:
        return None
    return size.context - size.prompt_floor


def clamped(plan: Plan, granted: int, size: Size) -> Plan:
    """The same call after the cap granted only `granted` tokens in all."""
    if plan.output_limit is None or granted >= plan.ceiling:
        return plan
    limit = max(1, (granted - size.prompt_bound) // size.choices)
    return Plan(limit, True, min(plan.expected, granted), min(plan.first_hold, granted), granted, plan.least)


def fits_context(context: int | None, size: Size, *, least_output: int) -> bool:
    """Whether the prompt and the least output fit a target's context: by the exact size if known, else by the estimate."""
    if context is None or size.prompt_bound + least_output <= context:
        return True
    return not size.exact and size.prompt_estimate + least_output <= context


@dataclass(frozen=True, slots=True)
class Cover:
    """What a running stream's hold covers. `covered` None: the store did not say, so what was covered still is."""

    extended: bool
    covered: int | None
    left: int


@dataclass(slots=True)
class Governor:
    """When a stream must ask for more of the cap, and for how much. Amounts are tokens in all, prompt and answers.

    `used` is what it surely used, `most` what it may have used by now: the one is reported, the other kept within what
    is covered. It asks for a slice half a slice before it runs out. Where a whole one does not fit any more it takes the
    rest; where nothing is left, it asks once more when what it holds is delivered, and then the stream ends.

    It covers no more than the `ceiling` until the engine goes beyond it: then that counted its prompt above our bound,
    or does not obey its limit.
    """

    covered: int
    ceiling: int
    reported: int = 0
    refused: bool = False
    _rest: bool = False
    """The last ask was for what was left."""

    def asks(self, used: int, most: int) -> int | None:
        """What to be covered for now, or None while there is nothing to say."""
        if self.covered < self.ceiling:
            if most + SLICE // 2 > self.covered and (not self.refused or self._out(most)):
                return min(self.ceiling, max(most, self.covered) + SLICE)
        elif self._out(most):
            return most + SLICE
        return self.covered if used - self.reported >= SLICE else None

    def hears(self, used: int, asked: int, cover: Cover) -> int | None:
        """Takes the answer in; a smaller amount to ask for at once, or None."""
        self.reported = used
        if cover.covered is not None:
            self.covered = cover.covered
        rest, self._rest = self._rest, False
        if cover.extended or asked <= self.covered:
            self.refused = rest
            return None
        self.refused = True
        if rest or cover.left <= 0:
            return None
        self._rest = True
        return self.covered + cover.left

    def spent(self, most: int) -> bool:
        return self.refused and self._out(most)

    def _out(self, most: int) -> bool:
        """Whether all that is covered may be used up; at the ceiling the engine ends by itself."""
        return most >= self.covered if self.covered < self.ceiling else most > self.covered
