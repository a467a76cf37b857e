"""The books as they lie in Redis (see rule.lua), and the terms as they are sent there, as bytes."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from struct import Struct
from typing import overload

import msgspec

from quotas import decision, store
from quotas.books import REMEMBER, Lease, Meter, State, Terms
from quotas.store import Answer, Scope, VerdictKind
from quotas.windows import NEVER, Debt, Window

CHUNK = 16
"""Slots in one field of the hash."""

KINDS: tuple[VerdictKind, ...] = ("base", "burst", "overflow", "parallel", "cap", "rate")
"""Verdicts, numbered from 1 in Redis."""

_SAID: tuple[Answer, ...] = ("base", "burst", "no")
ANSWERS: dict[int, tuple[Answer, ...]] = {
    0: (),
    **{key: (said,) for key, said in enumerate(_SAID, 1)},
    **{key + 4 * team: (mine, its) for key, mine in enumerate(_SAID, 1) for team, its in enumerate(_SAID, 1)},
}
"""What one or two scopes said, as one number in Redis."""

SLOT = Struct("<4d")
RECORD = Struct("<25d")  # of holds 5; of windows three spans and slots, pace and per, debt, three sums, three ends
METER = Struct("<11d")
LEASE = Struct("<10d")
LENGTH = Struct("<I")
TERMS = Struct("<12d")
RATE = Struct("<3d")

_SLOTS = msgspec.msgpack.Decoder(list[int])


def scope_field(scope: Scope) -> bytes:
    return f"{scope.kind[0]}:{scope.name}".encode()


def lease_field(lease: str) -> bytes:
    return b"l:" + lease.encode()


def packed_terms(rule: Terms) -> bytes:
    rate, repay, cap = ((s.tokens, s.span, s.slot) if s else (0, 0, 0) for s in (rule.rate, rule.repay, rule.cap))
    return TERMS.pack(*rate, *repay, *cap, rule.burst, rule.room, -1 if rule.parallel is None else rule.parallel)


def packed_rate(rule: Terms) -> bytes:
    return RATE.pack(rule.rate.tokens, rule.rate.span, rule.rate.slot) if rule.rate else b""


# ---- reading ----------------------------------------------------------------------------------------------------------


def books(record: bytes) -> State:
    """A scope's books, but for leases, targets and the windows' slots."""
    (
        seen, running, cap_held, held, opened, cap_span, cap_slot, rate_span, rate_slot, repay_span, repay_slot, pace, per,
        debt, since, _, cap, rate, repay, cap_first, cap_newest, rate_first, rate_newest, repay_first, repay_newest,
    ) = map(int, RECORD.unpack(record))  # fmt: skip
    return State(
        seen=seen,
        cap_held=cap_held,
        running=running,
        cap=_window(cap_span, cap_slot, cap, cap_first, cap_newest),
        primary=Meter(
            held=held,
            opened=opened,
            rate=_window(rate_span, rate_slot, rate, rate_first, rate_newest),
            repay=_window(repay_span, repay_slot, repay, repay_first, repay_newest),
            debt=Debt(debt, since, pace, per),
        ),
    )


class Windows(Sequence[store.Window]):
    """An account's windows as they stood at a moment, worked out when somebody looks at them. Equal to a tuple of the same."""

    __slots__ = ("_found", "_now", "_records", "_scopes")

    def __init__(self, scopes: Sequence[tuple[Scope, Terms]], records: Sequence[bytes], now: int) -> None:
        self._scopes = scopes
        self._records = records
        self._now = now
        self._found: tuple[store.Window, ...] | None = None

    def _all(self) -> tuple[store.Window, ...]:
        if self._found is None:
            found: list[store.Window] = []
            for (scope, rule), record in zip(self._scopes, self._records, strict=True):
                found += _shown(record, scope, rule, self._now)
            self._found = tuple(found)
        return self._found

    def __len__(self) -> int:
        return len(self._all())

    def __iter__(self) -> Iterator[store.Window]:
        return iter(self._all())

    @overload
    def __getitem__(self, index: int) -> store.Window: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[store.Window, ...]: ...
    def __getitem__(self, index: int | slice) -> store.Window | tuple[store.Window, ...]:
        return self._all()[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (tuple, Windows)) and self._all() == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # as of any mutable sequence: windows can be changed

    def __repr__(self) -> str:
        return repr(self._all())


def _shown(record: bytes, scope: Scope, rule: Terms, now: int) -> list[store.Window]:
    (
        _, _, cap_held, held, opened, cap_span, cap_slot, rate_span, rate_slot, _, _, _, _,
        _, _, _, cap, rate, repay, _, cap_newest, _, rate_newest, _, _,
    ) = RECORD.unpack(record)  # fmt: skip
    return decision.windows(
        scope,
        rule,
        now,
        int(rate),
        int((rate_newest + 1) * rate_slot + rate_span) if rate else 0,
        int(repay),
        int(opened),
        int(held),
        int(cap),
        int((cap_newest + 1) * cap_slot + cap_span) if cap else 0,
        int(cap_held),
    )


def _window(span: int, slot: int, total: int, first: int, newest: int) -> Window | None:
    """A window is kept if it has a span; an empty one has its first slot after its newest."""
    return Window(span, slot, total, first if first <= newest else 0, newest) if span else None


