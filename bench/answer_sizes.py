"""What learning the size of answers is worth, and what it costs: beside holds of the whole `max_tokens`, in simulated hours.

Answers are as long as in practice: lognormal, the 99th percentile 20 times the median. The same requests are put to two real
stores in memory, on a simulated clock: one is told to expect `max_tokens` of each, the other what `AnswerSizes` learned.
What finds no room in the rate overflows. Everything is seeded: the same table every time, on every machine.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import math
import random
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist

sys.path.insert(0, str(Path(__file__).parent.parent))

from engine_adapter.prompt_size import AnswerSizes
from meter.callers.tiers import Tier
from meter.gateway import plan
from quotas.memory import MemoryStore
from quotas.policy import Limit, Policy
from quotas.store import Account, Scope, Seed, Target

SEED = 20
MEDIAN, SPREAD = 50, 20
"""Tokens of the median answer, and the ratio of the 99th percentile to it."""
SIGMA = math.log(SPREAD) / NormalDist().inv_cdf(0.99)
MAX_TOKENS = 1_024
"""What every caller asks for, to be on the safe side."""
PROMPT = 40
TOKENS_PER_SECOND = 50.0
LOADS = (0.5, 0.8, 1.2)
"""Offered tokens, as a part of the rate."""
POLICIES = (
    ("2,000/min", Policy(Limit(2_000, 60), None, None, None)),
    ("2,000/min, burst", Policy(Limit(2_000, 60), Limit(4_000, 5), None, None)),
    ("20,000/min, burst", Policy(Limit(20_000, 60), Limit(40_000, 5), None, None)),
)
CHEAPER = (Target("cheaper"),)
KEY, MODEL = "key", "model"


# ---- the requests ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """Seconds from the start; tokens of its answer, which max_tokens may have cut."""

    at: float
    answer: int


def requests(rate: Limit, load: float, number: int) -> list[Request]:
    """Independent callers: exponential gaps, so long that `load` of the rate is offered."""
    chance = random.Random(SEED)
    answers = [_answer(chance) for _ in range(number)]
    mean_gap = (PROMPT + sum(answers) / number) * rate.seconds / (rate.tokens * load)
    moments = itertools.accumulate(chance.expovariate(1 / mean_gap) for _ in range(number))
    return [Request(at, answer) for at, answer in zip(moments, answers, strict=True)]


def _answer(chance: random.Random) -> int:
    return min(MAX_TOKENS, max(1, round(chance.lognormvariate(math.log(MEDIAN), SIGMA))))


# ---- playing them ----------------------------------------------------------------------------------------------------


@dataclass
class Play:
    """One store under the requests. `charges` are what the primary route used: (second, tokens), in order of time."""

    policy: Policy
    learns: bool
    now: float = 0.0
    overflowed: int = 0
    charges: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._store = MemoryStore(lambda: self.now)
        self._account = Account("key:k", (Scope("key", "k", self.policy),))
        self._sizes = AnswerSizes()
        self._tier = Tier()
        self._due: list[tuple[float, int, Callable[[], Awaitable[None]]]] = []
        self._serial = itertools.count()

    async def run(self, asked: Sequence[Request]) -> None:
        await self._store.seed(self._account.slot, Seed())
        for number, request in enumerate(asked):
            self._later(request.at, lambda lease=f"{number}", request=request: self._begin(lease, request))  # type: ignore[misc]
        while self._due:
            self.now, _, step = heapq.heappop(self._due)
            await step()

    def _later(self, at: float, step: Callable[[], Awaitable[None]]) -> None:
        heapq.heappush(self._due, (at, next(self._serial), step))

    async def _begin(self, lease: str, request: Request) -> None:
        default = self._tier.default_output_tokens or MAX_TOKENS
        learned = self._sizes.expected_output(KEY, MODEL, default) if self.learns else MAX_TOKENS
        size = plan.Size(PROMPT, PROMPT, 1, MAX_TOKENS, learned, None)
        ask = plan.generation(size, self._tier, streamed=True).ask(lease, self._tier, CHEAPER)
        verdict = await self._store.admit(self._account, ask)
        primary = verdict.kind != "overflow"
        self.overflowed += not primary
        self._later(self.now, lambda: self._go_on(lease, request, 0, primary=primary))

    async def _go_on(self, lease: str, request: Request, told: int, *, primary: bool) -> None:
        """Reports a slice when it is used up, as a stream does, and what is left at the end."""
        reached = min(request.answer, told + plan.SLICE)
        self._later(
            self.now + (reached - told) / TOKENS_PER_SECOND,
            lambda: self._report(lease, request, told, reached, primary=primary),
        )

    async def _report(self, lease: str, request: Request, told: int, reached: int, *, primary: bool) -> None:
        if primary:
            self.charges.append((self.now, reached - told + (0 if told else PROMPT)))
        if reached < request.answer:
            await self._store.progress(self._account, lease, PROMPT + reached)
            return await self._go_on(lease, request, reached, primary=primary)
        await self._store.settle(self._account, lease, PROMPT + reached)
        self._sizes.learn(KEY, MODEL, request.answer)
        return None


# ---- what came of it -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """`overflowed`: the part of the requests. `most_over`, `mean_over`: tokens used in the window beyond what it allows,
    the most in any, and the mean over the windows that end with each second. `owed`: the largest debt. `of_hour`: the most
    tokens in any hour, as a part of what the rate makes in an hour."""

    overflowed: float
    most_over: int
    mean_over: float
    owed: int
    of_hour: float


def outcome(play: Play, asked: Sequence[Request]) -> Outcome:
    allowed, span = _allowed(play.policy)
    sums = list(_sums(play.charges, span))
    each_second = [max(0, tokens - allowed) for sampled, tokens in sums if sampled]
    assert play.policy.rate is not None
    hour_of_rate = play.policy.rate.tokens / play.policy.rate.seconds * 3600
    return Outcome(
        play.overflowed / len(asked),
        max(max(0, tokens - allowed) for _, tokens in sums),
        sum(each_second) / len(each_second),
        _most_owed(play.charges, play.policy.rate),
        max(tokens for _, tokens in _sums(play.charges, 3600)) / hour_of_rate,
    )


def _allowed(policy: Policy) -> tuple[int, float]:
    """The most tokens, in so many seconds, that the rule grants on the primary: the rate, or the burst in its repay span."""
    assert policy.rate is not None
    if policy.burst is None or policy.repay_seconds is None:
        return policy.rate.tokens, policy.rate.seconds
    return policy.burst.tokens, policy.repay_seconds


def _sums(charges: Sequence[tuple[float, int]], span: float) -> Iterator[tuple[bool, int]]:
    """(whether it is a full second, tokens in the window that ends there): at every charge and at every second."""
    seconds = [(float(second), True, 0) for second in range(int(charges[-1][0]))]
    moments = sorted([(at, False, tokens) for at, tokens in charges] + seconds)
    total, first = 0, 0
    for at, sampled, tokens in moments:
        total += tokens
        while first < len(charges) and charges[first][0] <= at - span:
            total -= charges[first][1]
            first += 1
        yield sampled, total


def _most_owed(charges: Sequence[tuple[float, int]], rate: Limit) -> int:
    owed, most, then = 0.0, 0.0, 0.0
    for at, tokens in charges:
        owed, then = max(0.0, owed - (at - then) * rate.tokens / rate.seconds) + tokens, at
        most = max(most, owed)
    return round(most)


async def played(policy: Policy, asked: Sequence[Request], *, learns: bool) -> Outcome:
    play = Play(policy, learns)
    await play.run(asked)
    return outcome(play, asked)


HEAD = """\
| key | offered | overflowed: `max_tokens` held | overflowed: learned | allowed | most over | mean over | largest debt | fullest hour |
|---|---|---|---|---|---|---|---|---|"""


async def table(number: int) -> None:
    print(HEAD)
    for (name, policy), load in itertools.product(POLICIES, LOADS):
        assert policy.rate is not None
        asked = requests(policy.rate, load, number)
        held, learned = await played(policy, asked, learns=False), await played(policy, asked, learns=True)
        assert held.most_over == 0, "what holds its ceiling can never overrun"
        allowed, span = _allowed(policy)
        print(
            f"| {name} | {load:.0%} | {held.overflowed:.1%} | {learned.overflowed:.1%} | {allowed:,} in {span:g} s "
            f"| {learned.most_over:,} ({learned.most_over / allowed:.0%}) | {learned.mean_over:,.1f} "
            f"({learned.mean_over / allowed:.2%}) | {learned.owed:,} | {learned.of_hour:.0%} |"
        )


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words.add_argument("--requests", type=int, default=10_000, help="requests put to each key (10,000)")
    asyncio.run(table(words.parse_args().requests))
