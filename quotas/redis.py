"""The quota store that many sidecars share: the rule runs as functions in Redis, in Redis' time.

Every call is one function on keys of one hash slot. A call has a deadline; every one may be repeated.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Coroutine, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from hashlib import sha1
from pathlib import Path
from struct import Struct
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from quotas import decision, packed
from quotas.books import MARK, Book, State, longest, recalled, seeded, target_terms, terms
from quotas.line import PATIENCE, Line, Refused, bulk, command
from quotas.nodes import hash_slot, open_nodes, parse
from quotas.store import Account, Ask, Progress, Scope, Seed, StoreUnavailable, Unseeded, Verdict, View
from quotas.windows import NEVER, SECOND

ALIVE_MS = 60_000
"""A sidecar that was not heard of for so long does not count."""

TRIES = 3
"""Of one call: at a node that does not know our functions, at the node that it names, and again."""

ADDRESSED = 10_000
"""So many accounts' keys are remembered as they go over the wire."""

_PARTS = ("rule", "admit", "progress", "settle", "renew", "peek", "seed", "recall", "sidecars")
_SOURCE = "\n".join((Path(__file__).parent / f"{part}.lua").read_text() for part in _PARTS)
LIBRARY = f"weir_{sha1(_SOURCE.encode(), usedforsecurity=False).hexdigest()[:12]}"
"""Named by what it says, so that sidecars of two releases may share a Redis."""

SOURCE = f"#!lua name={LIBRARY}\nlocal PREFIX = '{LIBRARY}_'\n{_SOURCE}"

_SIDECARS = b"weir:sidecars"
_SIDECARS_SLOT = hash_slot(_SIDECARS)
_LOAD = command("FUNCTION", "LOAD", SOURCE)
_TIME = command("TIME")
_ASK = Struct("<8d")
_STEP = Struct("<4d")
_RECALL = Struct("<5d")


