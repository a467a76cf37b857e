"""The quota store that many sidecars share: the rule runs as scripts in Redis, in Redis' time.

Every call is one script on keys of one hash slot. Calls made while a pipeline is on its way go out together in the next,
so that the order of one process' calls is kept. A call has a deadline; one that was given up never lends its reply to
another, for the pipeline reads all its replies or loses its connection.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha1
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit
from uuid import uuid4

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from quotas import decision
from quotas.books import MARK, REMEMBER, Book, Lease, State, longest, seeded, target_terms, terms
from quotas.store import Account, Ask, Progress, Scope, Seed, StoreUnavailable, Target, Unseeded, Verdict, View
from quotas.windows import SECOND, Window

PATIENCE = 1.0
"""Seconds after which a pipeline is given up and its connection closed. Longer than a call's deadline, so that a slow
connection can be made at all; callers do not wait for it."""

CHUNK = 16
"""Slots in one field of a scope's hash, see rule.lua."""

Command = tuple[str | bytes | int, ...]


def _script(name: str, *, rule: bool = True) -> bytes:
    here = Path(__file__).parent
    parts = [here / "rule.lua"] * rule + [here / f"{name}.lua"]
    return b"\n".join(part.read_bytes() for part in parts)


SCRIPTS = {
    "admit": _script("admit"),
    "progress": _script("progress"),
    "settle": _script("settle"),
    "renew": _script("renew"),
    "peek": _script("peek", rule=False),
    "seed": _script("seed", rule=False),
}
SHAS = {name: sha1(source, usedforsecurity=False).hexdigest() for name, source in SCRIPTS.items()}


