"""How many sidecars share a store decides what each may spend while it is away."""

from __future__ import annotations

from meter.app import quota_store
from meter.config import QuotaStoreTerms
from tests.services.redis import RedisServer


async def test_each_sidecar_counts_those_that_the_store_knows() -> None:
    with RedisServer() as server:
        terms = QuotaStoreTerms(url=server.url, timeout_ms=2_000)
        first, second = (quota_store(terms, lambda up: None) for _ in range(2))
        try:
            for store in (first, second, first):
                await store.ping()
            assert (first.sidecars, second.sidecars) == (2, 2)
            server.kill()
            assert first.sidecars == 2, "the last that was heard"
        finally:
            await first.close()
            await second.close()


async def test_in_memory_a_process_is_alone() -> None:
    assert quota_store(QuotaStoreTerms(), lambda up: None).sidecars == 1
