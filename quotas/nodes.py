"""Which Redis to ask: one, the one that Sentinel names, or a cluster's node for each hash slot.

Sources: https://redis.io/docs/latest/develop/reference/sentinel-clients/ and
https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/
"""

from __future__ import annotations

import asyncio
import ssl
from binascii import crc_hqx
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal, Protocol, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from quotas.line import Address, Line, Login, Refused, Wire, command, unreachable
from quotas.store import StoreUnavailable

FORMS = (
    "redis://host:port/db, redis+sentinel://host:port,host:port/service/db or redis+cluster://host:port,host:port "
    "(with TLS: rediss…; with a password: …://user:password@host…)"
)
"""The forms that a URL may have."""

SENTINEL_SECONDS = 0.25
"""How long one sentinel may take, so that the next can be asked within a connection's patience."""

MAP_SECONDS = 0.5
"""The pause between two looks at a cluster's map."""

WRONG_NODE = ("READONLY", "MASTERDOWN", "LOADING")
"""Errors of a node that is no master (any more), or not yet."""

HASH_SLOTS = 16_384


def hash_slot(tag: bytes) -> int:
    """The hash slot of keys whose part in braces is `tag`: CRC-16/XMODEM."""
    return crc_hqx(tag, 0) % HASH_SLOTS


# ---- addresses --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Where the store is, out of its URL."""

    form: Literal["single", "sentinel", "cluster"]
    nodes: tuple[Address, ...]
    login: Login
    service: str = ""

    @property
    def where(self) -> str:
        nodes = ",".join(f"{host}:{port}" for host, port in self.nodes)
        return f"{self.service}, by the sentinels at {nodes}" if self.form == "sentinel" else nodes


def parse(url: str) -> Place:
    """ValueError says which forms there are, or what is wrong."""
    parts = urlsplit(url)
    scheme, _, extra = parts.scheme.partition("+")
    if scheme not in ("redis", "rediss") or extra not in ("", "sentinel", "cluster"):
        raise ValueError(f"must be {FORMS}")
    credentials, _, hosts = parts.netloc.rpartition("@")
    nodes = tuple(_address(host, 26_379 if extra == "sentinel" else 6_379) for host in hosts.split(","))
    path = [unquote(part) for part in parts.path.split("/")[1:] if part]
    service = path.pop(0) if extra == "sentinel" and path else ""
    _check_path(extra, nodes, service, path)
    username, password = _credentials(credentials)
    login = Login(username, password, int(path[0]) if path else 0, _tls(scheme, dict(parse_qsl(parts.query))))
    return Place("sentinel" if extra == "sentinel" else "cluster" if extra else "single", nodes, login, service)


def _address(host: str, port: int) -> Address:
    name, colon, number = host.rpartition(":") if not host.endswith("]") else (host, "", "")
    if not colon:
        name, number = host, str(port)
    if not name or not number.isdigit() or not 0 < int(number) < 65_536:
        raise ValueError(f"must be {FORMS}; {host!r} is not host:port")
    return name.strip("[]"), int(number)


def _check_path(extra: str, nodes: tuple[Address, ...], service: str, path: list[str]) -> None:
    if extra == "sentinel" and not service:
        raise ValueError(
            "must name the service that the sentinels watch: redis+sentinel://host:port,host:port/service/db"
        )
    if extra == "" and len(nodes) > 1:
        raise ValueError("names several hosts; must be redis+sentinel://… or redis+cluster://… for these")
    if len(path) > 1 or not all(part.isdigit() for part in path):
        raise ValueError(f"ends in {'/'.join(path)!r} where the number of a database may stand")
    if extra == "cluster" and path not in ([], ["0"]):
        raise ValueError("a cluster has only database 0")


def _credentials(text: str) -> tuple[str | None, str | None]:
    username, colon, password = text.partition(":")
    if not colon:
        return unquote(username) or None, None
    return unquote(username) or None, unquote(password)


