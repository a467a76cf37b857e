"""Redis in every form: with a password, behind TLS, by Sentinel, as a cluster; and what a URL may say of it."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from quotas import nodes
from quotas.policy import Limit, Policy
from quotas.store import Account, Ask, Scope, StoreUnavailable
from tests.cases.wire import eventually
from tests.faults.servers import SLOTS, Cluster, clustered, replicated
from tests.quotas.stores import EmptyRedis
from tests.services.redis import RedisServer

CAPPED = Policy(None, None, Limit(1_000, 3_600), None)
TLS = Path(__file__).parent / "tls"
serial = itertools.count()


def account(name: str = "k") -> Account:
    return Account(f"key:{name}", (Scope("key", name, CAPPED),))


def ask(lease: str, tokens: int) -> Ask:
    return Ask(lease, tokens, tokens, tokens, tokens)


async def used(store: EmptyRedis, who: Account) -> tuple[int, int]:
    window = (await store.peek(who)).windows[-1]
    return window.used, window.held


@asynccontextmanager
async def opened(url: str, timeout: float = 1.0) -> AsyncIterator[EmptyRedis]:
    store = EmptyRedis(url, timeout=timeout)
    yield store
    await store.close()


async def spend(store: EmptyRedis, who: Account, tokens: int) -> None:
    lease = f"spent {next(serial)}"
    assert (await store.admit(who, ask(lease, tokens))).kind == "base"
    assert await store.settle(who, lease, tokens)


async def works(call: Callable[[], Awaitable[object]]) -> object:
    """True, or why not."""
    try:
        await call()
    except StoreUnavailable as trouble:
        return str(trouble)
    return True


# ---- URLs -------------------------------------------------------------------------------------------------------------

URLS: list[tuple[str, dict[str, Any]]] = [
    ("redis://h", {"form": "single", "nodes": (("h", 6_379),)}),
    ("redis://h:1/3", {"nodes": (("h", 1),), "db": 3}),
    ("redis://:p%40:w@h", {"username": None, "password": "p@:w"}),
    ("redis://u%3A:p@[::1]:7/0", {"nodes": (("::1", 7),), "username": "u:", "password": "p"}),
    (
        "redis+sentinel://a:1,b/svc/2",
        {"form": "sentinel", "nodes": (("a", 1), ("b", 26_379)), "service": "svc", "db": 2},
    ),
    ("redis+cluster://:p@a,b:7", {"form": "cluster", "nodes": (("a", 6_379), ("b", 7)), "password": "p"}),
]


@pytest.mark.parametrize(("url", "says"), URLS)
def test_a_url_says_where_and_as_whom(url: str, says: dict[str, Any]) -> None:
    place = nodes.parse(url)
    found = {name: getattr(place, name, None) or getattr(place.login, name, None) for name in says}
    assert found == says
    assert place.login.tls is None


@pytest.mark.parametrize("form", ["rediss://h", "rediss+sentinel://h/svc", "rediss+cluster://h"])
def test_with_tls_certificates_are_checked_unless_told_otherwise(form: str) -> None:
    checked, unchecked = nodes.parse(form).login.tls, nodes.parse(f"{form}?ssl_check_hostname=false").login.tls
    assert checked is not None and unchecked is not None
    assert (checked.verify_mode, checked.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert (unchecked.verify_mode, unchecked.check_hostname) == (ssl.CERT_REQUIRED, False)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://h", "must be redis://host"),
        ("redis://", "'' is not host:port"),
        ("redis://h:port", "'h:port' is not host:port"),
        ("redis://h:0", "'h:0' is not host:port"),
        ("redis://h:65536", "'h:65536' is not host:port"),
        ("redis+http://h", "must be redis://host"),
        ("redis://a,b", "several hosts"),
        ("redis://h/x", "'x' where the number of a database"),
        ("redis://h/1/2", "'1/2' where the number of a database"),
        ("redis+sentinel://h", "must name the service"),
        ("redis+cluster://h/1", "only database 0"),
        ("redis://h?timeout=1", "unknown option: timeout"),
        ("redis://h?ssl_ca_certs=x", "unknown option: ssl_ca_certs"),
        ("rediss://h?ssl_ca_certs=/nowhere", "certificates that cannot be read"),
    ],
)
def test_a_wrong_url_is_told_what_is_wrong(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("?", r"\?")):
        nodes.parse(url)


# ---- one Redis --------------------------------------------------------------------------------------------------------


async def test_a_password_a_user_and_a_database(broken_server: RedisServer) -> None:
    """The user may do no more than docs/operations.md says."""
    allowed = "on >pass~weir:* +@read +@write +fcall +function|load +time +auth +select".replace("pass~", "pass ~")
    async with Redis(port=broken_server.port, password=None) as admin:
        await admin.execute_command("ACL", "SETUSER", "weir", *allowed.split())
        await admin.config_set("requirepass", "se@cret")
    host = f"127.0.0.1:{broken_server.port}"
    async with opened(f"redis://:se%40cret@{host}/3") as store, opened(f"redis://weir:pass@{host}/3") as user:
        await spend(store, account(), 100)
        assert await used(user, account()) == (100, 0)
        await user.ping()
        await spend(user, account(), 100)
        await user.renew([(account(), "nobody")])
        await user.forget(account().slot)
    async with opened(f"redis://:se%40cret@{host}/0") as elsewhere:
        assert not (await elsewhere.peek(account())).seeded
    for wrong in ("redis://:other@", "redis://weir:other@", "redis://"):
        async with opened(f"{wrong}{host}/0") as store:
            with pytest.raises(StoreUnavailable, match=r"WRONGPASS|NOAUTH") as trouble:
                await store.ping()
            assert "other" not in str(trouble.value) + repr(store)


@asynccontextmanager
async def behind_tls(port: int) -> AsyncIterator[int]:
    """A port that speaks TLS and passes on to another that does not."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(TLS / "certificate.pem", TLS / "key.pem")
    ways: set[asyncio.Task[None]] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", port)
        ways.update((asyncio.create_task(copy(reader, there[1])), asyncio.create_task(copy(there[0], writer))))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    yield server.sockets[0].getsockname()[1]
    server.close()
    for way in ways:
        way.cancel()
    await asyncio.gather(*ways, return_exceptions=True)


