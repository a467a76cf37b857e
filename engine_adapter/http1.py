"""Pooled HTTP/1.1 connections to workers: the only file that speaks to them.

One `Workers` per event loop. `open` sends one request and returns its `Answer` when the head is there; whoever opened an
answer closes it, once, on every way out. Closing gives the connection back when the answer was received to its end, and
otherwise aborts it at once, which is how an engine learns that nobody listens. A connection is never half-closed: vLLM
takes that for a client that left.

Framing is decided by llhttp (through httptools) alone; what it refuses, such as a length beside chunked, is an error here.
Redirects are not followed. A body that comes compressed, though none is asked for, is decoded. Messages of errors name no address: they may reach a caller.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple, Self, cast
from urllib.parse import urlsplit

import httptools

from engine_adapter.coding import Decoder, decoder_of
from engine_adapter.errors import EngineBroke, EngineUnavailable

Headers = list[tuple[bytes, bytes]]

HIGH_WATER = 64 * 1024
"""Bytes of an answer that may wait for their reader before the socket is read no further."""

# RFC 9110, 7.6.1: fields that concern one connection only. `proxy-…` fields are dropped by their prefix.
_HOP_BY_HOP = {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
_SET_HERE = _HOP_BY_HOP | {b"host", b"content-length", b"accept-encoding", b"expect"}
_BODILESS = {b"GET", b"HEAD", b"DELETE", b"OPTIONS"}
"""Methods that carry a content-length only when there is content (RFC 9110, 8.6)."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a worker listens. `prefix` is the path of the backend's URL, "" or like "/v1-root", put before every path."""

    scheme: str
    host: str
    port: int
    prefix: str = ""

    @classmethod
    def parse(cls, url: str) -> Origin:
        """From `http://host:port/prefix` or `https://…`. Raises ValueError with a sentence."""
        parts = urlsplit(url)
        host = _ascii(parts.hostname or "")
        if parts.scheme not in {"http", "https"} or not host or not url.isprintable() or " " in url:
            raise ValueError(f"{url!r} is no backend address; write http://host:port or https://host:port")
        port = parts.port if parts.port is not None else _default_port(parts.scheme)
        return cls(parts.scheme, host, port, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """host:port as the Host header says it: the scheme's own port left out, IPv6 in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _default_port(self.scheme) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.prefix}"


def _ascii(host: str) -> str:
    """The name as it is asked for and sent; "" if it cannot be one."""
    try:
        return host.encode("idna").decode("ascii")
    except UnicodeError:
        return ""


def _default_port(scheme: str) -> int:
    return 443 if scheme == "https" else 80


class _Silent(EngineUnavailable):
    """The connection ended before one byte of an answer came: on a kept connection, the request may be sent anew."""


class Answer:
    """One worker's answer. `headers` has lower-case names and no hop-by-hop fields; `length` is its content-length."""

    __slots__ = ("_inbox", "_link", "headers", "length", "status")

    def __init__(self, link: _Link, inbox: _Inbox) -> None:
        self.status = inbox.status
        self.headers = inbox.headers
        self.length = inbox.length
        self._inbox = inbox
        self._link: _Link | None = link

    async def read(self, seconds: float | None = None) -> bytes:
        """Everything that came since the last read; b"" is the clean end.

        Raises TimeoutError when nothing came for `seconds` (reading may go on), EngineBroke when the answer ended early
        ("cut") or stopped being HTTP ("protocol"), after all that came before was handed out.
        """
        while True:
            if not self._inbox.pieces and not await self._more(seconds):
                return b""
            if self._link is not None:
                self._link.resume()
            if data := self._inbox.take():
                return data

    async def _more(self, seconds: float | None) -> bool:
        """Waits for bytes. False: there are no more."""
        inbox = self._inbox
        while not inbox.pieces:
            if inbox.complete:
                inbox.check_end()
                return False
            if inbox.failure is not None:
                raise EngineBroke(inbox.failure.message, phase=inbox.failure.phase)
            if self._link is None:
                raise EngineBroke("The answer was closed before its end.", phase="cut")
            await self._link.wait(seconds)
        return True

    async def read_all(self, seconds: float | None, limit: int) -> bytes:
        """The rest of the body. `seconds` bounds each silence, not the whole. More than `limit` bytes: EngineBroke."""
        body = bytearray()
        while max(len(body), self.length or 0) <= limit:
            piece = await self.read(seconds)
            if not piece:
                return bytes(body)
            body += piece
        raise EngineBroke(f"The worker's answer is larger than {limit} bytes.", phase="protocol")

    def close(self) -> None:
        """Gives the connection back, or aborts it if the answer has not ended. May be called again."""
        link, self._link = self._link, None
        if link is not None:
            link.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "complete" if self._inbox.complete else "broken" if self._inbox.failure else "open"
        return f"<Answer {self.status} {state}, {self._inbox.size} bytes unread>"


class _Failure(NamedTuple):
    message: str
    phase: str


class _Inbox:
    """What came of one answer: bytes in; head, pieces and how it ended out. No I/O; httptools calls the `on_` methods."""

    __slots__ = (
        "_bodiless",
        "_decoder",
        "_head_bytes",
        "_max_head_bytes",
        "_parser",
        "_until_eof",
        "complete",
        "failure",
        "headed",
        "headers",
        "length",
        "pieces",
        "reusable",
        "size",
        "status",
    )

    def __init__(self, method: bytes, max_head_bytes: int) -> None:
        self.status = 0
        self.headers: Headers = []
        self.length: int | None = None
        self.pieces: list[bytes] = []
        self.size = 0
        self.headed = False
        self.complete = False
        self.reusable = False
        self.failure: _Failure | None = None
        self._bodiless = method == b"HEAD"
        self._decoder: Decoder | None = None
        self._head_bytes = 0
        self._max_head_bytes = max_head_bytes
        self._until_eof = False
        self._parser: Any = httptools.HttpResponseParser(self)

    @property
    def heard(self) -> bool:
        """At least one byte came."""
        return self._head_bytes > 0

    @property
    def ended(self) -> bool:
        return self.complete or self.failure is not None

    def take(self) -> bytes:
        """The body's next bytes, decoded. May be b"" where they are not enough to be decoded."""
        pieces, self.pieces, self.size = self.pieces, [], 0
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if self._decoder is None:
            return data
        try:
            decoded, left = self._decoder.step(data)
        except ValueError as error:
            self.reusable = False
            raise EngineBroke(f"The worker's answer cannot be decompressed: {error}.", phase="protocol") from None
        if left is not None:
            self.pieces, self.size = [left], len(left)
        return decoded

    def check_end(self) -> None:
        """Raises EngineBroke if the body is complete and what it was coded in is not."""
        if self._decoder is not None and not self._decoder.finished:
            raise EngineBroke("The worker's answer is compressed, and ends too early.", phase="cut")

    def feed(self, data: bytes) -> None:
        if not self.headed:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._end("The worker wants to switch protocols.", "protocol")
        except httptools.HttpParserError as error:
            self._end(f"The worker's answer is not valid HTTP: {error.__context__ or error}.", "protocol")
        if not self.headed and self._head_bytes > self._max_head_bytes:
            self._end(self._too_large(), "protocol")
        if self.complete:
            self._parser = None

    def end(self, phase: str, *, clean: bool) -> None:
        """No more will come. `clean`: the worker closed in order, which ends a body without a length."""
        if clean and self._until_eof and not self.ended:
            self.complete = True
        self._end("The worker closed the connection before its answer was complete.", phase)

    def _end(self, message: str, phase: str) -> None:
        self.reusable = False
        self._parser = None  # parser and inbox hold each other
        if not self.ended:
            self.failure = _Failure(message, phase)

    def _too_large(self) -> str:
        return f"The head of the worker's answer is larger than {self._max_head_bytes} bytes."

    def on_message_begin(self) -> None:
        if self.complete:
            self.reusable = False  # bytes after the end: whose answer would they be?

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.headed:  # else it is a trailer
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.complete:
            return
        if status < 200:
            self.headers = []
            return
        if sum(len(name) + len(value) + 4 for name, value in self.headers) > self._max_head_bytes:
            raise ValueError(self._too_large())
        self.status = status
        chunked = self._frame()
        self.reusable = self._parser.should_keep_alive() and not self._bodiless
        self._until_eof = not chunked and self.length is None
        if self._decoder is not None:
            self.length = None  # of the coded body
        self.headed = True
        self.complete = self._bodiless

    def _frame(self) -> bool:
        """Takes what is between us and the worker out of the headers. True: the body is chunked."""
        codings, encodings, dropped = b"", list[bytes](), set(_HOP_BY_HOP)
        for name, value in self.headers:
            if name == b"content-length":
                self.length = int(value)
            elif name == b"transfer-encoding":
                codings += value
            elif name == b"content-encoding":
                encodings.append(value)
            elif name == b"connection":
                dropped.update(token.strip().lower() for token in value.split(b","))
        if codings and codings.strip().lower() != b"chunked":
            raise ValueError("its transfer coding is not chunked")
        self._decoder = decoder_of(b",".join(encodings))
        dropped |= {b"content-length", b"content-encoding"}
        self.headers = [field for field in self.headers if not (field[0] in dropped or field[0].startswith(b"proxy-"))]
        return bool(codings)

    def on_body(self, piece: bytes) -> None:
        if not self.complete:
            self.pieces.append(piece)
            self.size += len(piece)

    def on_message_complete(self) -> None:
        self.complete = self.headed  # else it was a 1xx


class _Link(asyncio.Protocol):
    """One connection. Serves one answer at a time; between answers it lies in the pool."""

    __slots__ = (
        "_deadline",
        "_inbox",
        "_paused",
        "_sending",
        "_timer",
        "_timer_at",
        "_transport",
        "_waiter",
        "_workers",
        "idle_since",
        "loop",
        "origin",
    )

    def __init__(self, workers: Workers, origin: Origin) -> None:
        self.origin = origin
        self.idle_since = 0.0
        self._workers = workers
        self.loop = asyncio.get_running_loop()
        self._inbox: _Inbox | None = None
        self._transport: asyncio.Transport | None = None
        self._sending = False
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    async def ask(self, method: bytes, head: bytes, body: bytes, seconds: float) -> Answer:
        """Sends a request and waits for the head of its answer. Raises EngineUnavailable; then nothing is left open."""
        inbox = self._inbox = _Inbox(method, self._workers.max_head_bytes)
        try:
            self._send(head, body)
            while not inbox.headed:
                if inbox.failure is not None:
                    raise (EngineUnavailable if inbox.heard else _Silent)(
                        inbox.failure.message, phase="send" if inbox.failure.phase == "send" else "head"
                    )
                await self.wait(seconds)
        except TimeoutError:
            self.abort()
            raise EngineUnavailable(
                f"The worker did not answer within {seconds:g} s.", phase="head", status=504
            ) from None
        except BaseException:
            self.abort()
            raise
        return Answer(self, inbox)

    def release(self) -> None:
        """The answer was closed: into the pool if the connection may serve again, else away with it."""
        if self._serves_again:
            self._inbox = self._deadline = None
            self.resume()
            self._workers.keep(self)
        else:
            self.abort()

    @property
    def _serves_again(self) -> bool:
        inbox, transport = self._inbox, self._transport
        if inbox is None or transport is None or not (inbox.complete and inbox.reusable):
            return False
        return not transport.is_closing() and transport.get_write_buffer_size() == 0

    def abort(self) -> None:
        self._deadline = None
        if self._transport is not None:
            self._transport.abort()

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def resume(self) -> None:
        """The reader has caught up."""
        if self._paused and self._transport is not None and self.usable:
            self._paused = False
            self._transport.resume_reading()

    async def wait(self, seconds: float | None) -> None:
        """Until something comes. Raises TimeoutError after `seconds`."""
        self._set_deadline(seconds)
        waiter = self._waiter = self.loop.create_future()
        try:
            await waiter
        finally:
            if self._waiter is waiter:
                self._waiter = None

    def _wake(self, error: Exception | None = None) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)

    def _set_deadline(self, seconds: float | None) -> None:
        """One timer per connection, moved only when it fires or fires too late: most waits are short."""
        if seconds is None:
            self._deadline = None
            return
        self._deadline = deadline = self.loop.time() + seconds
        if self._timer is None or deadline < self._timer_at:
            self._arm(deadline)

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = self.loop.call_at(at, self._tick), at

    def _tick(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        if self.loop.time() < self._deadline:
            self._arm(self._deadline)
        else:
            self._wake(TimeoutError())

    def _send(self, head: bytes, body: bytes) -> None:
        """One write for what is small. A large body is not copied; it drains while the head is awaited."""
        transport = cast("asyncio.Transport", self._transport)
        if len(body) <= HIGH_WATER:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def eof_received(self) -> None:
        """The worker closed in order. We do too: there is nothing left to say on a connection that is half-closed."""
        self._lost(clean=True)
        self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._lost(clean=False)
        if self._timer is not None:
            self._timer.cancel()
        self._workers.leave(self)

    def _lost(self, *, clean: bool) -> None:
        if self._inbox is not None:
            self._inbox.end("send" if self._sending else "cut", clean=clean)
            self._wake()

    def pause_writing(self) -> None:
        self._sending = True

    def resume_writing(self) -> None:
        self._sending = False

    def data_received(self, data: bytes) -> None:
        inbox = self._inbox
        if inbox is None or inbox.ended:  # nobody asked for this
            self.abort()
            return
        inbox.feed(data)
        if inbox.failure is not None:
            self.abort()
        elif inbox.size > HIGH_WATER and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        if inbox.headed or inbox.failure is not None:
            self._wake()


class Workers:
    """The pool. `keep_idle_seconds` is below the 5 s after which uvicorn, and so vLLM, closes an idle connection
    (https://www.uvicorn.org/settings/#timeouts)."""

    def __init__(
        self,
        *,
        keep_idle_seconds: float = 4.0,
        max_idle_per_origin: int = 256,
        max_head_bytes: int = 64 * 1024,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.max_head_bytes = max_head_bytes
        self._keep_idle_seconds = keep_idle_seconds
        self._max_idle = max_idle_per_origin
        self._tls = tls
        self._links: set[_Link] = set()
        self._idle: dict[Origin, list[_Link]] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    async def open(
        self,
        origin: Origin,
        *,
        method: bytes,
        path: str,
        headers: Headers,
        body: bytes = b"",
        connect_seconds: float,
        head_seconds: float,
    ) -> Answer:
        """Sends one request; returns when the head of its answer is there. The caller closes the answer.

        `path` is the raw target with its query; the origin's prefix is put before it. Host, content-length and
        accept-encoding (identity) are set here, whatever `headers` say. `head_seconds` runs from sending to the head.
        A request that met a kept connection which the worker had closed meanwhile is sent once more on a new one, if not
        one byte of an answer came. Raises EngineUnavailable (phase connect, send or head); then nothing is left open.
        """
        if self._closed:
            raise EngineUnavailable("The connections to the workers are closed.", phase="connect", status=503)
        head = _request_head(origin, method, path, headers, len(body))
        link = self._take(origin)
        if link is not None:
            try:
                return await link.ask(method, head, body, head_seconds)
            except _Silent:
                pass
        link = await self._connect(origin, connect_seconds)
        return await link.ask(method, head, body, head_seconds)

    async def close(self) -> None:
        """Aborts every connection, answers in progress too. Later requests are refused."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        while self._links:
            for link in list(self._links):
                link.abort()
            await asyncio.sleep(0)

    def __repr__(self) -> str:
        idle = {str(origin): len(links) for origin, links in self._idle.items() if links}
        return f"<Workers {len(self._links)} connections, {sum(idle.values())} idle {idle}>"

    async def _connect(self, origin: Origin, seconds: float) -> _Link:
        link = _Link(self, origin)
        loop = asyncio.get_running_loop()
        tls = self._context() if origin.scheme == "https" else None
        try:
            async with asyncio.timeout(seconds):
                # Both asyncio and uvloop set TCP_NODELAY on their own.
                await loop.create_connection(lambda: link, origin.host, origin.port, ssl=tls)
        except TimeoutError as error:
            link.abort()
            raise EngineUnavailable(
                f"The worker took no connection within {seconds:g} s.", phase="connect", status=504
            ) from error
        except (OSError, UnicodeError) as error:
            link.abort()
            raise EngineUnavailable(f"The worker cannot be reached{_reason(error)}.", phase="connect") from error
        except BaseException:
            link.abort()
            raise
        if self._closed or not link.usable:
            link.abort()
            raise EngineUnavailable("The worker closed the connection at once.", phase="connect")
        # Not before: uvloop does not call connection_lost for an attempt that was cancelled.
        self._links.add(link)
        return link

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    # the pool

    def leave(self, link: _Link) -> None:
        self._links.discard(link)
        idle = self._idle.get(link.origin)
        if idle is not None and link in idle:
            idle.remove(link)

    def keep(self, link: _Link) -> None:
        idle = self._idle.setdefault(link.origin, [])
        if self._closed or len(idle) >= self._max_idle:
            link.abort()
            return
        link.idle_since = monotonic()
        idle.append(link)
        if self._sweeper is None:
            self._sweeper = link.loop.call_later(self._keep_idle_seconds, self._sweep)

    def _take(self, origin: Origin) -> _Link | None:
        """The connection used last: the others may grow old and go."""
        idle = self._idle.get(origin)
        oldest = monotonic() - self._keep_idle_seconds
        while idle:
            link = idle.pop()
            if link.usable and link.idle_since > oldest:
                return link
            link.abort()
        return None

    def _sweep(self) -> None:
        self._sweeper = None
        oldest = monotonic() - self._keep_idle_seconds
        for origin, idle in list(self._idle.items()):
            for link in idle:
                if link.idle_since <= oldest:
                    link.abort()
            self._idle[origin] = [link for link in idle if link.idle_since > oldest]
        if any(self._idle.values()):
            loop = asyncio.get_running_loop()
            self._sweeper = loop.call_later(self._keep_idle_seconds, self._sweep)


def _request_head(origin: Origin, method: bytes, path: str, headers: Headers, size: int) -> bytes:
    target = (origin.prefix + path).encode("utf-8", "surrogateescape")
    lines = [b"%b %b HTTP/1.1" % (method, target), b"host: " + origin.authority.encode("ascii")]
    lines += [b"%b: %b" % field for field in headers if field[0].lower() not in _SET_HERE]
    lines.append(b"accept-encoding: identity")
    if size or method not in _BODILESS:
        lines.append(b"content-length: %d" % size)
    head = b"\r\n".join(lines) + b"\r\n\r\n"
    if head.count(b"\n") != len(lines) + 1 or head.count(b"\r") != len(lines) + 1 or b" " in target:
        raise ValueError("a line break or a space inside a header or the path would change the request")
    return head


def _reason(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, ssl.SSLError):
        return ": its certificate or TLS is not accepted"
    return f": {os.strerror(number).lower()}" if number is not None and number > 0 else ""
