"""The two ends of a connection in the raw: a worker that says exactly what a test tells it, and a client that hides nothing."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, cast

import httptools

from engine_adapter.http1 import Origin

PATIENCE = 10.0
"""Seconds after which a test gives up waiting for something that should come at once."""


async def until(condition: Callable[[], object]) -> None:
    """Polls until it is true."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


class Line:
    """The worker's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: list[bytes]) -> None:
        self.reader = reader
        self.writer = writer
        self._seen = seen

    async def request(self) -> bytes:
        """The next request, head and body. Raises IncompleteReadError when the client has closed."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        size = next(
            (int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        whole = head + await self.reader.readexactly(size)
        self._seen.append(whole)
        return whole

    async def say(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()

    async def gone(self) -> None:
        """Until the client has closed."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class RawWorker:
    """Runs `script` for every connection; counts the requests that came whole, and the connections."""

    def __init__(self, script: Callable[[Line], Awaitable[None]], **options: Any) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self.closed = 0
        self.failure: BaseException | None = None
        self._script = script
        self._options = options
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, **self._options)
        port = self._server.sockets[0].getsockname()[1]
        self.origin = Origin("https" if self._options else "http", "127.0.0.1", port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.failure is not None and error is None:
            raise self.failure

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(cast("asyncio.Task[None]", asyncio.current_task()))
        self.connections += 1
        try:
            await self._script(Line(reader, writer, self.requests))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client has closed, or the test is over
        except BaseException as failure:
            self.failure = failure
        finally:
            self.closed += 1
            writer.close()
            self._tasks.discard(cast("asyncio.Task[None]", asyncio.current_task()))


def always(*pieces: bytes, times: int = 1_000_000) -> Callable[[Line], Awaitable[None]]:
    """A script that answers every request with the same bytes, `times` on a connection, then closes."""

    async def script(line: Line) -> None:
        for _ in range(times):
            await line.request()
            await line.say(*pieces)

    return script


@dataclass
class RawAnswer:
    """An answer with nothing taken out. `chunks`: the body as it was framed."""

    status: int = 0
    head: bytes = b""
    headers: list[tuple[str, str]] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)


class _Reader:
    def __init__(self) -> None:
        self.answer = RawAnswer()
        self.done = False
        self._piece = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self.answer.headers.append((name.decode(), value.decode()))

    def on_body(self, piece: bytes) -> None:
        self._piece += piece

    def on_chunk_complete(self) -> None:
        self.answer.chunks.append(self._piece)
        self._piece = b""

    def on_message_complete(self) -> None:
        if self._piece:
            self.on_chunk_complete()
        self.done = True


async def raw_request(port: int, request: bytes) -> RawAnswer:
    """Sends the bytes on a connection of its own; returns the answer to them, whole."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    heard = _Reader()
    parser = httptools.HttpResponseParser(heard)
    whole = b""
    try:
        writer.write(request)
        async with asyncio.timeout(PATIENCE):
            while not heard.done and (data := await reader.read(65536)):
                whole += data
                parser.feed_data(data)
    finally:
        writer.close()
    heard.answer.status = parser.get_status_code()
    heard.answer.head = whole.partition(b"\r\n\r\n")[0]
    return heard.answer
