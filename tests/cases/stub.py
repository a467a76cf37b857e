"""A scripted worker on a raw socket: keeps every byte it gets, and says exactly the bytes its script holds."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tests.cases.wire import NO_LINGER, Headers, eventually

PROBES = ("/health", "/v1/models", "/metrics", "/tokenize", "/load", "/version")
"""What a proxy may ask for its own sake."""

EVENT_STREAM = ("Content-Type", "text/event-stream; charset=utf-8")


@dataclass(frozen=True)
class Seen:
    """One request as it came; `raw` are all its bytes."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    raw: bytes

    def all(self, name: str) -> list[str]:
        return [value for header, value in self.headers if header.lower() == name.lower()]

    def get(self, name: str) -> str | None:
        found = self.all(name)
        return found[0] if found else None

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def is_probe(self) -> bool:
        return self.path.endswith(PROBES)


class Call:
    """One request in the hands of a script."""

    def __init__(self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.seen = seen
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def plain(self, status: int, body: bytes, headers: Headers = (), kind: str = "application/json") -> None:
        await self.send(head(status, [("Content-Type", kind), ("Content-Length", str(len(body))), *headers]) + body)

    async def open_stream(self, headers: Headers = ()) -> None:
        await self.send(head(200, [EVENT_STREAM, ("Transfer-Encoding", "chunked"), *headers]))

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def finish(self) -> None:
        await self.send(b"0\r\n\r\n")

    def close(self) -> None:
        """Ends the connection in order, wherever the answer stands."""
        self._writer.close()

    def reset(self) -> None:
        """Ends it with a TCP reset."""
        found: socket.socket = self._writer.get_extra_info("socket")
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self._writer.transport.abort()

    @property
    def gone(self) -> bool:
        """The other side has closed."""
        return self._reader.at_eof() or self._reader.exception() is not None or self._writer.is_closing()

    async def until_gone(self) -> None:
        while not self.gone:
            await asyncio.sleep(0.01)


class End(Enum):
    """Ends of a streamed answer other than the proper last chunk."""

    RESET = "a TCP reset"
    CUT = "closed without the last chunk"
    SILENCE = "nothing more, until the other side leaves"


@dataclass(frozen=True)
class Pause:
    seconds: float


Script = Callable[[Call], Awaitable[None]]
Step = bytes | Pause | asyncio.Event | End | Callable[[Seen], bytes]
"""Of a stream: bytes are one chunk; an event is waited for; a function says what depends on the request (b"": nothing)."""

REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 429: "Too Many Requests"}


