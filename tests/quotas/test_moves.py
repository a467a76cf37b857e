"""What a scope's books lack of what is on record."""

from __future__ import annotations

import pytest

from quotas.moves import missing
from quotas.policy import Limit, Policy
from quotas.store import LeaseView, Past, Scope, Seed, View, Window, WindowName

NOW = 10_000.0
CAP = Limit(50_000, 3_600)
RATE = Limit(2_000, 60)
BURST = Limit(4_000, 5)


def past(ago: float, tokens: int, *, primary: bool = True, capped: bool = True, name: str = "k") -> Past:
    return Past("key", name, NOW - ago, tokens, primary, capped)


def shows(leases: tuple[LeaseView, ...] = (), **used: int) -> View:
    names: dict[str, WindowName] = {"minute": "minute", "burst": "burst", "hour": "hour"}
    windows = (Window(names[name], "key", 9, 9, tokens, 0, 9, 0.0) for name, tokens in used.items())
    return View(NOW, tuple(windows), leases)


def running(key: str, charged: int, route: str = "primary") -> LeaseView:
    return LeaseView(f"of {key}", key, "primary" if route == "primary" else "overflow", 0, charged, 1.0)


@pytest.mark.parametrize(
    ("policy", "on_record", "shown", "lacking"),
    [
        pytest.param(Policy(None, None, CAP), (past(50, 7),), shows(hour=7), (), id="all is there"),
        pytest.param(
            Policy(None, None, CAP),
            (past(3_000, 5), past(50, 7)),
            shows(hour=0),
            (past(3_000, 5, primary=False), past(50, 7, primary=False)),
            id="nothing is there",
        ),
        pytest.param(
            Policy(None, None, CAP),
            (past(3_000, 5), past(50, 7)),
            shows(hour=9),
            (past(3_000, 3, primary=False),),
            id="the oldest is missing",
        ),
        pytest.param(
            Policy(RATE, None, CAP),
            (past(55, 6), past(50, 7, primary=False), past(1, 8)),
            shows(hour=21, minute=8),
            (past(55, 6, capped=False),),
            id="missing in the rate alone",
        ),
        pytest.param(
            Policy(RATE, BURST, None),
            (past(121, 5), past(119, 6), past(1, 8)),
            shows(minute=8, burst=8),
            (past(119, 6, capped=False),),
            id="a burst reaches further back",
        ),
        pytest.param(
            Policy(None, None, CAP),
            (past(50, 7),),
            shows((running("k", 30), running("another", 4)), hour=30),
            (past(50, 7, primary=False),),
            id="what runs is not on record",
        ),
        pytest.param(
            Policy(RATE, None, CAP),
            (past(50, 7),),
            shows((running("k", 30, "overflow"),), hour=30, minute=0),
            (past(50, 7, capped=False), past(50, 7, primary=False)),
            id="nor what runs on the overflow",
        ),
        pytest.param(Policy(None, None, CAP), (past(50, 7, name="another"),), shows(hour=0), (), id="another key's"),
        pytest.param(Policy(None, None, None), (past(50, 7),), shows(), (), id="no limits"),
    ],
)
def test_what_is_missing(policy: Policy, on_record: tuple[Past, ...], shown: View, lacking: tuple[Past, ...]) -> None:
    assert missing(Scope("key", "k", policy), Seed((), on_record), NOW, shown) == lacking
