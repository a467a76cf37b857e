"""Several processes at once against one Redis, in its own time: their answers, put in the order of that time, keep the rule."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections import Counter
from typing import Any

from hypothesis import settings

from quotas.policy import Policy
from quotas.store import Seed
from tests.quotas.histories import exact
from tests.quotas.monitor import Monitor, RuleBroken
from tests.quotas.sidecar import CHEAP, KEY, KEYS, LEASE_SECONDS, TEAM, account, contested
from tests.quotas.stores import EmptyRedis
from tests.services.redis import RedisServer

DEEP = settings.default.max_examples // 100
"""1 in quick runs, 10 in deep ones."""

Event = dict[str, Any]


async def sidecars(url: str, *works: tuple[object, ...]) -> list[Event]:
    """What all of them were told, each running as a process of its own."""
    words = [("-m", "tests.quotas.sidecar", url, *map(str, work)) for work in works]
    pipe = asyncio.subprocess.PIPE
    processes = [await asyncio.create_subprocess_exec(sys.executable, *each, stdout=pipe) for each in words]
    try:
        printed = await asyncio.gather(*(process.communicate() for process in processes))
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
    assert [process.returncode for process in processes] == [0] * len(works)
    return [event for output, _ in printed for event in json.loads(output)]


class Watch:
    """One monitor for each scope, and for the target of each key; time is seconds from the first event on."""

    def __init__(self, events: list[Event]) -> None:
        self.events = sorted(events, key=lambda event: event["at"])
        self.since = self.events[0]["at"]
        self.keys = [Monitor(exact(KEY), LEASE_SECONDS) for _ in range(KEYS)]
        self.team = Monitor(exact(TEAM), LEASE_SECONDS)
        cheap = exact(Policy(CHEAP.rate, None, None, None))
        self.targets = [Monitor(cheap, LEASE_SECONDS) for _ in range(KEYS)]
        self.whose: dict[str, tuple[int, str | None]] = {}

    def run(self) -> None:
        for event in self.events:
            now = (event["at"] - self.since) / 1e6
            getattr(self, event["what"])(now, event)

    def scopes(self, key: int) -> list[Monitor]:
        return [self.keys[key], self.team]

    def watchers(self, lease: str) -> list[Monitor]:
        key, target = self.whose[lease]
        return self.scopes(key) + ([self.targets[key]] if target else [])

    def admit(self, now: float, event: Event) -> None:
        scopes, expected = self.scopes(event["key"]), event["expected"]
        for scope, said in zip(scopes, event["answers"], strict=bool(event["answers"])):
            if said == "no":
                scope.overage(now, expected)
        if event["kind"] in ("parallel", "cap", "rate"):
            self.refused(now, event)
            return
        self.whose[event["lease"]] = (event["key"], event["target"])
        overflow = event["kind"] == "overflow"
        for scope, said in zip(scopes, ["overflow"] * 2 if overflow else event["answers"], strict=True):
            scope.admitted(now, event["lease"], said, expected, event["hold"])
        if overflow:
            self.targets[event["key"]].admitted(now, event["lease"], "base", expected, event["hold"])
        if event["hold"] < event["first_hold"] and all(scope._cap_fits(now, 1, slack=True) for scope in scopes):
            raise RuleBroken(f"lowered at {now}, though more fits even with a longer slot: {event}")

    def refused(self, now: float, event: Event) -> None:
        whose = self.scopes(event["key"])[0 if event["scope"] == "key" else 1]
        if event["kind"] == "parallel":
            whose.refused_by_parallel(now)
        elif event["kind"] == "cap":
            whose.refused_by_cap(now, event["need"])
        else:
            assert "no" in event["answers"]

    def progress(self, now: float, event: Event) -> None:
        lease, consumed, extend = event["lease"], event["consumed"], event["extend"]
        scopes = self.scopes(self.whose[lease][0])
        for watcher in self.watchers(lease):
            watcher.progressed(now, lease, consumed, extend if event["extended"] and watcher in scopes else None)
        assert event["expired"] == (lease not in scopes[0].leases)
        if extend is not None and not event["extended"] and not event["expired"]:
            mine = scopes[0].leases[lease]
            more = max(0, extend - mine.consumed - mine.cap_hold)
            if all(scope._cap_fits(now, more, slack=True) for scope in scopes):
                raise RuleBroken(f"{lease} not extended to {extend} at {now}, though it fits even with a longer slot")

    def settle(self, now: float, event: Event) -> None:
        for watcher in self.watchers(event["lease"]):
            watcher.finished(now, event["lease"], event["consumed"])


async def test_processes_that_share_a_redis_keep_the_rule_together(redis_server: RedisServer) -> None:
    store = EmptyRedis(redis_server.url, timeout=10, lease_seconds=LEASE_SECONDS)
    await store.forget("team:t")
    await store.seed("team:t", Seed())
    events = await sidecars(redis_server.url, *(("mixed", seed, 4 + DEEP) for seed in range(4)))
    watch = Watch(events)
    watch.run()
    kinds = Counter(event["kind"] for event in events if event["what"] == "admit")
    assert {"base", "burst", "rate"} <= set(kinds), kinds
    await check_the_end(store, watch)
    await store.close()


async def check_the_end(store: EmptyRedis, watch: Watch) -> None:
    """What is left in Redis, window by window: never lower than exact windows, higher by at most what a slot holds."""
    for key in range(KEYS):
        view = await store.peek(account(key))
        now = view.now - watch.since / 1e6
        for monitor, window in itertools.product(watch.scopes(key), view.windows):
            if window.name == "hour" and window.scope == ("team" if monitor is watch.team else "key"):
                exactly = monitor.counts(now)
                assert exactly["cap_used"] <= window.used <= monitor._cap_used(now, True)
                assert window.held == exactly["cap_held"]


async def test_fifty_at_once_from_five_processes_against_room_for_ten(redis_server: RedisServer) -> None:
    """T042: exactly ten each time, a hundred times or a thousand."""
    rounds = 100 * DEEP
    store = EmptyRedis(redis_server.url, timeout=10)
    for number in range(rounds):
        await store.forget(contested(number).slot)
        await store.seed(contested(number).slot, Seed())
    events = await sidecars(redis_server.url, *[("race", rounds, 10)] * 5)
    admitted = Counter(event["round"] for event in events if event["admitted"])
    assert admitted == dict.fromkeys(range(rounds), 10)
    assert len(events) == 50 * rounds
    await store.close()
