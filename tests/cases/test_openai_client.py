"""The official OpenAI client: it understands our refusals, streams and broken streams, and does not hammer us."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.cases.house import BODY, House, Key
from tests.cases.stub import DONE, FIN, RESET, SILENCE, USE, T, stream

pytestmark = pytest.mark.asyncio(loop_scope="session")


@contextmanager
def client(house: House, key: Key) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{house.proxy.port}/v1", api_key=key.secret) as found:
        yield found


def text(chunks: Iterable[ChatCompletionChunk]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


async def test_a_hopeless_refusal_is_raised_with_our_words_and_not_retried(house: House) -> None:
    """T112"""
    key = await house.key(limit=0)
    before = await house.metric("weir_requests_total")

    def call() -> openai.RateLimitError:
        with client(house, key) as found, pytest.raises(openai.RateLimitError) as raised:
            found.chat.completions.create(**BODY)
        return raised.value

    error = await asyncio.to_thread(call)
    assert error.code == "insufficient_quota"
    assert "limit" in error.message.lower()
    assert isinstance(error.body, dict)
    assert {"message", "type", "param", "code"} <= set(error.body)
    assert error.response.headers["x-should-retry"] == "false"
    assert 1 <= await house.metric("weir_requests_total") - before <= 3
    assert house.u1.seen == []
    await house.rows(key, 0)


async def test_a_plain_loop_over_a_stream_sees_nothing_odd(house: House) -> None:
    """T113"""
    key = await house.key()
    house.u1.does(stream(T("He"), T("llo"), FIN, USE(9, 4), DONE))

    def call() -> str:
        with client(house, key) as found:
            return text(found.chat.completions.create(stream=True, **BODY))

    assert await asyncio.to_thread(call) == "Hello"
    assert await house.used(key) == 13


async def test_usage_that_was_asked_for_is_the_last_chunk(house: House) -> None:
    """T113"""
    key = await house.key()
    house.u1.does(stream(T("He"), T("llo"), FIN, USE(9, 4), DONE))

    def call() -> list[ChatCompletionChunk]:
        asked: dict[str, Any] = {**BODY, "stream_options": {"include_usage": True}}
        with client(house, key) as found:
            return list(found.chat.completions.create(stream=True, **asked))

    *chunks, last = await asyncio.to_thread(call)
    assert text(chunks) == "Hello"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == 13
    assert await house.used(key) == 13


async def test_an_async_client_may_close_a_stream_early(house: House) -> None:
    """T113"""
    key = await house.key()
    house.u1.does(stream(T("He"), SILENCE))
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{house.proxy.port}/v1", api_key=key.secret) as found:
        chunks = await found.chat.completions.create(stream=True, **BODY)
        async for _ in chunks:
            break
        await chunks.close()
    row = await house.row(key)
    assert row["ending"] == "client_gone"
    assert await house.used(key) == row["prompt_tokens"] + row["completion_tokens"]


BROKEN = (openai.APIError, openai.httpx.HTTPError) if hasattr(openai, "httpx") else (openai.APIError,)


async def test_a_broken_stream_does_not_look_complete(house: House) -> None:
    """T114"""
    key = await house.key()
    house.u1.does(stream(T("a"), T("b"), T("c"), RESET))

    def call() -> str:
        with client(house, key) as found:
            return text(found.chat.completions.create(stream=True, **BODY))

    with pytest.raises(BROKEN):
        await asyncio.to_thread(call)
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{house.proxy.port}/v1", api_key=key.secret) as found:
        chunks = await found.chat.completions.create(stream=True, **BODY)
        with pytest.raises(BROKEN):
            async for _ in chunks:
                pass
    assert {row["ending"] for row in await house.rows(key, 2)} == {"engine_broke"}