class RedisStore:
    """Quotas in the Redis at `url`; `nodes.FORMS` are the forms that it may have, ValueError says what is wrong with it.

    `timeout` is each call's deadline in seconds; passing it, like any other trouble, is StoreUnavailable. `clock`, in
    seconds, takes the place of Redis' own time; only tests want that.
    """

    def __init__(
        self, url: str, *, timeout: float = 0.05, lease_seconds: float = 30.0, clock: Callable[[], float] | None = None
    ) -> None:
        self._nodes = open_nodes(parse(url))
        self._timeout = timeout
        self._lease_span = round(lease_seconds * SECOND)
        self._clock = clock
        self._name = uuid4().hex
        self._living = 1
        self._addresses: dict[int, _Address] = {}

    def __repr__(self) -> str:
        return f"<RedisStore {self._nodes.where}, {self._nodes.waiting} calls waiting>"

    @property
    def sidecars(self) -> int:
        """How many sidecars live, this one among them, when it was last looked (`renew` and `ping` do)."""
        return self._living

    async def admit(self, account: Account, ask: Ask) -> Verdict:
        address = self._address(account)
        reply = await self._call(address.slot, address.admit(ask, self._lease_span, self._moment()), self._timeout)
        if reply is None:
            raise Unseeded(f"nothing is known of {account.slot}; seed it from what is on record")
        return _verdict(address, ask, reply)

    async def progress(self, account: Account, lease: str, consumed: int, extend_to: int | None = None) -> Progress:
        numbers = (consumed, -1 if extend_to is None else extend_to)
        _, expired, extended, covered, left = await self._step("progress", account, [lease], *numbers)
        return Progress(bool(expired), bool(extended), covered, left)

    async def settle(self, account: Account, lease: str, consumed: int) -> bool:
        _, known = await self._step("settle", account, [lease], consumed)
        return bool(known)

    async def renew(self, leases: list[tuple[Account, str]]) -> None:
        by_account: dict[Account, list[str]] = {}
        for account, lease in leases:
            by_account.setdefault(account, []).append(lease)
        renewals = (self._step("renew", account, names) for account, names in by_account.items())
        await asyncio.gather(self._announce_again(), *renewals)

    async def peek(self, account: Account) -> View:
        address = self._address(account)
        call = _fcall("peek", address.keys, address.scopes)
        moment, mark, flat = await self._call(address.slot, call, self._timeout)
        fields = dict(packed.pairs(flat)) if mark is not None else {}
        states = {field: packed.books(fields[field]) if field in fields else State() for field in address.scopes}
        books = _books(address, states, fields.items())
        now = decision.bring_to(books, self._moment() or moment)
        since = 0.0 if mark is None else int(mark[:16], 16) / SECOND
        return replace(decision.view(books, now), seeded=mark is not None, since=since)

    async def seed(self, slot: str, seed: Seed) -> bool:
        """One function writes it all, in some 30 microseconds of Redis' time for a scope with full windows."""
        address = _Address(Account(slot, seed.scopes))
        now = await self._now(address.slot)
        states = []
        for each in seeded(seed, now):
            states.append(each)
            await asyncio.sleep(0)  # a large team takes a while
        call = _fcall("seed", address.keys, _seed_words(states, now, self._lease_span))
        return bool(await self._call(address.slot, call, PATIENCE))

    async def recall(self, account: Account, seed: Seed, since: float) -> bool:
        address, (scope,) = self._address(account), account.scopes
        now = await self._now(address.slot)
        state = recalled(scope, seed, now)
        debt, opened = state.primary.debt.owed(now), state.primary.opened
        numbers = _RECALL.pack(self._lease_span, self._moment(), round(since * SECOND), debt, opened)
        words = [address.terms, numbers, packed.recall_field(scope), *address.scopes, *packed.charges(state)]
        _, done = await self._call(address.slot, _fcall("recall", address.keys, words), PATIENCE)
        return bool(done)

    async def forget(self, slot: str) -> None:
        address = _Address(Account(slot, ()))
        await self._call(address.slot, command("DEL", *address.keys), PATIENCE)

    def places(self) -> Collection[str]:
        return self._nodes.places()

    def place_of(self, slot: str) -> str:
        return self._nodes.place(_hash_slot(slot))

    async def ping(self, place: str | None = None) -> float:
        """Redis' time; every node must take writes too. Waits longer than other calls, so that connections get made."""
        try:
            async with asyncio.timeout(PATIENCE):
                nodes = await self._nodes.every(place)
        except TimeoutError:
            raise StoreUnavailable(
                f"the quota store at {self._nodes.where} did not answer within {PATIENCE:g} s"
            ) from None
        calls: list[Coroutine[Any, Any, float]] = [self._reach(line, tag) for line, tag in nodes]
        if place in (None, self._nodes.place(_SIDECARS_SLOT)):
            calls.append(self._announce(PATIENCE))
        times = await asyncio.gather(*calls)
        return times[0] if self._clock is None else self._clock()

    async def close(self) -> None:
        await self._nodes.close()

    # ---- calling ------------------------------------------------------------------------------------------------------

    async def _step(self, function: str, account: Account, leases: list[str], *numbers: int) -> Any:
        address = self._address(account)
        step = _STEP.pack(self._lease_span, self._moment(), *numbers, *[0] * (2 - len(numbers)))
        first, *others = map(packed.lease_field, leases)
        call = _fcall(function, address.keys, [address.terms, step, first, *address.scopes, *others])
        return await self._call(address.slot, call, self._timeout)

    async def _call(self, slot: int, call: bytes, timeout: float) -> Any:
        """The reply. A node that does not know our functions is told them; one that names another node is believed."""
        line = self._nodes.line(slot) or await self._found(slot, timeout)
        for _ in range(TRIES):
            try:
                return await line.call(call, timeout)
            except StoreUnavailable:
                self._nodes.failed(line, "")
                raise
            except Refused as refusal:
                line = await self._after(line, str(refusal))
        raise self._refused("its nodes do not agree whose call it is")

    async def _found(self, slot: int, timeout: float) -> Line:
        try:
            async with asyncio.timeout(max(timeout, PATIENCE)):
                return await self._nodes.find(slot)
        except TimeoutError:
            raise StoreUnavailable(f"the quota store at {self._nodes.where} did not answer in time") from None

    async def _after(self, line: Line, refusal: str) -> Line:
        """Which node to ask after one refused. StoreUnavailable if none."""
        if "Function not found" not in refusal:
            other = self._nodes.failed(line, refusal)
            if other is None:
                raise self._refused(refusal)
            return other
        try:
            await line.call(_LOAD, PATIENCE)
        except Refused as trouble:
            if "already exists" not in str(trouble):  # else another call loaded the library
                self._nodes.failed(line, str(trouble))
                raise self._refused(str(trouble)) from trouble
        return line

    def _refused(self, refusal: str) -> StoreUnavailable:
        return StoreUnavailable(f"the quota store at {self._nodes.where} refused the call: {refusal}")

    async def _reach(self, line: Line, tag: str) -> float:
        """The node's time; the key's tag makes it lie there."""
        write = command("SET", f"weir:ping:{{{tag}}}", "", "PX", 1_000)
        try:
            time, _ = await asyncio.gather(line.call(_TIME, PATIENCE), line.call(write, PATIENCE))
        except StoreUnavailable:
            self._nodes.failed(line, "")
            raise
        except Refused as refusal:
            self._nodes.failed(line, str(refusal))
            raise self._refused(str(refusal)) from refusal
        return _seconds(time)

    async def _announce(self, timeout: float) -> int:
        call = _fcall("sidecars", [_SIDECARS], [self._name.encode(), b"%d" % ALIVE_MS])
        self._living = max(1, await self._call(_SIDECARS_SLOT, call, timeout))
        return self._living

    async def _announce_again(self) -> None:
        """Those that were seen last go on to count where it cannot be asked."""
        with suppress(StoreUnavailable):
            await self._announce(self._timeout)

    async def _now(self, slot: int) -> int:
        return self._moment() or round(_seconds(await self._call(slot, _TIME, PATIENCE)) * SECOND)

    def _moment(self) -> int:
        """The moment in tests, else 0: Redis' own."""
        return 0 if self._clock is None else round(self._clock() * SECOND)

    def _address(self, account: Account) -> _Address:
        address = self._addresses.get(id(account))
        if address is None or address.account is not account:
            if len(self._addresses) >= ADDRESSED:
                self._addresses.clear()
            address = self._addresses[id(account)] = _Address(account)
        return address


