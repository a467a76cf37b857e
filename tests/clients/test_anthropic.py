"""The `anthropic` client at /v1/messages, plain, streamed and async: it is told what is booked, and understands how answers end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent

from tests.clients.site import (
    BEYOND,
    BLOCKED,
    CAPPED,
    LIMIT,
    MODEL,
    PROMPT,
    ZONE,
    Told,
    booked,
    breaking,
    broken,
    cut,
    house,
    left,
    side_by_side,
    statuses,
)
from tests.engine_adapter.streams import recorded
from tests.gateway.house import House, until
from tests.gateway.stub import answered, worker

HELLO: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}]}
TOOL: Any = {"name": "get_time", "input_schema": ZONE}
SSE = b"Content-Type: text/event-stream"


@contextmanager
def client(site: House, **options: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(**{"base_url": site.base, "api_key": site.secret, **options}) as found:
        yield found


@asynccontextmanager
async def async_client(site: House, **options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=site.base, api_key=site.secret, **options) as found:
        yield found


# ---- what it was told ------------------------------------------------------------------------------------------------


def told_of(message: Message) -> Told:
    text = "".join(block.text for block in message.content if block.type == "text")
    return Told(message.model, message.usage.input_tokens, message.usage.output_tokens, text, message.stop_reason)


def told_of_events(events: Iterable[RawMessageStreamEvent]) -> Told:
    start, *_, delta, stop = events = list(events)
    assert (start.type, delta.type, stop.type) == ("message_start", "message_delta", "message_stop")
    assert start.type == "message_start" and delta.type == "message_delta"
    pieces = [event.delta for event in events if event.type == "content_block_delta"]
    text = "".join(piece.text for piece in pieces if piece.type == "text_delta")
    prompt = start.message.usage.input_tokens if delta.usage.input_tokens is None else delta.usage.input_tokens
    return Told(start.message.model, prompt, delta.usage.output_tokens, text, delta.delta.stop_reason)


# ---- whole answers ---------------------------------------------------------------------------------------------------


def plain(found: anthropic.Anthropic) -> Told:
    return told_of(found.messages.create(**HELLO, max_tokens=LIMIT))


def streamed(found: anthropic.Anthropic) -> Told:
    return told_of_events(found.messages.create(**HELLO, max_tokens=LIMIT, stream=True))


def by_its_helper(found: anthropic.Anthropic) -> Told:
    with found.messages.stream(**HELLO, max_tokens=LIMIT) as stream:
        text = "".join(stream.text_stream)
        told = told_of(stream.get_final_message())
    assert told.text == text
    return told


def with_a_system_prompt(found: anthropic.Anthropic) -> Told:
    content: Any = [{"type": "text", "text": PROMPT}, {"type": "text", "text": "and the mill"}]
    messages: Any = [{"role": "user", "content": content}]
    return told_of(found.messages.create(model=MODEL, system="Be brief.", messages=messages, max_tokens=LIMIT))


@pytest.mark.parametrize("call", [plain, streamed, by_its_helper, with_a_system_prompt])
async def test_it_is_told_what_is_booked(tmp_path: Path, call: Callable[[anthropic.Anthropic], Told]) -> None:
    async with house(tmp_path) as site:
        with client(site) as found:
            told = await asyncio.to_thread(call, found)
        assert (told.completion, told.reason) == (LIMIT, "max_tokens")
        await booked(site, told)


async def async_plain(found: anthropic.AsyncAnthropic) -> Told:
    return told_of(await found.messages.create(**HELLO, max_tokens=LIMIT))


async def async_streamed(found: anthropic.AsyncAnthropic) -> Told:
    events = await found.messages.create(**HELLO, max_tokens=LIMIT, stream=True)
    return told_of_events([event async for event in events])


async def async_by_its_helper(found: anthropic.AsyncAnthropic) -> Told:
    async with found.messages.stream(**HELLO, max_tokens=LIMIT) as stream:
        text = await stream.get_final_text()
        told = told_of(await stream.get_final_message())
    assert told.text == text
    return told


@pytest.mark.parametrize("call", [async_plain, async_streamed, async_by_its_helper])
async def test_the_async_client_is_told_what_is_booked(
    tmp_path: Path, call: Callable[[anthropic.AsyncAnthropic], Awaitable[Told]]
) -> None:
    async with house(tmp_path) as site:
        async with async_client(site) as found:
            told = await call(found)
        assert told.completion == LIMIT
        await booked(site, told)


async def test_a_token_in_the_other_header_opens_as_well(tmp_path: Path) -> None:
    async with house(tmp_path) as site:
        async with anthropic.AsyncAnthropic(base_url=site.base, auth_token=site.secret) as found:
            told = await async_plain(found)
        await booked(site, told)


async def test_tokens_are_counted_for_nothing_as_they_will_be_charged(tmp_path: Path) -> None:
    async with house(tmp_path) as site, async_client(site) as found:
        counted = await found.messages.count_tokens(**HELLO)
        assert (await site.windows())["hour"]["used"] == 0
        told = told_of(await found.messages.create(**HELLO, max_tokens=LIMIT))
        assert counted.input_tokens == told.prompt
        await booked(site, told)


async def test_the_raw_answer_has_the_headers_that_name_the_record_and_what_is_left(tmp_path: Path) -> None:
    async with house(tmp_path) as site, async_client(site) as found:
        raw = await found.messages.with_raw_response.create(
            **HELLO, max_tokens=LIMIT, extra_headers={"x-weir-tags": "feature=greeting"}
        )
        row = await booked(site, told_of(await raw.parse()))
        assert raw.headers["x-weir-request-id"] == str(row.request_id)
        assert row.tags == {"feature": "greeting"}
        assert int(raw.headers["x-ratelimit-remaining-tokens"]) < int(raw.headers["x-ratelimit-limit-tokens"])


# ---- tools -----------------------------------------------------------------------------------------------------------


async def test_a_streamed_use_of_a_tool_comes_whole_and_its_result_goes_back(tmp_path: Path) -> None:
    async with (
        worker(answered(recorded("messages_tools"), SSE)) as stub,
        house(tmp_path, served="tiny", url=stub.url) as site,
        async_client(site) as found,
    ):
        async with found.messages.stream(**HELLO, max_tokens=100, tools=[TOOL]) as stream:
            message = await stream.get_final_message()
        (use,) = message.content
        assert use.type == "tool_use"
        result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "12:00"}]}
        history: Any = [*HELLO["messages"], {"role": "assistant", "content": message.content}, result]
        async with found.messages.stream(model=MODEL, messages=history, max_tokens=100, tools=[TOOL]) as stream:
            await stream.until_done()
        first, second = (request.json for request in stub.requests)
        assert (use.name, use.input) == ("get_time", {"zone": "UTC"})
        assert (message.model, message.stop_reason) == (MODEL, "tool_use")
        assert first["tools"] == [TOOL]
        assert [
            part["type"] for part in (second["messages"][1]["content"][0], second["messages"][2]["content"][0])
        ] == [
            "tool_use",
            "tool_result",
        ]
        usage = (message.usage.input_tokens, message.usage.output_tokens)
        assert [(row.prompt_tokens, row.completion_tokens) for row in await site.rows(2)] == [usage, usage]
        assert usage == (16, 63)


# ---- refusals --------------------------------------------------------------------------------------------------------

TOO_SMALL = {"rate": None, "burst": None, "cap": {"tokens": 5, "seconds": 3600}}
HOPELESS = [
    ({"api_key": "wk-nobody"}, {}, None, anthropic.AuthenticationError, "authentication_error"),
    ({}, {"model": "nobody"}, None, anthropic.NotFoundError, "not_found_error"),
    ({}, {"max_tokens": 0}, None, anthropic.BadRequestError, "invalid_request_error"),
    ({}, {}, BLOCKED, anthropic.RateLimitError, "rate_limit_error"),
    ({}, {}, TOO_SMALL, anthropic.APIStatusError, "request_too_large"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("options", "changed", "tier", "kind", "name"), HOPELESS)
async def test_a_hopeless_request_is_its_own_class_of_error_and_is_not_sent_again(
    tmp_path: Path,
    options: dict[str, Any],
    changed: dict[str, Any],
    tier: dict[str, Any] | None,
    kind: type[anthropic.APIStatusError],
    name: str,
    stream: bool,
) -> None:
    def call(found: anthropic.Anthropic) -> None:
        found.messages.create(**{**HELLO, "max_tokens": LIMIT, "stream": stream, **changed})

    async with house(tmp_path, tier=tier) as site:
        with client(site, max_retries=3, **options) as found, pytest.raises(kind) as raised:
            await asyncio.to_thread(call, found)
        assert raised.value.type == name
        assert raised.value.api_message
        assert raised.value.response.headers.get("x-should-retry", "false") == "false"
        assert statuses(site) == {raised.value.status_code: 1}
        assert not site.large.requests


async def test_counting_is_refused_in_the_same_classes(tmp_path: Path) -> None:
    async with house(tmp_path) as site, async_client(site, max_retries=3) as found:
        with pytest.raises(anthropic.NotFoundError):
            await found.messages.count_tokens(model="nobody", messages=HELLO["messages"])
        with pytest.raises(anthropic.AuthenticationError):
            await found.with_options(api_key="wk-nobody").messages.count_tokens(**HELLO)
        assert statuses(site) == {401: 1, 404: 1}


async def test_a_refusal_that_waiting_helps_is_waited_for(tmp_path: Path) -> None:
    async with house(tmp_path, tier={"max_parallel": 1}) as site, async_client(site, max_retries=20) as found:
        site.large.tokens_per_second = 20
        running = await found.messages.create(**HELLO, max_tokens=BEYOND, stream=True)
        await anext(aiter(running))
        waiting = asyncio.create_task(found.messages.create(**HELLO, max_tokens=1))
        await until(lambda: asyncio.sleep(0, statuses(site)[429]), bool)
        await running.close()
        assert told_of(await waiting).completion == 1
        assert statuses(site)[429] >= 1
        assert sorted(row.ending for row in await site.rows(2)) == ["client_gone", "completed"]


# ---- how streams end -------------------------------------------------------------------------------------------------


async def test_a_stream_that_is_cut_at_the_cap_ends_with_max_tokens(tmp_path: Path) -> None:
    async with house(tmp_path, tier=CAPPED) as site:
        with client(site) as found:
            asked: dict[str, Any] = {**HELLO, "max_tokens": BEYOND, "stream": True}
            both = await asyncio.to_thread(side_by_side, site, lambda: found.messages.create(**asked))
        await cut(site, [told_of_events(events) for events in both], "max_tokens")


async def test_a_stream_that_the_engine_broke_raises(tmp_path: Path) -> None:
    async with house(tmp_path) as site, async_client(site) as found:
        breaking(site)
        words = ""
        async with found.messages.stream(**HELLO, max_tokens=LIMIT) as stream:
            with pytest.raises(anthropic.APIStatusError) as raised:
                async for text in stream.text_stream:
                    words += text
        assert raised.value.type == "api_error"
        await broken(site, len(words.split()), exact=False)


async def test_a_stream_that_is_closed_early_is_booked_as_left(tmp_path: Path) -> None:
    async with house(tmp_path) as site, async_client(site) as found:
        site.large.tokens_per_second = 50
        words = 0
        async with found.messages.stream(**HELLO, max_tokens=BEYOND) as stream:
            async for _ in stream.text_stream:
                words += 1
                if words == 3:
                    break
        await left(site, words)
