"""Stores whose slots start empty by themselves, for tests that ask about anything but seeding."""

from __future__ import annotations

from quotas.memory import MemoryStore
from quotas.redis import RedisStore
from quotas.store import Account, Ask, Seed, Unseeded, Verdict


class EmptyMemory(MemoryStore):
    """A MemoryStore in which a slot without a mark gets one at its first admission."""

    async def admit(self, account: Account, ask: Ask) -> Verdict:
        try:
            return await super().admit(account, ask)
        except Unseeded:
            await self.seed(account.slot, Seed())
            return await super().admit(account, ask)


class EmptyRedis(RedisStore):
    """A RedisStore in which a slot without a mark gets one at its first admission."""

    async def admit(self, account: Account, ask: Ask) -> Verdict:
        try:
            return await super().admit(account, ask)
        except Unseeded:
            await self.seed(account.slot, Seed())
            return await super().admit(account, ask)