async def test_tls_with_a_certificate_of_ones_own(redis_server: RedisServer) -> None:
    async with behind_tls(redis_server.port) as port:
        url, who = f"rediss://127.0.0.1:{port}/0", account(f"tls {next(serial)}")
        async with opened(f"{url}?ssl_ca_certs={TLS / 'certificate.pem'}") as store:
            await spend(store, who, 100)
            assert await used(store, who) == (100, 0)
        async with opened(url) as store:
            with pytest.raises(StoreUnavailable, match="certificate verify failed"):
                await store.ping()
        async with opened(f"redis://127.0.0.1:{port}/0") as store:
            with pytest.raises(StoreUnavailable, match="cannot be reached"):
                await store.ping()


async def test_functions_that_were_flushed_are_loaded_again(redis_server: RedisServer) -> None:
    who = account(f"flushed {next(serial)}")
    async with opened(redis_server.url) as store, Redis.from_url(redis_server.url) as plain:
        for _ in range(3):
            await asyncio.gather(*(spend(store, who, 5) for _ in range(20)))
            await plain.function_flush()
        assert await used(store, who) == (300, 0)


async def test_sidecars_count_each_other(broken_server: RedisServer) -> None:
    async with opened(broken_server.url) as one:
        await one.ping()
        async with opened(broken_server.url) as other:
            await other.renew([])
            assert (one.sidecars, other.sidecars) == (1, 2)
            await one.ping()
            assert one.sidecars == 2
        async with Redis.from_url(broken_server.url) as plain:
            assert 0 < await plain.pttl("weir:sidecars") <= 60_000


# ---- Sentinel ---------------------------------------------------------------------------------------------------------


async def test_sentinel_names_the_master_and_after_a_failover_the_next() -> None:
    """T057"""
    async with replicated() as servers, opened(servers.url) as store:
        who = account("failed over")
        await spend(store, who, 100)
        assert (await store.admit(who, ask("stream", 200))).admitted
        await servers.in_step()
        servers.master.kill()
        assert await works(partial(store.peek, who)) is not True
        await servers.failed_over()
        await eventually(lambda: works(partial(spend, store, who, 50)), lambda works: works is True, 10.0)
        assert await store.settle(who, "stream", 150)
        assert not await store.settle(who, "stream", 150)
        assert await used(store, who) == (300, 0)


