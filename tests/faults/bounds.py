"""How far each promise may be missed at most, as formulas: docs/guarantees.md prints them, and the tests here hold to them.

All amounts are tokens of one window of one scope.
"""

from __future__ import annotations

from math import ceil

from meter.callers.tiers import Tier
from meter.gateway.plan import SLICE
from quotas.policy import Limit


def by_the_engine(running: int, choices: int, event_tokens: int = 1) -> int:
    """The cap: what an event of the engine may bring beyond the hold, in each running stream."""
    return running * choices * event_tokens


def by_long_answers(running: int, choices: int, output_limit: int) -> int:
    """The rate: what running answers may use beyond what was expected of them; it is paid back as debt."""
    return running * choices * output_limit


def while_away(limit: int, sidecars: int) -> int:
    """`local`: the sidecar that returns first may be sold what is left while the others' shares are not told yet; or what
    is left was nothing, and all but the one that was told so spend their shares."""
    return limit - ceil(limit / sidecars)


def counted_twice(limit: int, sidecars: int) -> int:
    """`local`, and the store came back empty: what the others spent of their shares in the second before one of them filled
    it may stand in the ledger and be told once more. This errs towards refusing."""
    return while_away(limit, sidecars)


def of_a_killed_sidecar(streams: int) -> int:
    """Tokens that were delivered and not yet reported when it was killed: less than a slice a stream."""
    return streams * SLICE


def not_yet_carried(running: int, hold: int) -> int:
    """What running requests hold that a store which lost their leases is not told of yet."""
    return running * hold


# ---- for the defaults ------------------------------------------------------------------------------------------------

TIER = Tier()
_PARALLEL, _CHOICES, _OUTPUT = (number or 0 for number in (TIER.max_parallel, TIER.max_n, TIER.max_output_tokens))
_RATE, _BURST, _CAP = (terms.limit for terms in (TIER.rate, TIER.burst, TIER.cap) if terms is not None)


def _slot(limit: Limit) -> str:
    return f"{limit.slot} s"


FOR_THE_DEFAULTS = {
    "cap": f"{by_the_engine(_PARALLEL, _CHOICES):,}",
    "rate": f"{by_long_answers(_PARALLEL, 1, _OUTPUT):,}",
    "burst": f"{_BURST.tokens:,}",
    "store away, local": f"{while_away(_CAP.tokens, 2):,}",
    "sidecar killed": f"{of_a_killed_sidecar(_PARALLEL):,}",
    "slots": f"{_slot(_RATE)}, {_slot(_CAP)}",
}
"""What the document's row of that promise must say."""