def _tls(scheme: str, options: dict[str, str]) -> ssl.SSLContext | None:
    known = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"}
    if unknown := set(options) - (known if scheme == "rediss" else set()):
        raise ValueError(f"has an unknown option: {', '.join(sorted(unknown))}")
    if scheme == "redis":
        return None
    try:
        context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
        if "ssl_certfile" in options:
            context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"))
    except OSError as trouble:
        raise ValueError(f"names certificates that cannot be read: {trouble}") from trouble
    context.check_hostname = options.get("ssl_check_hostname", "true").lower() != "false"
    return context


# ---- nodes ------------------------------------------------------------------------------------------------------------


class Nodes(Protocol):
    """The nodes that take writes."""

    where: str

    @property
    def waiting(self) -> int:
        """Calls that have not gone out yet."""

    def line(self, slot: int) -> Line | None:
        """The line to the node of a hash slot; None: `find` it."""

    async def find(self, slot: int) -> Line:
        """The same, after a look at who serves it. StoreUnavailable."""

    def places(self) -> set[str]:
        """The nodes' names; "" stands for those that are not known yet."""

    def place(self, slot: int) -> str:
        """The name of the node of a hash slot."""

    async def every(self, place: str | None = None) -> list[tuple[Line, str]]:
        """Each node's line, or that of one, with a tag whose keys lie there (see `hash_slot`). StoreUnavailable."""

    def failed(self, line: Line, refusal: str) -> Line | None:
        """A node refused a call, or did not answer (""): looks anew who serves what. The line to ask instead, if named."""

    async def close(self) -> None:
        """Lets go of all connections."""


def open_nodes(place: Place) -> Nodes:
    return Cluster(place) if place.form == "cluster" else OneNode(place)


class OneNode:
    """A Redis at a fixed address, or the one that Sentinel names."""

    def __init__(self, place: Place) -> None:
        self.where = place.where
        self._place = place
        self._sentinels = list(place.nodes)
        find = self._ask_sentinels if place.form == "sentinel" else self._fixed
        self._line = Line(place.where, find, place.login)

    @property
    def waiting(self) -> int:
        return self._line.waiting

    def line(self, slot: int) -> Line:
        return self._line

    async def find(self, slot: int) -> Line:
        return self._line

    def places(self) -> set[str]:
        return {self.where}

    def place(self, slot: int) -> str:
        return self.where

    async def every(self, place: str | None = None) -> list[tuple[Line, str]]:
        return [(self._line, "0")]

    def failed(self, line: Line, refusal: str) -> None:
        if refusal.startswith(WRONG_NODE):
            line.drop()

    async def close(self) -> None:
        await self._line.close()

    async def _fixed(self) -> Address:
        return self._place.nodes[0]

    async def _ask_sentinels(self) -> Address:
        """The first sentinel that answers is asked first the next time."""
        unknown = ConnectionError(f"the sentinels do not know {self._place.service}")
        trouble: Exception = unknown
        for sentinel in list(self._sentinels):
            try:
                async with asyncio.timeout(SENTINEL_SECONDS):
                    found = await self._ask_sentinel(sentinel)
            except (OSError, TimeoutError, Refused) as error:
                trouble = error
                continue
            if found is not None:
                self._sentinels.remove(sentinel)
                self._sentinels.insert(0, sentinel)
                return found
            trouble = unknown
        raise trouble

    async def _ask_sentinel(self, sentinel: Address) -> Address | None:
        """Sentinels may have no password, or the same as their Redis."""
        login = replace(self._place.login, db=0)
        try:
            found = await self._ask(sentinel, replace(login, username=None, password=None))
        except Refused as refusal:
            if not str(refusal).startswith("NOAUTH"):
                raise
            found = await self._ask(sentinel, login)
        return None if found is None else (found[0].decode(), int(found[1]))

    async def _ask(self, sentinel: Address, login: Login) -> Any:
        wire = await Wire.open(sentinel, login)
        try:
            return await wire.ask(command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._place.service))
        finally:
            wire.abort()


