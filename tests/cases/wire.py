"""A raw HTTP/1.1 client: says exactly the bytes it is told, and reports exactly what came."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

Headers = Iterable[tuple[str, str]]

PATIENCE = 60.0
"""Seconds after which a test gives up on an answer; nothing that works comes near it."""

NO_LINGER = struct.pack("ii", 1, 0)


async def eventually(probe: Callable[[], Any], wanted: Callable[[Any], bool], seconds: float = 10.0) -> Any:
    """Asks `probe` (a coroutine function) until its answer is `wanted`; AssertionError with the last one if it never is."""
    deadline = monotonic() + seconds
    while not wanted(found := await probe()):
        assert monotonic() < deadline, f"after {seconds} s still {found!r}"
        await asyncio.sleep(0.03)
    return found


@dataclass(frozen=True)
class Head:
    status: int
    headers: list[tuple[str, str]]

    def all(self, name: str) -> list[str]:
        return [value for header, value in self.headers if header.lower() == name.lower()]

    def get(self, name: str) -> str | None:
        """The header's value; a header that must stand alone and comes twice is a fault."""
        found = self.all(name)
        assert len(found) <= 1, f"{name} came {len(found)} times: {found}"
        return found[0] if found else None


@dataclass(frozen=True)
class Reply(Head):
    """`complete`: the body ended as its framing promised."""

    body: bytes
    complete: bool

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        return event_data(self.body)

    def error(self, status: int | None = None) -> dict[str, Any]:
        """The error object, after a check that it is one and comes as whole JSON, with `status` if given."""
        assert status in (None, self.status), f"{self.status}, not {status}: {self.body[:500]!r}"
        assert (self.get("content-type") or "").startswith("application/json"), self.headers
        assert self.complete
        error = self.json()["error"]
        assert isinstance(error, dict), error
        assert isinstance(error["message"], str), error
        assert error["message"], error
        assert {"type", "param", "code"} <= set(error), error
        return error


def event_data(body: bytes) -> list[str]:
    """The data of every event in an event stream, lines joined as the HTML standard says."""
    text = body.decode().removeprefix("\ufeff").replace("\r\n", "\n")
    blocks = [[line for line in block.split("\n") if line.startswith("data:")] for block in text.split("\n\n")]
    return ["\n".join(line[5:].removeprefix(" ") for line in lines) for lines in blocks if lines]


def request(
    method: str, target: str, headers: Headers = (), body: bytes | None = None, host: str = "gateway.test"
) -> bytes:
    """One request's bytes; the length is declared unless `headers` frame the body otherwise."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name}: {value}" for name, value in headers]
    framed = any(name.lower() in ("content-length", "transfer-encoding") for name, _ in headers)
    if body is not None and not framed:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")


def chunked(*pieces: bytes) -> bytes:
    """A whole body in chunked framing."""
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*pieces, b""))


class Connection:
    """One client connection. Reads are bounded in time; a broken body is reported, not raised."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.head: Head | None = None
        self.received = bytearray()
        self.complete = False
        self._pieces: AsyncIterator[bytes] | None = None
        self._pending = bytearray()

    @classmethod
    @asynccontextmanager
    async def to(cls, port: int) -> AsyncIterator[Connection]:
        connection = cls(*await asyncio.open_connection("127.0.0.1", port, limit=2**22))
        try:
            yield connection
        finally:
            connection.close()

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        async with asyncio.timeout(PATIENCE):
            await self._writer.drain()

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        """Closes with a TCP reset."""
        found: socket.socket = self._writer.get_extra_info("socket")
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self._writer.transport.abort()

    async def interim(self) -> Head:
        """The next head, be it 1xx or final."""
        async with asyncio.timeout(PATIENCE):
            raw = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status, *fields = raw.removesuffix("\r\n\r\n").split("\r\n")
        pairs = (field.partition(":") for field in fields)
        return Head(int(status.split(" ")[1]), [(name, value.strip()) for name, _, value in pairs])

    async def start(self, method: str = "POST") -> Head:
        """The next final head; then the body can be read."""
        head = await self.interim()
        while head.status < 200:
            head = await self.interim()
        self.head, self.received, self.complete, self._pending = head, bytearray(), False, bytearray()
        self._pieces = self._body(head, method)
        return head

    async def piece(self) -> bytes:
        """More of the body, framing taken off; b"" at its end (`complete` says which end)."""
        assert self._pieces is not None
        try:
            async with asyncio.timeout(PATIENCE):
                data = await anext(self._pieces, b"")
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            data = getattr(error, "partial", b"") if self.head and not self._is_chunked(self.head) else b""
        self.received += data
        return data

    async def event(self) -> bytes:
        """The bytes of the next event or comment block with its closing blank line; b"" at the end of the stream."""
        while (end := _block_end(self._pending)) < 0:
            data = await self.piece()
            if not data:
                return b""
            self._pending += data
        block = bytes(self._pending[:end])
        del self._pending[:end]
        return block

    async def reply(self, method: str = "POST") -> Reply:
        """The whole answer, or what is left of it once `start` was called."""
        head = self.head if self._pieces is not None and self.head else await self.start(method)
        while await self.piece():
            pass
        self._pieces = None
        return Reply(head.status, head.headers, bytes(self.received), self.complete)

    @staticmethod
    def _is_chunked(head: Head) -> bool:
        return (head.get("transfer-encoding") or "").lower() == "chunked"

    async def _body(self, head: Head, method: str) -> AsyncIterator[bytes]:
        length = head.get("content-length")
        assert not (self._is_chunked(head) and length), "two framings"
        if method == "HEAD" or head.status in (204, 304):
            self.complete = True
        elif self._is_chunked(head):
            async for data in self._chunks():
                yield data
        elif length is not None:
            if int(length):
                yield await self._reader.readexactly(int(length))
            self.complete = True
        else:
            while data := await self._reader.read(65536):
                yield data
            self.complete = True

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield await self._reader.readexactly(size)
            assert await self._reader.readexactly(2) == b"\r\n"
        while await self._reader.readuntil(b"\r\n") != b"\r\n":
            pass
        self.complete = True


def _block_end(data: bytes | bytearray) -> int:
    ends = [place + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (place := data.find(mark)) >= 0]
    return min(ends, default=-1)


async def ask(
    port: int, method: str, target: str, headers: Headers = (), body: bytes | None = None, host: str = "gateway.test"
) -> Reply:
    """One request on a connection of its own."""
    async with Connection.to(port) as connection:
        await connection.send(request(method, target, list(headers), body, host))
        return await connection.reply(method)


def bearer(key: str) -> tuple[str, str]:
    return ("Authorization", f"Bearer {key}")


def as_json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()