class RedisStore:
    """Quotas in the Redis at `url` (redis:// or rediss://).

    `timeout` is each call's deadline in seconds; passing it, like any other trouble, is StoreUnavailable. `clock`, in
    seconds, takes the place of Redis' own time; only tests want that.
    """

    def __init__(
        self, url: str, *, timeout: float = 0.05, lease_seconds: float = 30.0, clock: Callable[[], float] | None = None
    ) -> None:
        self._line = _Line(url)
        self._timeout = timeout
        self._lease_span = round(lease_seconds * SECOND)
        self._clock = clock

    def __repr__(self) -> str:
        return f"<RedisStore {self._line.where}, {self._line.waiting} calls waiting>"

    async def admit(self, account: Account, ask: Ask) -> Verdict:
        reply = await self._run("admit", account, key=account.scopes[0].name, ask=_packed_ask(ask))
        if reply is None:
            raise Unseeded(f"nothing is known of {account.slot}; seed it from what is on record")
        said = msgspec.msgpack.decode(reply[0], type=_Said)
        books = [Book(scope, _STATE.decode(packed)) for scope, packed in zip(account.scopes, reply[1], strict=True)]
        for book, windows, leases in zip(books, reply[2], reply[3], strict=False):
            _fill(book.state, windows, leases)
        decided = decision.Decision(
            said.kind, said.hold, said.ceiling, said.expected, said.target, said.scope, said.answers
        )
        return decision.verdict(books, ask, decided, said.now, random.random())  # noqa: S311  spreads guesses

    async def progress(self, account: Account, lease: str, consumed: int, extend_to: int | None = None) -> Progress:
        expired, extended, covered, left = await self._run(
            "progress", account, name=lease, consumed=consumed, extend_to=extend_to
        )
        return Progress(bool(expired), bool(extended), int(covered), int(left))

    async def settle(self, account: Account, lease: str, consumed: int) -> bool:
        return bool(await self._run("settle", account, name=lease, consumed=consumed))

    async def renew(self, leases: list[tuple[Account, str]]) -> None:
        by_account: dict[Account, list[str]] = {}
        for account, lease in leases:
            by_account.setdefault(account, []).append(lease)
        await asyncio.gather(*(self._run("renew", account, names=names) for account, names in by_account.items()))

    async def peek(self, account: Account) -> View:
        moment, mark, *found = await self._run("peek", account)
        books = [Book(scope, _state_of(mark, *each)) for scope, *each in zip(account.scopes, *found, strict=True)]
        now = decision.bring_to(books, int(moment) if self._clock is None else round(self._clock() * SECOND))
        return replace(decision.view(books, now), seeded=mark is not None, since=_since(mark))

    async def seed(self, slot: str, seed: Seed) -> bool:
        """One script writes it all: about a millisecond of Redis' time for a hundred scopes with full windows."""
        now = round(await self.ping() * SECOND)
        states = list(seeded(seed, now))
        keeps = [state.keep_until(self._lease_span) - now for _, state in states]
        mark = MARK + max((longest(terms(scope.policy)) for scope, _ in states), default=0)
        words: list[str | bytes | int] = [f"{now}-{uuid4().hex}", max([mark, *keeps]) // 1000]
        for (_, state), keep in zip(states, keeps, strict=True):
            fields = _packed_books(state)
            words += [keep // 1000, len(fields), *fields]
        keys = [_mark_key(slot), *(key for scope, _ in states for key in _scope_keys(slot, scope))]
        return bool(await self._line.call(("EVALSHA", SHAS["seed"], len(keys), *keys, *words), PATIENCE))

    async def forget(self, slot: str) -> None:
        await self._line.call(("DEL", _mark_key(slot)), PATIENCE)

    async def ping(self) -> float:
        """Redis' time; it must take writes too. Waits longer than other calls, so that a slow connection gets made."""
        (seconds, microseconds), _ = await asyncio.gather(
            self._line.call(("TIME",), PATIENCE), self._line.call(("SET", "weir:ping", "", "PX", 1_000), PATIENCE)
        )
        return float(seconds) + microseconds / SECOND if self._clock is None else self._clock()

    async def close(self) -> None:
        await self._line.close()

    async def _run(self, script: str, account: Account, **words: Any) -> Any:
        keys, scopes = _addressed(account)
        words |= {"lease": self._lease_span, "scopes": scopes}
        if self._clock is not None:
            words["now"] = round(self._clock() * SECOND)
        return await self._line.call(
            ("EVALSHA", SHAS[script], len(keys), *keys, msgspec.msgpack.encode(words)), self._timeout
        )


# ---- keys, questions, answers -----------------------------------------------------------------------------------------


@lru_cache(maxsize=10_000)
def _addressed(account: Account) -> tuple[tuple[str, ...], msgspec.Raw]:
    """The account's keys, and the terms of its scopes as the scripts take them."""
    keys = (_mark_key(account.slot), *(key for scope in account.scopes for key in _scope_keys(account.slot, scope)))
    return keys, msgspec.Raw(msgspec.msgpack.encode([terms(scope.policy) for scope in account.scopes]))


def _mark_key(slot: str) -> str:
    return f"weir:{{{_safe(slot)}}}:mark"


def _since(mark: bytes | None) -> float:
    """When the slot was seeded: its mark begins with the microseconds."""
    return 0.0 if mark is None else int(mark.partition(b"-")[0]) / SECOND


def _scope_keys(slot: str, scope: Scope) -> list[str]:
    return [f"weir:{{{_safe(slot)}}}:{scope.kind}:{_safe(scope.name)}:{part}" for part in "wld"]


def _safe(name: str) -> str:
    """Percent-encoded: two names never share a key, and no brace, star or line break reaches Redis."""
    return quote(name, safe="")


def _packed_ask(ask: Ask) -> dict[str, object]:
    return {
        "lease": ask.lease,
        "expected": ask.expected,
        "first_hold": ask.first_hold,
        "ceiling": ask.ceiling,
        "cap_need": ask.cap_need,
        "primary": ask.primary,
        "forced": ask.forced,
        "targets": [_packed_target(target) for target in ask.targets],
    }


def _packed_target(target: Target) -> dict[str, object]:
    return {"name": target.name, "terms": None if target.rate is None else target_terms(target.rate)}


@dataclass(frozen=True, slots=True)
class _Said(decision.Decision):
    """A decision and its moment."""

    now: int = 0


_STATE = msgspec.msgpack.Decoder(State)
_LEASE = msgspec.msgpack.Decoder(Lease)
_SLOTS = msgspec.msgpack.Decoder(list[int])


def _packed_books(state: State) -> list[str | bytes]:
    """Books without leases as the fields of a scope's hash."""
    meter = state.primary
    primary = {
        "held": 0,
        "opened": meter.opened,
        "debt": meter.debt,
        "rate": _sums(meter.rate),
        "repay": _sums(meter.repay),
    }
    books = {"seen": state.seen, "cap_held": 0, "running": 0, "cap": _sums(state.cap), "primary": primary}
    fields: list[str | bytes] = ["s", msgspec.msgpack.encode(books)]
    for name, window in (("h", state.cap), ("m", state.primary.rate), ("r", state.primary.repay)):
        chunks: dict[int, list[int]] = {}
        for index, tokens in (window.slots if window is not None else {}).items():
            chunks.setdefault(index // CHUNK, [0] * CHUNK)[index % CHUNK] = tokens
        for chunk, slots in chunks.items():
            fields += [f"{name}:{chunk}", msgspec.msgpack.encode(slots)]
    return fields


def _sums(window: Window | None) -> dict[str, int] | None:
    """A window but for its slots."""
    return (
        None
        if window is None
        else {name: getattr(window, name) for name in ("span", "slot", "total", "oldest", "newest")}
    )


def _state_of(mark: bytes | None, windows: list[bytes], leases: list[bytes]) -> State:
    """A scope's books from its hashes; fresh ones where there are none of this mark."""
    found = dict(_pairs(windows))
    if mark is None or found.get(b"g") != mark:
        return State()
    state = _STATE.decode(found[b"s"])
    _fill(state, windows, leases)
    for name, lease in state.leases.items():
        heapq.heappush(state.due, (lease.expires + (0 if lease.booked is None else REMEMBER + 1), name))
    return state


def _fill(state: State, windows: list[bytes], leases: list[bytes]) -> None:
    """Adds the windows' slots and the leases, which lie apart from the rest."""
    for field, packed in _pairs(windows):
        if field not in (b"s", b"g"):
            _fill_window(state, field.decode(), _SLOTS.decode(packed))
    state.leases = {name.decode(): _LEASE.decode(packed) for name, packed in _pairs(leases)}


def _fill_window(state: State, field: str, slots: list[int]) -> None:
    name, _, chunk = field.rpartition(":")
    window = _window(state, name)
    if window is not None:
        first = int(chunk) * CHUNK
        window.slots |= {first + place: tokens for place, tokens in enumerate(slots) if first + place >= window.oldest}


def _window(state: State, name: str) -> Window | None:
    if name == "h":
        return state.cap
    kind, _, target = name.partition("/")
    meter = state.targets.get(target) if target else state.primary
    if meter is None:
        return None
    return meter.rate if kind == "m" else meter.repay


def _pairs(flat: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)


# ---- the connection ---------------------------------------------------------------------------------------------------


class _Line:
    """One pipeline at a time to one Redis; what is called meanwhile goes together in the next."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.where = f"{parts.hostname}:{parts.port or 6379}"
        self._redis: Redis = Redis.from_url(
            url,
            retry=Retry(
                NoBackoff(), 1
            ),  # a connection that died while idle is made again; every script may be repeated
            socket_timeout=None,  # deadlines are kept here
            socket_connect_timeout=PATIENCE,
        )
        self._queue: list[tuple[Command, asyncio.Future[Any]]] = []
        self._sender: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def call(self, command: Command, timeout: float) -> Any:
        """The reply, or StoreUnavailable after `timeout` seconds."""
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queue.append((command, reply))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all())
        try:
            async with asyncio.timeout(timeout):
                return await reply
        except TimeoutError:
            raise StoreUnavailable(f"the quota store at {self.where} did not answer within {timeout:g} s") from None

    async def close(self) -> None:
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)
        await self._give_up(self._queue)
        await self._redis.aclose()

    async def _send_all(self) -> None:
        while self._queue:
            calls = [(command, reply) for command, reply in self._queue if not reply.done()]
            self._queue.clear()
            try:
                async with asyncio.timeout(PATIENCE):
                    replies = await self._send([command for command, _ in calls])
            except (RedisError, OSError, TimeoutError) as trouble:
                replies = [trouble] * len(calls)
            except asyncio.CancelledError:
                await self._give_up(calls)
                raise
            await self._deliver(calls, replies)

    async def _send(self, commands: list[Command]) -> list[Any]:
        """The replies in order; a script that Redis does not know is loaded and called again."""
        replies = await self._pipeline(commands)
        unknown = [index for index, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:
            loads: list[Command] = [("SCRIPT LOAD", source) for source in SCRIPTS.values()]
            again = await self._pipeline(loads + [commands[index] for index in unknown])
            for index, reply in zip(unknown, again[len(loads) :], strict=True):
                replies[index] = reply
        return replies

    async def _pipeline(self, commands: Iterable[Command]) -> list[Any]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            return await pipeline.execute(raise_on_error=False)

    async def _deliver(self, calls: list[tuple[Command, asyncio.Future[Any]]], replies: list[Any]) -> None:
        troubled = False
        for (_, future), reply in zip(calls, replies, strict=True):
            troubled = troubled or isinstance(reply, Exception)
            if future.done():
                continue
            if isinstance(reply, Exception):
                future.set_exception(self._unavailable(reply))
            else:
                future.set_result(reply)
        if troubled:  # broken, stuck, or (after a failover) to a node that takes no writes: look the name up again
            await self._redis.connection_pool.disconnect()

    async def _give_up(self, calls: list[tuple[Command, asyncio.Future[Any]]]) -> None:
        closed = ConnectionError("the store was closed")
        await self._deliver(calls, [closed] * len(calls))

    def _unavailable(self, trouble: Exception) -> StoreUnavailable:
        kind = "refused the call" if isinstance(trouble, ResponseError) else "cannot be reached"
        return StoreUnavailable(f"the quota store at {self.where} {kind}: {trouble or type(trouble).__name__}")
