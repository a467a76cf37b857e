"""Several Redis servers that know of each other: a master with its replica and a Sentinel; a cluster."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tests.cases.proxy import _end_with_us, free_port
from tests.cases.wire import eventually
from tests.faults.relay import Relay
from tests.services.redis import RedisServer, _binary

NAME = "weir"
"""What the Sentinel calls the master."""
SLOTS = 16_384


@dataclass
class Replicated:
    """`wire` is what the replica hears its master by."""

    master: RedisServer
    replica: RedisServer
    wire: Relay
    sentinel_port: int

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.sentinel_port}/{NAME}/0"

    async def failed_over(self) -> None:
        """Waits until the replica is the master."""
        await eventually(lambda: _info(self.replica, "role"), lambda role: role == "master", 30.0)

    async def in_step(self) -> None:
        """Waits until the replica has heard all that the master knows now."""
        now = await _info(self.master, "master_repl_offset")
        await eventually(lambda: _info(self.replica, "slave_repl_offset"), lambda heard: int(heard) >= int(now), 20.0)


async def _info(server: RedisServer, field: str) -> Any:
    try:
        return (await _command(server.port, "INFO", "replication")).get(field)
    except (RedisError, OSError) as trouble:
        return f"{trouble}"


@asynccontextmanager
async def replicated() -> AsyncIterator[Replicated]:
    async with AsyncExitStack() as stack:
        master = stack.enter_context(RedisServer("--repl-diskless-sync-delay", "0"))
        wire = await stack.enter_async_context(Relay(master.port).laid())
        replica = stack.enter_context(RedisServer("--replicaof", "127.0.0.1", str(wire.port)))
        await eventually(lambda: _info(replica, "master_link_status"), lambda status: status == "up", 20.0)
        port = stack.enter_context(_sentinel(master.port))
        await eventually(partial(_command, port, "SENTINEL", "REPLICAS", NAME), lambda found: len(found) == 1, 30.0)
        yield Replicated(master, replica, wire, port)


@contextmanager
def _sentinel(master: int) -> Iterator[int]:
    """One that takes half a second of silence for death; it writes its own configuration, so that it needs a file."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="weir-sentinel-") as directory:
        file = Path(directory) / "sentinel.conf"
        file.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {directory}\n"
            f"sentinel monitor {NAME} 127.0.0.1 {master} 1\n"
            f"sentinel down-after-milliseconds {NAME} 500\n"
            f"sentinel failover-timeout {NAME} 5000\n"
        )
        process = subprocess.Popen([_binary(), str(file), "--sentinel"], stdout=subprocess.DEVNULL)
        watch = _end_with_us(process.pid)
        try:
            yield port
        finally:
            for each in (watch, process):
                each.kill()
                each.communicate()


@dataclass
class Cluster:
    nodes: list[RedisServer]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def node_of(self, slot: int) -> RedisServer:
        return self.nodes[slot * len(self.nodes) // SLOTS]

    async def whole(self) -> None:
        """Waits until every node knows the owners of all slots, and reaches them."""
        for node in self.nodes:
            await eventually(partial(_slots_reached, node), lambda slots: slots == SLOTS, 30.0)


async def _slots_reached(node: RedisServer) -> object:
    """Slots whose owner the node has for alive."""
    try:
        return int((await _command(node.port, "CLUSTER INFO"))["cluster_slots_ok"])
    except (RedisError, OSError) as trouble:
        return f"{trouble}"


async def _command(port: int, *words: str | int) -> Any:
    client: Any
    async with Redis(port=port, socket_timeout=1) as client:
        return await client.execute_command(*words)


@asynccontextmanager
async def clustered(nodes: int = 3) -> AsyncIterator[Cluster]:
    """Masters without replicas, which serve their own slots while another is gone."""
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-require-full-coverage", "no")
    async with AsyncExitStack() as stack:
        servers = [stack.enter_context(RedisServer(*options)) for _ in range(nodes)]
        cluster = Cluster(servers)
        for number, server in enumerate(servers):
            mine = [slot for slot in range(SLOTS) if slot * nodes // SLOTS == number]
            await _command(server.port, "CLUSTER", "ADDSLOTSRANGE", mine[0], mine[-1])
            await _command(server.port, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            for other in servers[:number]:
                await _command(server.port, "CLUSTER", "MEET", "127.0.0.1", other.port)
        await cluster.whole()
        yield cluster