class Cluster:
    """The primaries of a cluster, each for its hash slots."""

    def __init__(self, place: Place) -> None:
        self.where = place.where
        self._login = place.login
        self._lines: dict[Address, Line] = {}
        self._seeds = [self._line(address) for address in place.nodes]
        self._owners: list[Line | None] = [None] * HASH_SLOTS
        self._serving: frozenset[Line | None] = frozenset(
            [None]
        )  # the nodes that serve anything; None: some slots have none
        self._looking: asyncio.Task[None] | None = None
        self._looked = 0.0

    @property
    def waiting(self) -> int:
        return sum(line.waiting for line in self._lines.values())

    def line(self, slot: int) -> Line | None:
        return self._owners[slot]

    async def find(self, slot: int) -> Line:
        await self._look()
        line = self._owners[slot]
        if line is None:
            raise unreachable(self.where, f"no node of the cluster serves hash slot {slot}")
        return line

    def places(self) -> set[str]:
        return {_name(line) for line in self._serving}

    def place(self, slot: int) -> str:
        return _name(self._owners[slot])

    async def every(self, place: str | None = None) -> list[tuple[Line, str]]:
        if None in self._owners:
            await self._look()
        wanted = {line for line in self._serving if place in (None, "", _name(line))}
        if not wanted or None in wanted:
            raise unreachable(self.where, "no node of the cluster serves some of its hash slots")
        tags: dict[Line, str] = {}
        for number in count():
            line = cast("Line", self._owners[hash_slot(b"%d" % number)])
            if line in wanted:
                tags.setdefault(line, str(number))
            if len(tags) == len(wanted):
                return list(tags.items())
        raise AssertionError("not reached")

    def failed(self, line: Line, refusal: str) -> Line | None:
        self._look_soon()
        code, *rest = refusal.split(" ")
        if code != "MOVED":
            return None
        host, _, port = rest[1].rpartition(":")
        other = self._owners[int(rest[0])] = self._line((host, int(port))) if host else line
        self._serving |= {other}
        return other

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await asyncio.gather(*(line.close() for line in self._lines.values()))

    def _line(self, address: Address) -> Line:
        line = self._lines.get(address)
        if line is None:

            async def fixed() -> Address:
                return address

            line = self._lines[address] = Line(f"{address[0]}:{address[1]}", fixed, self._login)
        return line

    async def _look(self) -> None:
        self._look_soon()
        if self._looking is not None:
            await asyncio.shield(self._looking)

    def _look_soon(self) -> None:
        now = asyncio.get_running_loop().time()
        if (self._looking is None or self._looking.done()) and now >= self._looked + MAP_SECONDS:
            self._looked = now
            self._looking = asyncio.create_task(self._draw_map())

    async def _draw_map(self) -> None:
        """Asks the nodes one after another; where none answers, the old map stays."""
        for line in [*self._lines.values()]:
            try:
                ranges = await line.call(command("CLUSTER", "SLOTS"), SENTINEL_SECONDS)
            except (Refused, StoreUnavailable):
                continue
            owners: list[Line | None] = [None] * HASH_SLOTS
            for first, last, (host, port, *_), *_replicas in ranges:
                address = (host.decode(), port) if host else None
                owners[first : last + 1] = [self._line(address) if address else line] * (last + 1 - first)
            self._owners, self._serving = owners, frozenset(owners)
            await self._forget_strangers()
            return

    async def _forget_strangers(self) -> None:
        """Closes the lines to nodes that serve nothing any more."""
        known = {*self._seeds, *self._owners}
        for address, line in list(self._lines.items()):
            if line not in known:
                await self._lines.pop(address).close()


def _name(line: Line | None) -> str:
    return "" if line is None else line.where
