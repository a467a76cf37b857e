"""The simulated worker: an HTTP server over an engine that counts.

One connection is one `_Connection`; requests on it are answered one after the other, each in a task of its own that dies
with the connection, so that generation stops within a token when the client leaves, as vLLM's does.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import unquote

import httptools

from engine_adapter.simulator import calls, faults, tokens, wire
from engine_adapter.simulator.calls import Call, Prompt, Refused
from engine_adapter.simulator.faults import Faults
from engine_adapter.simulator.messages import MessagesWire, counted_tokens
from engine_adapter.simulator.pairs import reranked, scored
from engine_adapter.simulator.responses import ResponsesWire

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
PROMETHEUS = b"text/plain; version=1.0.0; charset=utf-8"
MAX_BODY = 256 * 1024 * 1024
LARGEST_PORT = 65_535
CATCH_UP = 0.005
"""Seconds. Timers are about a millisecond coarse, so a fast engine makes up for being late; but an engine that was held up for
longer goes on at its speed instead of making many tokens at once."""
ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


@dataclass(slots=True)
class Seen:
    """A request as it came. Header names are lower-case; `path` is the raw target with its query."""

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""
    keep_alive: bool = True

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)


@dataclass(slots=True)
class Engine:
    """What the engine counts, as vLLM does: a prompt once for each of its n choices, tokens of aborted requests too."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    running: int = 0
    finished: Counter[str] = field(default_factory=Counter)


