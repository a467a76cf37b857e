"""What a store says so that its guard can tell what was lost, on both stores."""

from __future__ import annotations

from uuid import uuid4

from quotas.policy import Limit, Policy
from quotas.store import Account, Ask, QuotaStore, Scope, Seed
from tests.quotas.histories import Clock

CAPPED = Policy(None, None, Limit(1_000, 3_600), None)


def account() -> Account:
    name = uuid4().hex
    return Account(f"key:{name}", (Scope("key", name, CAPPED),))


def ask(lease: str, tokens: int) -> Ask:
    return Ask(lease, tokens, tokens, tokens, tokens)


async def test_a_settlement_says_whether_its_lease_was_known(store: QuotaStore, clock: Clock) -> None:
    who = account()
    for lease in ("ends", "expires"):
        assert (await store.admit(who, ask(lease, 100))).admitted
    assert await store.settle(who, "ends", 50)
    assert not await store.settle(who, "ends", 50)
    clock.now += 40
    assert await store.settle(who, "expires", 60)
    assert not await store.settle(who, "nobody", 10)


async def test_a_view_says_since_when_the_slot_is_known(store: QuotaStore, clock: Clock) -> None:
    who = account()
    assert ((await store.peek(who)).seeded, (await store.peek(who)).since) == (False, 0.0)
    await store.seed(who.slot, Seed())
    seeded, clock.now = clock.now, clock.now + 7
    assert (await store.peek(who)).since == seeded
    await store.forget(who.slot)
    await store.seed(who.slot, Seed())
    assert (await store.peek(who)).since == clock.now


async def test_a_sparse_window_can_be_laid_out_anew(store: QuotaStore, clock: Clock) -> None:
    """Slots in which nothing was charged lie nowhere."""
    who = account()
    await store.seed(who.slot, Seed())
    for lease in ("early", "late"):
        assert (await store.admit(who, ask(lease, 100))).admitted
        await store.settle(who, lease, 100)
        clock.now += 1_800
    longer = Policy(None, None, Limit(1_000, 7_200), None)
    wider = Account(who.slot, (Scope("key", who.scopes[0].name, longer),))
    assert (await store.admit(wider, ask("after", 100))).admitted
    assert [(window.used, window.held) for window in (await store.peek(wider)).windows] == [(200, 100)]
