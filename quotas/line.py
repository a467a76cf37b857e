"""One connection to one Redis. What is called in one turn of the event loop goes out in one write; replies come in order.

A reply belongs to the call that stands first in the line, whether anybody still waits for it or not: so a call that was
given up or cancelled never lends its reply to another. The protocol: https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import hiredis

from quotas.store import StoreUnavailable

PATIENCE = 1.0
"""Seconds in which a connection must be made, and after which one that does not answer is given up. Longer than a call's
deadline: callers do not wait for it."""

_MORE = object()

Address = tuple[str, int]

Call = tuple[bytes, "asyncio.Future[Any]"]
"""A command as it goes over the wire, and where its reply goes."""


class Refused(Exception):
    """Redis answered with an error; the text begins with its code."""


@dataclass(frozen=True, slots=True)
class Login:
    """How to be let in at a node."""

    username: str | None = None
    password: str | None = None
    db: int = 0
    tls: ssl.SSLContext | None = None

    def commands(self) -> list[bytes]:
        words = [word for word in (self.username, self.password) if word is not None]
        auth = [command("AUTH", *words)] if self.password is not None else []
        return auth + ([command("SELECT", self.db)] if self.db else [])


def command(*words: str | bytes | int) -> bytes:
    """A command as it goes over the wire."""
    return bytes(hiredis.pack_command(words))  # type: ignore[arg-type]  # its stub forgets the ellipsis


def bulk(word: bytes) -> bytes:
    """One word of a command as it goes over the wire."""
    return b"$%d\r\n%b\r\n" % (len(word), word)


class Wire(asyncio.Protocol):
    """A connection that stands, until `lost`: then `give_back` is told the calls that were not answered. Before somebody
    says otherwise, they fail with ConnectionError."""

    def __init__(self) -> None:
        self.lost = False
        self.give_back: Callable[[list[Call]], None] = _fail_lost
        self.sent = 0
        self.answered = 0
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[Call] = deque()
        self._reader = hiredis.Reader(notEnoughData=_MORE)

    @classmethod
    async def open(cls, address: Address, login: Login) -> Wire:
        """Connected and let in. OSError, TimeoutError or Refused."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE):
            _, wire = await loop.create_connection(cls, *address, ssl=login.tls)
            try:
                for each in login.commands():
                    await wire.ask(each)
            except BaseException:
                wire.abort()
                raise
        return wire

    async def ask(self, command: bytes) -> Any:
        """One call by itself. Refused, or OSError if the connection is lost."""
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.write([(command, reply)])
        return await reply

    def write(self, calls: list[Call]) -> None:
        """All of them in one write."""
        if self.lost:
            self.give_back(calls)
        elif self._transport is not None:
            self._waiting.extend(calls)
            self.sent += len(calls)
            self._transport.write(b"".join([command for command, _ in calls]))

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self.connection_lost(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _MORE:
                self._answer(reply)
        except (hiredis.ProtocolError, IndexError):  # not Redis, or it says more than it was asked
            self.abort()

    def _answer(self, reply: Any) -> None:
        _, future = self._waiting.popleft()
        self.answered += 1
        if future.done():
            return
        if isinstance(reply, hiredis.ReplyError):
            future.set_exception(Refused(str(reply)))
        else:
            future.set_result(reply)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        calls, self._waiting = list(self._waiting), deque()
        if calls:
            self.give_back(calls)


def fail(calls: Iterable[Call], trouble: Callable[[], Exception]) -> None:
    """What nobody answers any more, each with a trouble of its own."""
    for _, reply in calls:
        if not reply.done():
            reply.set_exception(trouble())


def _fail_lost(calls: list[Call]) -> None:
    fail(calls, lambda: ConnectionError("the connection was lost"))


class Line:
    """Calls to the node that `find` names. Connects when there is something to say, and again after a loss: a call whose
    reply was lost with the connection is made once more, for every call may be repeated."""

    def __init__(self, where: str, find: Callable[[], Awaitable[Address]], login: Login) -> None:
        self.where = where
        self._find = find
        self._login = login
        self._wire: Wire | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._queue: list[Call] = []
        self._repeated: set[asyncio.Future[Any]] = set()
        self._deadlines: dict[float, list[asyncio.Future[Any]]] = {}
        self._flushing = False
        self._closed = False

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def call(self, command: bytes, timeout: float) -> asyncio.Future[Any]:
        """To be awaited: the reply. Refused is Redis' own error; anything else, or no reply within `timeout` seconds, is
        StoreUnavailable."""
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Any] = loop.create_future()
        self._queue.append((command, reply))
        self._deadlines.setdefault(timeout, []).append(reply)
        self._flush_soon()
        return reply

    def drop(self) -> None:
        """Gives the connection up, so that the next call asks again who the node is."""
        if self._wire is not None:
            self._wire.abort()

    async def close(self) -> None:
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        self.drop()
        self._fail_queue("was closed")

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        loop = asyncio.get_running_loop()
        for timeout, replies in self._deadlines.items():
            loop.call_later(timeout, self._overdue, timeout, replies)
        self._deadlines = {}
        if self._closed:
            self._fail_queue("was closed")
        elif self._wire is not None and not self._wire.lost:
            self._write(self._wire)
        elif self._connecting is None or self._connecting.done():
            self._connecting = loop.create_task(self._connect())

    def _write(self, wire: Wire) -> None:
        calls = [call for call in self._queue if not call[1].done()]
        self._queue.clear()
        if calls:
            wire.write(calls)
            asyncio.get_running_loop().call_later(PATIENCE, _check, wire, wire.sent)

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                wire = await Wire.open(await self._find(), self._login)
        except (OSError, TimeoutError, Refused) as trouble:
            self._fail_queue(f"cannot be reached: {str(trouble) or 'it did not answer'}")
        else:
            wire.give_back = self._give_back
            self._wire = wire
            self._write(wire)

    def _give_back(self, calls: list[Call]) -> None:
        """Queues again what was not answered; what was already repeated fails."""
        again = [call for call in calls if not call[1].done() and call[1] not in self._repeated]
        twice = [call for call in calls if call[1] in self._repeated]
        fail(twice, lambda: unreachable(self.where, "the connection was lost"))
        for _, reply in again:
            self._repeated.add(reply)
            reply.add_done_callback(self._repeated.discard)
        if again:
            self._queue[:0] = again
            self._flush_soon()

    def _overdue(self, timeout: float, replies: list[asyncio.Future[Any]]) -> None:
        for reply in replies:
            if not reply.done():
                late = f"the quota store at {self.where} did not answer within {timeout:g} s"
                reply.set_exception(StoreUnavailable(late))

    def _fail_queue(self, what: str) -> None:
        calls, self._queue = self._queue, []
        fail(calls, lambda: StoreUnavailable(f"the quota store at {self.where} {what}"))


def unreachable(where: str, why: object) -> StoreUnavailable:
    return StoreUnavailable(f"the quota store at {where} cannot be reached: {why}")


def _check(wire: Wire, sent: int) -> None:
    """A connection that still owes an answer by now is stuck."""
    if wire.answered < sent:
        wire.abort()