# ---- questions ------------------------------------------------------------------------------------------------------------


class _Address:
    """An account as it goes over the wire: its hash slot, its keys, its scopes and their terms."""

    __slots__ = ("_head", "_scopes", "account", "keys", "rules", "scopes", "slot", "terms")

    def __init__(self, account: Account) -> None:
        tag = _safe(account.slot)
        self.account = account
        self.slot = hash_slot(tag.encode())
        self.keys = [f"weir:{{{tag}}}:{part}".encode() for part in ("mark", "w", "d", "f")]
        self.rules = [(scope, terms(scope.policy)) for scope in account.scopes]
        self.terms = b"".join(packed.packed_terms(rule) for _, rule in self.rules)
        self.scopes = [packed.scope_field(scope) for scope in account.scopes]
        self._head = b"".join(map(bulk, (b"FCALL", f"{LIBRARY}_admit".encode(), b"4", *self.keys, self.terms)))
        self._scopes = b"".join(map(bulk, self.scopes))

    def admit(self, ask: Ask, lease_span: int, moment: int) -> bytes:
        """The call, put together by hand: the most frequent one, and its head is always the same."""
        numbers = _ASK.pack(
            lease_span, moment, ask.expected, ask.first_hold, ask.ceiling, ask.cap_need, ask.primary, ask.forced
        )
        count = b"*%d\r\n" % (10 + len(self.scopes) + 2 * len(ask.targets))
        lease = packed.lease_field(ask.lease)
        words = [count, self._head, b"$64\r\n", numbers, b"\r\n$%d\r\n" % len(lease), lease, b"\r\n", self._scopes]
        for target in ask.targets:
            rate = b"" if target.rate is None else packed.packed_rate(target_terms(target.rate))
            words += [bulk(target.name.encode()), bulk(rate)]
        return b"".join(words)


def _seed_words(states: list[tuple[Scope, State]], now: int, lease_span: int) -> list[bytes]:
    """The mark, how long it and the books are kept, when they may be forgotten, and the books."""
    keeps = [state.keep_until(lease_span) for _, state in states]
    kept = max([now + SECOND, *keeps])
    outlived = now + MARK + max((longest(terms(scope.policy)) for scope, _ in states), default=0)
    forgets = []
    for (scope, _), keep in zip(states, keeps, strict=True):
        forgets += [b"%d" % keep, packed.scope_field(scope)]
    mark = b"%016x%b" % (now, uuid4().hex[:8].encode())
    spans = [b"%d" % ((until - now) // 1000) for until in (max(outlived, kept), kept)]
    fields = [b"*", packed.slot_record(min(keeps, default=NEVER), kept)]
    fields += [word for scope, state in states for word in packed.seeded_fields(scope, state)]
    return [mark, *spans, b"%d" % len(forgets), *forgets, *fields]


def _fcall(function: str, keys: list[bytes], words: list[bytes]) -> bytes:
    return command("FCALL", f"{LIBRARY}_{function}", len(keys), *keys, *words)


@lru_cache(ADDRESSED)
def _hash_slot(slot: str) -> int:
    """Where the keys of a slot of ours lie in a cluster."""
    return hash_slot(_safe(slot).encode())


def _safe(name: str) -> str:
    """Percent-encoded: two names never share a key, and no brace, star or line break reaches Redis."""
    return quote(name, safe="")


# ---- answers --------------------------------------------------------------------------------------------------------------


def _verdict(address: _Address, ask: Ask, reply: list[Any]) -> Verdict:
    kind, now, hold, ceiling, expected, target, refuser, answered, *rest = reply
    said = packed.KINDS[kind - 1]
    decided = decision.Decision(
        said, hold, ceiling, expected, target.decode() or None, refuser, packed.ANSWERS[answered]
    )
    if decided.admitted:
        return decision.admitted(decided, now, packed.Windows(address.rules, rest, now))
    records, beside = rest[: len(address.scopes)], rest[len(address.scopes) :]
    books = _books(
        address, dict(zip(address.scopes, map(packed.books, records), strict=True)), *map(packed.pairs, beside)
    )
    return decision.verdict(books, ask, decided, now, random.random())  # noqa: S311  spreads guesses, hides nothing


def _books(address: _Address, states: dict[bytes, State], *beside: Iterable[tuple[bytes, bytes]]) -> list[Book]:
    for fields in beside:
        packed.fill(states, fields)
    return [Book(scope, state) for scope, state in zip(address.account.scopes, states.values(), strict=True)]


def _seconds(time: list[bytes]) -> float:
    return int(time[0]) + int(time[1]) / SECOND