def head(status: int, headers: Headers) -> bytes:
    lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def delta(change: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": change, "finish_reason": finish}
    return event({"id": "chatcmpl-stub", "object": "chat.completion.chunk", "model": "m1", "choices": [choice], **more})


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def T(text: str, **more: Any) -> bytes:  # noqa: N802  the letters of the cases
    return delta({"content": text}, **more)


def USE(prompt: int, completion: int) -> bytes:  # noqa: N802
    """The last event with the usage of the whole answer."""
    return event(
        {"id": "chatcmpl-stub", "object": "chat.completion.chunk", "choices": [], "usage": usage(prompt, completion)}
    )


FIN = delta({}, "stop")
DONE = b"data: [DONE]\n\n"
RESET, CUT, SILENCE = End.RESET, End.CUT, End.SILENCE


def if_asked(data: bytes) -> Callable[[Seen], bytes]:
    """`data`, where the request asked for usage."""
    return lambda seen: data if (seen.json().get("stream_options") or {}).get("include_usage") is True else b""


def answer(used: dict[str, Any] | None, text: str = "ok", **more: Any) -> bytes:
    """A plain chat answer; `used` None: without usage."""
    message = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    body = {"id": "chatcmpl-stub", "object": "chat.completion", "model": "m1", "choices": [message], **more}
    return json.dumps(body if used is None else {**body, "usage": used}).encode()


def plain(status: int, body: bytes, headers: Headers = (), after: Pause | asyncio.Event | None = None) -> Script:
    async def script(call: Call) -> None:
        if after is not None:
            await _wait(after)
        await call.plain(status, body, headers)

    return script


def OK(prompt: int, completion: int, after: Pause | asyncio.Event | None = None) -> Script:  # noqa: N802
    return plain(200, answer(usage(prompt, completion)), after=after)


def failure(status: int, message: str = "m", headers: Headers = ()) -> Script:
    return plain(status, json.dumps({"error": {"message": message}}).encode(), headers)


def stream(*steps: Step, headers: Headers = ()) -> Script:
    """A chunked event stream; ends properly unless a step is an `End`."""

    async def script(call: Call) -> None:
        await call.open_stream(headers)
        for step in steps:
            if isinstance(step, End):
                await _end(call, step)
                return
            await _take(call, step)
        await call.finish()

    return script


async def _take(call: Call, step: bytes | Pause | asyncio.Event | Callable[[Seen], bytes]) -> None:
    if isinstance(step, Pause | asyncio.Event):
        await _wait(step)
    elif data := step if isinstance(step, bytes) else step(call.seen):
        await call.chunk(data)


async def _end(call: Call, end: End) -> None:
    if end is End.SILENCE:
        await call.until_gone()
    elif end is End.RESET:
        await asyncio.sleep(0.05)  # a reset throws away what the other side has not read yet
        call.reset()
    else:
        call.close()


async def _wait(step: Pause | asyncio.Event) -> None:
    await (step.wait() if isinstance(step, asyncio.Event) else asyncio.sleep(step.seconds))


async def hang(call: Call) -> None:
    """Takes the request and never says a byte."""
    await call.until_gone()


class Stub:
    """One worker. `does` gives the scripts of the requests to come: one a request, the last one for all further."""

    def __init__(self) -> None:
        self.port = 0
        self.seen: list[Seen] = []
        self.probes: list[Seen] = []
        self.calls: list[Call] = []
        self.faults: list[BaseException] = []
        self._scripts: list[Script] = [OK(1, 1)]
        self._busy: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Stub]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**26, backlog=1024)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            await self._drop(self._busy)

    def does(self, *scripts: Script) -> None:
        self._scripts = list(scripts)

    async def reset(self) -> None:
        """Forgets what it saw, and drops every answer that is still being given."""
        await self._drop({task for task in self._busy if task.get_name() == "script"})
        self.seen, self.probes, self.calls, self._scripts = [], [], [], [OK(1, 1)]
        faults, self.faults = self.faults, []
        assert not faults, faults

    async def requests(self, count: int) -> list[Seen]:
        """What it was asked, once `count` requests came."""

        async def seen() -> list[Seen]:
            return self.seen

        found: list[Seen] = await eventually(seen, lambda seen: len(seen) >= count)
        return found

    @property
    def last(self) -> Seen:
        return self.seen[-1]

    @staticmethod
    async def _drop(tasks: set[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._busy.add(task)
        try:
            while not writer.is_closing():
                task.set_name("idle")
                seen = await _read(reader)
                task.set_name("script")
                await self._turn(Call(seen, reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except asyncio.CancelledError:
            writer.transport.abort()
        except Exception as fault:
            self.faults.append(fault)
        finally:
            self._busy.discard(task)
            writer.close()

    async def _turn(self, call: Call) -> None:
        if call.seen.is_probe:
            self.probes.append(call.seen)
            await self._probe(call)
            return
        self.seen.append(call.seen)
        self.calls.append(call)
        script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
        await script(call)

    @staticmethod
    async def _probe(call: Call) -> None:
        answers = {
            "/v1/models": b'{"object":"list","data":[{"id":"m1","object":"model","max_model_len":131072}]}',
            "/tokenize": b'{"count":8,"max_model_len":131072,"tokens":[1,2,3,4,5,6,7,8]}',
        }
        found = next((body for path, body in answers.items() if call.seen.path.endswith(path)), b"")
        await call.plain(200, found)


async def _read(reader: asyncio.StreamReader) -> Seen:
    raw = await reader.readuntil(b"\r\n\r\n")
    first, *fields = raw.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    method, target, _ = first.split(" ")
    headers = [(name, value.strip()) for name, _, value in (field.partition(":") for field in fields)]
    named = {name.lower(): value for name, value in headers}
    if named.get("transfer-encoding", "").lower() == "chunked":
        body, framed = await _read_chunks(reader)
    else:
        body = framed = await reader.readexactly(int(named.get("content-length", "0")))
    return Seen(method, target, headers, body, raw + framed)


async def _read_chunks(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    pieces, framed = [], b""
    while size := int((line := await reader.readuntil(b"\r\n")), 16):
        piece = await reader.readexactly(size + 2)
        pieces.append(piece[:-2])
        framed += line + piece
    return b"".join(pieces), framed + line + await reader.readuntil(b"\r\n")


class Trap:
    """A listening socket that must never be connected to."""

    def __init__(self) -> None:
        self.port = 0
        self.connections = 0

    @asynccontextmanager
    async def set(self) -> AsyncIterator[Trap]:
        server = await asyncio.start_server(self._caught, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _caught(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writer.close()
