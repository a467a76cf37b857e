"""What a store was not told when a process ended, and its successor."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from quotas.guarded import GuardedStore
from quotas.redis import RedisStore
from quotas.untold import Debt
from tests.quotas.patience import eventually
from tests.quotas.test_guarded_filling import Record, account, ask, comes_to, held, spend, used
from tests.services.redis import RedisServer


@pytest.fixture
def record() -> Record:
    return Record()


def guard(server: RedisServer, record: Record, **more: Any) -> GuardedStore:
    inner = RedisStore(server.url, timeout=0.3)
    return GuardedStore(inner, clock=time.time, refill=record, on_down="local", **more)


async def handed_over(store: GuardedStore, record: Record, server: RedisServer) -> GuardedStore:
    """The successor of a process that ended now, with what it left as a note."""
    note = msgspec.msgpack.encode(store.debts())
    await store.close()
    successor = guard(server, record)
    successor.take_on(msgspec.msgpack.decode(note, type=list[Debt]))
    return successor


async def test_nothing_is_owed_while_all_is_well(broken_server: RedisServer, record: Record) -> None:
    store = guard(broken_server, record)
    assert await spend(store, record, account(), 100)
    assert store.debts() == []
    await store.close()


async def test_settlements_and_what_ended_here_are_told_once(broken_server: RedisServer, record: Record) -> None:
    store = guard(broken_server, record)
    for lease in ("unsettled", "runs"):
        assert (await store.admit(account(), ask(lease, 500))).admitted
    broken_server.pause()
    await record.end(store, account(), "unsettled", 300)
    for _ in range(4):
        assert await spend(store, record, account(), 50)
    debts = {(debt.lease, debt.tokens) for debt in store.debts() if debt.primary is None and debt.tokens}
    assert debts == {("unsettled", 300)}
    assert sum(debt.tokens for debt in store.debts() if debt.primary is not None) == 200
    broken_server.resume()
    successor = await handed_over(store, record, broken_server)

    async def told() -> bool:
        return (await used(successor, account()), await held(successor, account())) == (500, 500)

    await eventually(told)
    assert successor.debts() == []
    await successor.close()


async def test_a_store_that_is_empty_by_then_has_it_from_the_record(broken_server: RedisServer, record: Record) -> None:
    store = guard(broken_server, record)
    assert await spend(store, record, account(), 100)
    await asyncio.to_thread(broken_server.kill)
    for _ in range(4):
        assert await spend(store, record, account(), 50)
    successor = await handed_over(store, record, broken_server)
    await asyncio.to_thread(broken_server.start)
    await comes_to(successor, account(), 300)

    async def nothing_owed() -> bool:
        return successor.debts() == []

    await eventually(nothing_owed)
    assert await used(successor, account()) == 300
    await successor.close()