class Simulator:
    """A worker that speaks vLLM's wire: exactly `max_tokens` tokens (128 if not asked), one an event.

    `tokens_per_second` is the speed of each choice; None: as fast as it goes. `faults` may be set anew at any time and hold
    for requests that come then; `next_faults` are used up first, one for each POST. `requests` holds the latest `remember`.
    """

    def __init__(
        self,
        model: str = "sim",
        tokens_per_second: float | None = None,
        context: int = 32_768,
        faults: Faults = faults.NONE,
        keep_alive_seconds: float = 5.0,
        remember: int = 256,
    ) -> None:
        self.model = model
        self.tokens_per_second = tokens_per_second
        self.context = context
        self.faults = faults
        self.next_faults: deque[Faults] = deque()
        self.keep_alive_seconds = keep_alive_seconds
        self.requests: deque[Seen] = deque(maxlen=remember)
        self.engine = Engine()
        self.vocabulary = tokens.Vocabulary()
        self.created = int(time.time())
        self.connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    @property
    def prompt_tokens_total(self) -> int:
        return self.engine.prompt_tokens

    @property
    def generation_tokens_total(self) -> int:
        return self.engine.generation_tokens

    @property
    def running(self) -> int:
        """Choices that are being generated."""
        return self.engine.running

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listens; returns the port. Raises OSError, and ValueError for what is no port."""
        if not 0 <= port <= LARGEST_PORT:
            raise ValueError(f"{port} is no port: give one from 1 to {LARGEST_PORT}, or 0 for a free one.")
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Gone at once, like a killed process: open connections are aborted. May be started again."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        while self.connections:
            for connection in list(self.connections):
                connection.abort()
            await asyncio.sleep(0)

    def take_faults(self) -> Faults:
        return self.next_faults.popleft() if self.next_faults else self.faults

    def metrics(self) -> bytes:
        engine = self.engine
        values = {
            "vllm:num_requests_running": engine.running,
            "vllm:prompt_tokens_total": engine.prompt_tokens,
            "vllm:generation_tokens_total": engine.generation_tokens,
        }
        return wire.metrics(self.model, values, engine.finished)

    def __repr__(self) -> str:
        engine = self.engine
        return (
            f"<Simulator {self.model}: {len(self.connections)} connections, {engine.running} running, "
            f"{engine.prompt_tokens} prompt tokens, {engine.generation_tokens} generated>"
        )


class _Connection(asyncio.Protocol):
    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._loop = asyncio.get_running_loop()
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._seen = Seen("", "", [])
        self._body = bytearray()
        self._waiting: deque[Seen] = deque()
        self._task: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def transport(self) -> asyncio.Transport:
        return cast("asyncio.Transport", self._transport)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # from the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._simulator.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._simulator.connections.discard(self)
        self._parser = None
        self._writable.set()
        if self._idle is not None:
            self._idle.cancel()
        if self._task is not None:
            self._task.cancel()

    def eof_received(self) -> None:
        """A half-close counts as gone, as in uvicorn."""
        self.abort()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            head = wire.head(400, len(wire.INVALID), b"text/plain; charset=utf-8", closing=True)
            self.transport.write(head + wire.INVALID)
            self.transport.close()

    # from the parser

    def on_message_begin(self) -> None:
        self._seen = Seen("", "", [])
        self._body = bytearray()

    def on_url(self, url: bytes) -> None:
        self._seen.path += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._seen.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._seen.method = self._parser.get_method().decode()
        self._seen.keep_alive = self._parser.should_keep_alive()
        if self._seen.header(b"expect"):
            self.transport.write(wire.CONTINUE)

    def on_body(self, piece: bytes) -> None:
        self._body += piece
        if len(self._body) > MAX_BODY:
            self.abort()

    def on_message_complete(self) -> None:
        self._seen.body = bytes(self._body)
        self._simulator.requests.append(self._seen)
        self._waiting.append(self._seen)
        if self._task is None:
            self._next()

    # one request after the other

    def _next(self) -> None:
        if self._waiting:
            self._task = self._loop.create_task(self._serve(self._waiting.popleft()))
        else:
            self._task = None
            self._wait_for_next()

    def _wait_for_next(self) -> None:
        if not self.transport.is_closing():
            self._idle = self._loop.call_later(self._simulator.keep_alive_seconds, self.transport.close)

    async def _serve(self, seen: Seen) -> None:
        exchange = _Exchange(self._simulator, self, seen)
        try:
            await exchange.answer()
        except Refused as refused:
            exchange.reply(refused.status, refused.body)
        except ConnectionError:
            return  # a fault has ended the connection
        if not seen.keep_alive or exchange.faults.close:
            self.transport.close()
        self._next()

    # for the exchange

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    async def drain(self) -> None:
        """Until the socket takes more. Gives way to other connections in any case."""
        if self._writable.is_set():
            await asyncio.sleep(0)
        else:
            await self._writable.wait()

    async def flush(self) -> None:
        """Until all that was written is with the kernel."""
        self.transport.set_write_buffer_limits(high=0)
        await self._writable.wait()

    async def reset(self) -> None:
        """A TCP reset after all that was written."""
        await self.flush()
        connected = self.transport.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()
        raise ConnectionResetError

    async def cut(self) -> None:
        """An orderly close in the middle."""
        await self.flush()
        self.abort()
        raise ConnectionResetError


class _Exchange:
    """One request and its answer."""

    def __init__(self, simulator: Simulator, connection: _Connection, seen: Seen) -> None:
        self._simulator = simulator
        self._engine = simulator.engine
        self._connection = connection
        self._seen = seen
        self.faults = faults.NONE
        self._streaming: wire.Words | None = None
        self._events = 0
        self._due = 0.0

    async def answer(self) -> None:
        path = unquote(self._seen.path.partition("?")[0])
        method, handler = self._route(path)
        if handler is None:
            raise Refused(404, b'{"detail":"Not Found"}')
        if self._seen.method != method:
            self.reply(405, b'{"detail":"Method Not Allowed"}', extra=b"allow: " + method.encode())
            return
        if method == "POST":
            self.faults = self._own_faults()
            await self._misbehave()
        await handler()

    def reply(self, status: int, body: bytes, content_type: bytes | None = JSON, extra: bytes = b"") -> None:
        closing = not self._seen.keep_alive
        head = wire.head(status, len(body), content_type if body else None, closing=closing, extra=extra)
        self._connection.write(head + body)

    def _route(self, path: str) -> tuple[str, Callable[[], Awaitable[None]] | None]:
        return {
            "/health": ("GET", self._empty),
            "/ping": ("GET", self._empty),
            "/version": ("GET", self._version),
            "/load": ("GET", self._load),
            "/metrics": ("GET", self._metrics),
            "/v1/models": ("GET", self._models),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completions),
            "/v1/embeddings": ("POST", self._embeddings),
            "/v1/responses": ("POST", self._responses),
            "/v1/messages": ("POST", self._messages),
            "/v1/messages/count_tokens": ("POST", self._count_tokens),
            "/v1/rerank": ("POST", self._rerank),
            "/v1/score": ("POST", self._score),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
        }.get(path, ("GET", None))

    def _own_faults(self) -> Faults:
        faulty = self._simulator.take_faults()
        try:
            return faults.parse_fault((self._seen.header(faults.HEADER) or b"").decode("latin-1"), faulty)
        except ValueError as problem:
            raise calls.error(400, str(problem), faults.HEADER.decode()) from None

    async def _misbehave(self) -> None:
        """The faults that come before a head."""
        faulty = self.faults
        if faulty.delay:
            await asyncio.sleep(faulty.delay)
        if faulty.hang:
            await asyncio.Event().wait()
        if faulty.garbage:
            self._connection.write(wire.GARBAGE)
            await self._connection.cut()
        if faulty.status is not None:
            raise calls.scripted(faulty.status)

    # what needs no engine

    async def _empty(self) -> None:
        self.reply(200, b"")

    async def _version(self) -> None:
        self.reply(200, calls.dumps({"version": wire.VERSION}))

    async def _load(self) -> None:
        self.reply(200, calls.dumps({"server_load": self._engine.running}))

    async def _metrics(self) -> None:
        self.reply(200, self._simulator.metrics(), PROMETHEUS)

    async def _models(self) -> None:
        self.reply(200, wire.models(self._simulator.model, self._simulator.created, self._simulator.context))

    async def _tokenize(self) -> None:
        body = self._body()
        shown, with_texts = calls.read_tokenize(body), bool(body.get("return_token_strs"))
        simulator = self._simulator
        self.reply(200, wire.tokenized(shown, simulator.vocabulary, simulator.context, with_texts=with_texts))

    async def _detokenize(self) -> None:
        ids = calls.read_detokenize(self._body())
        self.reply(200, calls.dumps({"prompt": self._simulator.vocabulary.text(ids)}))

    # what does

    async def _chat(self) -> None:
        await self._generate(calls.read_chat(self._body(), self._simulator.context), wire.ChatWire, b"chatcmpl-")

    async def _completions(self) -> None:
        await self._generate(
            calls.read_completion(self._body(), self._simulator.context), wire.CompletionWire, b"cmpl-"
        )

    async def _embeddings(self) -> None:
        body = self._body()
        prompts = self._read(calls.read_embedding(body, self._simulator.context))
        as_base64 = body.get("encoding_format") == "base64"
        name, model, now = self._name(b"embd-", None).decode("latin-1"), self._simulator.model, int(time.time())
        usage = not self.faults.nousage
        self.reply(200, wire.embeddings(prompts, name, now, model, as_base64=as_base64, usage=usage))

    async def _responses(self) -> None:
        await self._generate(calls.read_response(self._body(), self._simulator.context), ResponsesWire, b"resp_")

    async def _messages(self) -> None:
        try:
            call = calls.read_message(self._body(), self._simulator.context)
        except Refused as refused:
            raise calls.in_messages(refused) from None
        await self._generate(call, MessagesWire, b"chatcmpl-")

    async def _count_tokens(self) -> None:
        try:
            self.reply(200, counted_tokens(calls.message_prompt(self._body())))
        except Refused as refused:
            raise calls.in_messages(refused) from None

    async def _rerank(self) -> None:
        body = self._body()
        prompts = self._read(calls.read_rerank(body, self._simulator.context))
        name, usage = self._name(b"rerank-", None).decode("latin-1"), not self.faults.nousage
        self.reply(200, reranked(prompts, body, name, self._simulator.model, usage=usage))

    async def _score(self) -> None:
        prompts = self._read(calls.read_pairs(self._body(), self._simulator.context))
        name, now, usage = self._name(b"score-", None).decode("latin-1"), int(time.time()), not self.faults.nousage
        self.reply(200, scored(prompts, name, now, self._simulator.model, usage=usage))

    def _read(self, prompts: list[Prompt]) -> list[Prompt]:
        """Prompts that only are read."""
        self._engine.prompt_tokens += sum(prompt.size for prompt in prompts)
        self._engine.finished["stop"] += len(prompts)
        return prompts

    def _body(self) -> dict[str, Any]:
        body = calls.read_body(self._seen.header(b"content-type") or b"", self._seen.body)
        calls.read_model(body, self._simulator.model)
        return body

    def _name(self, prefix: bytes, asked: str | None) -> bytes:
        """A client's X-Request-Id becomes the id, else the body's request_id, else a random one."""
        own = self._seen.header(b"x-request-id")
        if own is None:
            own = asked.encode() if asked is not None else os.urandom(8).hex().encode()
        return prefix + own

    async def _generate(self, call: Call, kind: type[wire.Words], prefix: bytes) -> None:
        ids, usage = self._simulator.vocabulary.ids, not self.faults.nousage
        name = self._name(prefix, call.request_id)
        words = kind(call, name, int(time.time()), self._simulator.model, ids, usage)
        self._streaming = words if call.stream else None
        self._engine.running += call.choices
        try:
            await (self._stream(call, words) if call.stream else self._plain(call, words))
        finally:
            self._engine.running -= call.choices

    async def _plain(self, call: Call, words: wire.Words) -> None:
        limit, finish = self._end(call)
        for made in range(1, limit + 1):
            await self._until_due(call, made)
            for _ in range(call.choices):
                await self._event()
            if made % 16 == 0:
                await asyncio.sleep(0)
        await self._turn()
        self._engine.finished[finish] += call.choices
        self.reply(200, words.whole(limit, finish))

    async def _stream(self, call: Call, words: wire.Words) -> None:
        write, drain = self._connection.write, self._connection.drain
        write(wire.head(200, None, EVENTS, closing=not self._seen.keep_alive))
        limit, finish = self._end(call)
        for made in range(1, limit + 1):
            await self._until_due(call, made)
            opening = b"".join(map(words.opening, range(call.choices))) if made == 1 else b""
            for choice in range(call.choices):
                if await self._event():
                    return
                write(opening + words.token(choice, made, finish if made == limit else None))
                opening = b""
                await drain()
        if await self._turn():
            return
        self._engine.finished[finish] += call.choices
        write(words.closing(limit, finish) + words.end)

    def _end(self, call: Call) -> tuple[int, str]:
        """How many tokens each choice gets, and why it ends."""
        if self.faults.abort_after is None:
            return call.limit, "length"
        return min(call.limit, self.faults.abort_after), "abort"

    async def _until_due(self, call: Call, made: int) -> None:
        """The moment of a token. The first one comes when the prompt is done, which counts it for every choice."""
        rate, now = self._simulator.tokens_per_second, asyncio.get_running_loop().time
        if made == 1:
            await self._silence(self.faults.first)
            self._due = now()
        if rate is not None:
            self._due = max(self._due + 1 / rate, now() - CATCH_UP)
            await self._silence(self._due - now())
        if made == 1:
            self._engine.prompt_tokens += call.prompt_tokens * call.n

    async def _silence(self, seconds: float) -> None:
        """Waits; on a stream with comments in between, if there are to be any."""
        pause = self.faults.keepalive if self._streaming else None
        while pause and seconds > pause:
            await asyncio.sleep(pause)
            self._connection.write(wire.KEEP_ALIVE)
            seconds -= pause
        if seconds == float("inf"):
            await asyncio.Event().wait()
        if seconds > 0:
            await asyncio.sleep(seconds)

    async def _event(self) -> bool:
        """One token is made, unless a fault comes first. True: the stream was ended."""
        if self._events in self._turns and await self._turn():
            return True
        self._events += 1
        self._engine.generation_tokens += 1
        return False

    async def _turn(self) -> bool:
        """The faults that come after so many events. True: the stream was ended, in order."""
        faulty, events = self.faults, self._events
        if events == faulty.hang_after:
            await self._silence(float("inf"))
        if events == faulty.break_after:
            await self._connection.reset()
        if events == faulty.cut_after:
            await self._connection.cut()
        if events != faulty.error_after:
            return False
        self._engine.finished["error"] += 1
        if not self._streaming:
            raise calls.error(500, ENGINE_DEAD)
        self._connection.write(self._streaming.broken(ENGINE_DEAD))
        return True

    @property
    def _turns(self) -> tuple[int | None, ...]:
        faulty = self.faults
        return faulty.hang_after, faulty.break_after, faulty.cut_after, faulty.error_after
