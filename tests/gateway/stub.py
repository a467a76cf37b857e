"""A worker that answers by a function of what it was asked, closes each connection, and remembers what it got."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Asked:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Stub:
    url: str = ""
    requests: list[Asked] = field(default_factory=list)
    left: int = 0
    """Connections that were closed before the answer's end."""


Answering = Callable[[Asked], AsyncIterator[bytes]]


def answered(body: bytes, *fields: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"\r\n".join((b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body), b"Connection: close", *fields))
    return head + b"\r\n\r\n" + body


def plain(said: Any, status: int = 200) -> bytes:
    return answered(json.dumps(said).encode(), b"Content-Type: application/json", status=b"%d Said" % status)


def streamed(*events: Any) -> bytes:
    """Strings are sent as data as they are, the rest as JSON."""
    texts = [item if isinstance(item, str) else json.dumps(item) for item in events]
    return answered(b"".join(b"data: %b\n\n" % text.encode() for text in texts), b"Content-Type: text/event-stream")


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM_END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def typed(event: dict[str, Any]) -> bytes:
    """An event that names its type twice, as those of responses and messages do."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json.dumps(event).encode())


@asynccontextmanager
async def worker(answer: bytes | Answering) -> AsyncIterator[Stub]:
    """`answer`: the same bytes for everybody, or what to say to each request, piece by piece."""
    stub = Stub()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await _read(reader)
        stub.requests.append(asked)
        answering = asyncio.create_task(_say(writer, answer, asked))
        leaving = asyncio.create_task(reader.read())
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        stub.left += not answering.done()
        for task in (answering, leaving):
            task.cancel()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield stub


async def _say(writer: asyncio.StreamWriter, answer: bytes | Answering, asked: Asked) -> None:
    async for piece in answer(asked) if callable(answer) else _once(answer):
        writer.write(piece)
        await writer.drain()


async def _once(answer: bytes) -> AsyncIterator[bytes]:
    yield answer


async def _read(reader: asyncio.StreamReader) -> Asked:
    line, *fields = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (text.partition(":") for text in fields)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(line.split(" ")[1], headers, body)