async def test_a_service_that_no_sentinel_knows() -> None:
    async with replicated() as servers:
        unknown = servers.url.replace("/weir/", "/other/").replace("//", "//127.0.0.1:1,")
        async with opened(unknown) as store:
            with pytest.raises(StoreUnavailable, match="the sentinels do not know other"):
                await store.ping()
        async with opened(servers.url.replace("//", "//127.0.0.1:1,")) as store:
            await store.ping()


# ---- cluster ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def in_cluster(cluster: Cluster, seeds: int) -> AsyncIterator[EmptyRedis]:
    """A store that was told some of the nodes. A cluster takes no writes in its first seconds."""
    async with opened(
        f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in cluster.nodes[:seeds])}"
    ) as store:
        await eventually(lambda: works(store.ping), lambda works: works is True, 30.0)
        yield store


async def test_accounts_of_a_cluster_spread_over_its_nodes() -> None:
    """T055"""
    async with clustered() as cluster, in_cluster(cluster, 1) as store:
        accounts = [account(f"spread {n}") for n in range(100)]
        await asyncio.gather(*(spend(store, who, n + 1) for n, who in enumerate(accounts)))
        assert [await used(store, who) for who in accounts] == [(n + 1, 0) for n in range(100)]
        await store.renew([(who, "nobody") for who in accounts])
        for node in cluster.nodes:
            async with Redis(port=node.port) as plain:
                assert len([key async for key in plain.scan_iter("weir:*:w")]) > 10


async def move_slots(cluster: Cluster, source: int, target: int) -> None:
    """Slots of one node, empty ones, to another; a node without any would become a replica."""
    async with Redis(port=cluster.nodes[target].port) as plain:
        name = await plain.execute_command("CLUSTER", "MYID")
    slots = [slot for slot in range(SLOTS) if cluster.node_of(slot) is cluster.nodes[source]][1:]
    for number in (target, source, *{0, 1, 2} - {target, source}):
        async with Redis(port=cluster.nodes[number].port) as plain, plain.pipeline(transaction=False) as pipeline:
            await plain.flushall()
            for slot in slots:
                pipeline.execute_command("CLUSTER", "SETSLOT", slot, "NODE", name)
            await pipeline.execute()


async def test_a_slot_that_moved_is_followed() -> None:
    async with clustered() as cluster, in_cluster(cluster, 3) as store:
        await move_slots(cluster, 0, 2)
        accounts = [account(f"moved {n}") for n in range(30)]
        await asyncio.gather(*(spend(store, who, n + 1) for n, who in enumerate(accounts)))
        assert [await used(store, who) for who in accounts] == [(n + 1, 0) for n in range(30)]


@asynccontextmanager
async def replica_of(cluster: Cluster, number: int) -> AsyncIterator[None]:
    with RedisServer("--cluster-enabled", "yes", "--cluster-node-timeout", "1000") as replica:
        async with Redis(port=cluster.nodes[number].port) as plain:
            name = await plain.execute_command("CLUSTER", "MYID")
        async with Redis(port=replica.port) as plain:
            await plain.execute_command("CLUSTER", "MEET", "127.0.0.1", cluster.nodes[number].port)

            async def met() -> object:
                return await plain.execute_command("CLUSTER", "NODES")

            async def link() -> object:
                return (await plain.info("replication")).get("master_link_status")

            await eventually(met, lambda known: name.decode() in str(known), 20.0)
            await plain.execute_command("CLUSTER", "REPLICATE", name)
            await eventually(link, lambda status: status == "up", 30.0)
        yield


async def test_a_node_of_a_cluster_is_lost_and_its_replica_takes_over() -> None:
    async with clustered() as cluster, replica_of(cluster, 2), in_cluster(cluster, 2) as store:
        accounts = [account(f"node lost {n}") for n in range(30)]
        for who in accounts:
            await spend(store, who, 10)
        await cluster.whole()
        cluster.nodes[2].kill()
        whose = [await works(partial(store.peek, who)) is True for who in accounts]
        assert 0 < whose.count(True) < len(accounts)
        assert await works(store.ping) is not True
        await eventually(lambda: works(store.ping), lambda works: works is True, 30.0)
        for who in accounts:
            await spend(store, who, 10)
        assert {await used(store, who) for who in accounts} <= {(20, 0), (10, 0)}
