"""A failover to a replica that had not heard everything, and a node of a cluster that is lost, under load."""

from __future__ import annotations

from contextlib import AsyncExitStack
from urllib.parse import quote

from redis.crc import key_slot

from quotas.policy import Policy
from quotas.store import Account
from tests.cases.wire import eventually
from tests.faults import bounds
from tests.faults.load import Load, account, all_up, serial, sidecars, spent, told_all
from tests.faults.servers import Cluster, clustered, replicated
from tests.faults.truth import Truth

DEFAULTS = Policy(max_parallel=None)
CAP, BURST = 50_000, 4_000


async def test_a_failover_costs_at_most_what_the_replica_had_not_heard() -> None:
    """The replica is cut off for a while before the master dies, so that there is something to lose."""
    who, truth = account(DEFAULTS), Truth(DEFAULTS)
    async with replicated() as servers, sidecars(servers.url, servers.url, on_down="deny") as stores:
        await spent(stores[0], who, truth, CAP // 4)
        await servers.in_step()
        servers.wire.cut()
        heard = truth.used
        async with Load(stores, who, truth) as load:
            await load.until(lambda: truth.used > CAP // 2)
            servers.master.kill()
            unheard = truth.used + truth.held - heard
            await servers.failed_over()
            await eventually(lambda: all_up(stores), bool, 20.0)
            await load.until(lambda: truth.used > CAP)
            await load.further(60)
    print(f"failover, deny: {truth.most_over} over, {unheard} not heard")
    assert 0 < truth.most_over["hour"] <= unheard
    assert truth.most_over["burst"] <= unheard


async def test_a_lost_node_of_a_cluster_costs_no_more_than_an_absent_store() -> None:
    async with clustered() as cluster, sidecars(cluster.url, cluster.url, on_down="local") as stores:
        whose = {number: on_node(cluster, number) for number in (0, 2)}
        truths = {number: Truth(DEFAULTS) for number in whose}
        async with AsyncExitStack() as stack:
            loads = [await stack.enter_async_context(Load(stores, whose[n], truths[n])) for n in whose]
            for number, load in zip(whose, loads, strict=True):
                await load.until(lambda truth=truths[number]: truth.used > CAP // 8)  # type: ignore[misc]
            cluster.nodes[2].kill()
            for load in loads:
                await load.further(300)
        cluster.nodes[2].start()
        await eventually(lambda: all_up(stores), bool, 30.0)
        await told_all(stores, whose[0], truths[0])
    for number, truth in truths.items():
        print(f"node 2 lost, a key on node {number}: {truth.most_over} over")
        assert truth.most_over["hour"] <= bounds.while_away(CAP, 2)
        assert truth.most_over["burst"] <= bounds.while_away(BURST, 2)


def on_node(cluster: Cluster, number: int) -> Account:
    """An account whose keys lie on that node."""
    while True:
        who = account(DEFAULTS, f"on a node {next(serial)}")
        if cluster.node_of(key_slot(quote(who.slot, safe="").encode())) is cluster.nodes[number]:
            return who
