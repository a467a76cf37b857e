"""What a process leaves to its successor, and takes on from its predecessors, so that books and quota store agree.

The journal says what ended processes never finished, and what they finished so lately that its settlement may be missing:
the one is booked as crashed, and both are settled, which changes nothing where that was done. What the store could not be
told while it was away stands in a note beside the journal, written anew for as long as there is any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal

import msgspec

from meter.callers.directory import Directory
from meter.ledger.journal import Journal, JournalError
from meter.ledger.pricing import cost_nanousd
from meter.ledger.record import Opened, UsageRecord
from meter.telemetry import log
from quotas.books import REMEMBER
from quotas.guarded import GuardedStore
from quotas.policy import UNLIMITED
from quotas.store import Account, Scope, ScopeKind
from quotas.untold import Debt
from quotas.windows import SECOND

REMEMBERED_SECONDS = REMEMBER / SECOND
"""How long after its lease expired an exchange can still be settled."""

TOGETHER = 64
"""Settlements under way at once: the requests of the day come first."""

_Settlement = tuple[Account, str, int]


class Succession:
    """Between the journal and the store of one process. `adopted` is set once predecessors were looked for."""

    def __init__(self, journal: Journal, store: GuardedStore, directory: Directory) -> None:
        self.adopted = asyncio.Event()
        self._journal = journal
        self._store = store
        self._directory = directory
        self._note = b""

    # ---- from predecessors -------------------------------------------------------------------------------------------

    async def adopt(self) -> None:
        """Books what ended processes left unfinished, and sees to it that all of theirs is settled."""
        unfinished = (await asyncio.to_thread(self._journal.adopt)).unfinished
        left = self._journal.left()
        crashed = list(self._booked(unfinished))
        self.adopted.set()
        debts = [debt for note in left.notes for debt in _debts(note)]
        self._store.take_on(debts)
        told = {debt.lease for debt in debts}  # an admission of unclear outcome is to be settled with 0
        ended = [record for record in left.ended if str(record.exchange_id) not in told]
        await self._settle([*crashed, *map(self._settlement, ended)])

    def _booked(self, unfinished: Iterable[Opened]) -> Iterator[_Settlement]:
        for opened in unfinished:
            record = self._priced(opened.record)
            try:
                self._journal.finished(record)
            except JournalError as full:
                log.warning("a crashed process's exchange is not booked yet", reason=str(full))
                continue
            lease = str(record.exchange_id)
            log.warning("a crashed process's exchange was booked", exchange_id=lease, tokens=record.total_tokens)
            yield self._account(record.key_id, opened.account_slot, opened.scope_names), lease, record.total_tokens

    def _settlement(self, record: UsageRecord) -> _Settlement:
        scopes: list[tuple[ScopeKind, str]] = [("key", record.key_id)]
        scopes += [("team", record.team_id)] if record.team_id is not None else []
        slot = ":".join(scopes[-1])
        return self._account(record.key_id, slot, scopes), str(record.exchange_id), record.total_tokens

    async def _settle(self, settlements: Iterable[_Settlement]) -> None:
        waiting = iter(settlements)
        while batch := list(islice(waiting, TOGETHER)):
            await asyncio.gather(*(self._store.settle(*each) for each in batch))

    def _priced(self, record: UsageRecord) -> UsageRecord:
        """With the cost of what was known when the process ended."""
        price = self._directory.prices.at(record.model_requested, record.backend, record.started_at)
        if price is None:
            return record
        cost = cost_nanousd(record.prompt_tokens, record.cached_prompt_tokens, record.completion_tokens, price)
        return msgspec.structs.replace(record, price_id=price.id, cost_nanousd=cost)

    def _account(self, key_id: str, slot: str, scopes: Iterable[tuple[Literal["key", "team"], str]]) -> Account:
        """The account that holds an ended process's lease: as it is now; or, where the key is gone or has moved, as it was
        named, without limits, which leaves its windows as they are."""
        caller = self._directory.by_key(key_id)
        if caller is not None and caller.account.slot == slot:
            return caller.account
        return Account(slot, tuple(Scope(kind, name, UNLIMITED) for kind, name in scopes))

    # ---- for a successor ---------------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Notes what the store was not told yet."""
        debts = self._store.debts()
        note = msgspec.msgpack.encode(debts) if debts else b""
        if note == self._note:
            return
        try:
            await asyncio.to_thread(self._journal.leave, note)
        except OSError as error:
            log.warning("what the quota store is still to be told cannot be noted", reason=str(error))
        else:
            self._note = note


def _debts(note: bytes) -> list[Debt]:
    try:
        return msgspec.msgpack.decode(note, type=list[Debt])
    except (msgspec.DecodeError, ValueError) as error:
        log.warning("what an ended process left untold cannot be read", reason=str(error))
        return []