def fill(states: Mapping[bytes, State], fields: Iterable[tuple[bytes, bytes]]) -> None:
    """Adds what lies beside the books of an account's scopes: targets, slots, leases."""
    found = dict(fields)
    windows = {kind + scope: window for scope, state in states.items() for kind, window in _windows(state)}
    for field, packed in found.items():
        if field.startswith(b"o:"):
            length, _, rest = field[2:].partition(b":")
            if (state := states.get(rest[: int(length)])) is not None:  # else another key's
                meter = state.targets[rest[int(length) :].decode()] = _target(packed)
                windows[b"m" + field] = meter.rate
    for field, packed in found.items():
        if field.startswith(b"l:"):
            _add_lease(states, field[2:].decode(), packed)
        elif (window := windows.get(field.rpartition(b":")[0])) is not None:
            _fill_window(window, int(field.rpartition(b":")[2]), _SLOTS.decode(packed))


def _windows(state: State) -> Iterator[tuple[bytes, Window | None]]:
    yield from ((b"h", state.cap), (b"m", state.primary.rate), (b"r", state.primary.repay))


def _target(packed: bytes) -> Meter:
    held, opened, debt, since, pace, per, *rate = map(int, METER.unpack(packed))
    return Meter(held, opened, _window(*rate), None, Debt(debt, since, pace, per))


def _add_lease(states: Mapping[bytes, State], name: str, packed: bytes) -> None:
    """A lease is held in one or two scopes; only in the first against a target's own rate."""
    numbers = list(map(int, LEASE.unpack_from(packed)))
    first, second, target = _texts(packed[LEASE.size :])
    for scope in (first, second):
        if (state := states.get(scope)) is not None:
            lease = _lease(numbers, first[2:].decode(), target.decode() or None)
            if lease.kind == "overflow" and scope == second:
                lease.rate_hold = 0
            state.leases[name] = lease
            heapq.heappush(state.due, (lease.expires + (0 if lease.booked is None else REMEMBER + 1), name))


def _lease(numbers: list[int], key: str, target: str | None) -> Lease:
    kind, opened, expires, ceiling, hold, expected, rate_hold, cap_hold, consumed, booked = numbers
    return Lease(
        key, KINDS[kind - 1], opened, expires, ceiling, hold, expected, rate_hold, cap_hold, consumed, target,
        None if booked < 0 else booked,
    )  # fmt: skip


def _texts(packed: bytes) -> Iterator[bytes]:
    while packed:
        (length,) = LENGTH.unpack_from(packed)
        yield packed[4 : 4 + length]
        packed = packed[4 + length :]


def _fill_window(window: Window, chunk: int, slots: list[int]) -> None:
    first = chunk * CHUNK
    window.slots |= {first + place: tokens for place, tokens in enumerate(slots) if first + place >= window.oldest}


def pairs(flat: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)


# ---- writing ----------------------------------------------------------------------------------------------------------


def slot_record(forgets: int, kept: int) -> bytes:
    """A slot without leases: when something of it may be forgotten, until when its keys are kept."""
    return SLOT.pack(NEVER, forgets, kept, 0)


def seeded_fields(scope: Scope, state: State) -> Iterator[bytes]:
    """A scope's books, without leases or targets, as fields and values in turn."""
    meter, debt, field = state.primary, state.primary.debt, scope_field(scope)
    windows = [window for _, window in _windows(state)]
    spans = [number for window in windows for number in ((window.span, window.slot) if window else (0, 0))]
    totals = [window.total if window else 0 for window in windows]
    stays = min((w.leaves(min(w.slots) * w.slot) for w in windows if w and w.slots), default=NEVER)
    ends = [end for window in windows for end in _ends(window)]
    holds = (state.seen, 0, 0, 0, meter.opened)
    yield field
    yield RECORD.pack(*holds, *spans, debt.pace, debt.per, debt.tokens, debt.since, stays, *totals, *ends)
    for kind, window in _windows(state):
        for chunk, slots in _chunks(window).items():
            yield b"%b%b:%d" % (kind, field, chunk)
            yield msgspec.msgpack.encode(slots)


def recall_field(scope: Scope) -> bytes:
    """Where it is noted when the scope was last charged what it had used elsewhere."""
    return b"p:" + scope_field(scope)


def charges(state: State) -> Iterator[bytes]:
    """What the cap, the rate and the repay span were charged: moments and tokens in turn."""
    for _, window in _windows(state):
        slots = () if window is None else ((index * window.slot, tokens) for index, tokens in window.slots.items())
        yield msgspec.msgpack.encode([number for slot in slots for number in slot])


def _ends(window: Window | None) -> tuple[int, int]:
    """The first and the last slot that holds something."""
    slots = window.slots if window is not None else {}
    return min(slots, default=NEVER), max(slots, default=-1)


def _chunks(window: Window | None) -> dict[int, list[int]]:
    chunks: dict[int, list[int]] = {}
    for index, tokens in window.slots.items() if window is not None else ():
        chunks.setdefault(index // CHUNK, [0] * CHUNK)[index % CHUNK] = tokens
    return chunks
