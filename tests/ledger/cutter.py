"""A relay before Postgres that cuts the line when a COMMIT went through, before anybody hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit


class Cutter:
    """`cuts`: how many commits' answers are still to be lost. `url` leads through it."""

    def __init__(self, upstream: str) -> None:
        self.cuts = 0
        self.url = ""
        self._there = urlsplit(upstream)

    @classmethod
    @asynccontextmanager
    async def before(cls, upstream: str) -> AsyncIterator[Cutter]:
        cutter = cls(upstream)
        server = await asyncio.start_server(cutter._relay, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        cutter.url = cutter._there._replace(netloc=f"{cutter._there.username}@127.0.0.1:{port}").geturl()
        try:
            yield cutter
        finally:
            server.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = await asyncio.open_connection(self._there.hostname, self._there.port)
        ways = [
            asyncio.create_task(self._pass_on(reader, upstream[1])),
            asyncio.create_task(self._answer(upstream[0], writer)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        writer.transport.abort()
        upstream[1].transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """`COMMIT` is what Postgres calls a commit that it did, in its CommandComplete message."""
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if b"COMMIT\0" in data and self.cuts:
                    self.cuts -= 1
                    return
                writer.write(data)
                await writer.drain()
