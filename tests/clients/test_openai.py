"""The `openai` client, plain, streamed and async: it is told what is booked, and understands how answers end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

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
from tests.gateway.stub import answered, plain, worker

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}]}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": PROMPT}
ITEM: dict[str, Any] = {"model": MODEL, "input": PROMPT}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
TOOL: Any = {"type": "function", "function": {"name": "get_time", "parameters": ZONE}}
SSE = b"Content-Type: text/event-stream"


@contextmanager
def client(site: House, **options: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(**{"base_url": f"{site.base}/v1", "api_key": site.secret, **options}) as found:
        yield found


@asynccontextmanager
async def async_client(site: House) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{site.base}/v1", api_key=site.secret) as found:
        yield found


# ---- what it was told ------------------------------------------------------------------------------------------------


def told_of_chat(answer: ChatCompletion) -> Told:
    assert answer.usage
    (choice,) = answer.choices
    used = answer.usage
    assert used.total_tokens == used.prompt_tokens + used.completion_tokens
    text = choice.message.content or ""
    return Told(answer.model, used.prompt_tokens, used.completion_tokens, text, choice.finish_reason)


def told_of_chunks(chunks: Iterable[ChatCompletionChunk]) -> Told:
    *chunks, last = chunks
    assert last.usage and not last.choices
    assert not any(chunk.usage for chunk in chunks)
    (model,) = {chunk.model for chunk in (*chunks, last)}
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    reason = chunks[-1].choices[0].finish_reason
    return Told(model, last.usage.prompt_tokens, last.usage.completion_tokens, text, reason)


def told_of_response(answer: Response) -> Told:
    assert answer.usage
    reason = answer.incomplete_details.reason if answer.incomplete_details else answer.status
    return Told(answer.model, answer.usage.input_tokens, answer.usage.output_tokens, answer.output_text, reason)


def told_of_events(events: Iterable[ResponseStreamEvent]) -> Told:
    events = list(events)
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    told = told_of_response(last.response)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == told.text
    return told


# ---- whole answers ---------------------------------------------------------------------------------------------------


def chat(found: openai.OpenAI) -> Told:
    return told_of_chat(found.chat.completions.create(**CHAT, max_tokens=LIMIT))


def chat_with_the_newer_limit(found: openai.OpenAI) -> Told:
    return told_of_chat(found.chat.completions.create(**CHAT, max_completion_tokens=LIMIT))


def chat_streamed(found: openai.OpenAI) -> Told:
    return told_of_chunks(found.chat.completions.create(**CHAT, **USAGE, max_tokens=LIMIT, stream=True))


def chat_by_its_helper(found: openai.OpenAI) -> Told:
    with (
        found.chat.completions.stream(**CHAT, **USAGE, max_tokens=LIMIT) as stream,
        pytest.raises(openai.LengthFinishReasonError) as ended,
    ):
        stream.get_final_completion()
    return told_of_chat(ended.value.completion)


def completion(found: openai.OpenAI) -> Told:
    answer = found.completions.create(**TEXT, max_tokens=LIMIT)
    assert answer.usage
    text, reason = answer.choices[0].text, answer.choices[0].finish_reason
    return Told(answer.model, answer.usage.prompt_tokens, answer.usage.completion_tokens, text, reason)


def completion_streamed(found: openai.OpenAI) -> Told:
    *chunks, last = found.completions.create(**TEXT, **USAGE, max_tokens=LIMIT, stream=True)
    assert last.usage
    text, reason = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
    return Told(last.model, last.usage.prompt_tokens, last.usage.completion_tokens, text, reason)


def response(found: openai.OpenAI) -> Told:
    return told_of_response(found.responses.create(**ITEM, max_output_tokens=LIMIT))


def response_streamed(found: openai.OpenAI) -> Told:
    return told_of_events(found.responses.create(**ITEM, max_output_tokens=LIMIT, stream=True))


def response_by_its_helper(found: openai.OpenAI) -> Told:
    with found.responses.stream(**ITEM, max_output_tokens=LIMIT) as stream:
        return told_of_response(stream.get_final_response())


LENGTH, INCOMPLETE = "length", "max_output_tokens"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (chat, LENGTH),
        (chat_with_the_newer_limit, LENGTH),
        (chat_streamed, LENGTH),
        (chat_by_its_helper, LENGTH),
        (completion, LENGTH),
        (completion_streamed, LENGTH),
        (response, INCOMPLETE),
        (response_streamed, INCOMPLETE),
        (response_by_its_helper, INCOMPLETE),
    ],
)
async def test_it_is_told_what_is_booked(tmp_path: Path, call: Callable[[openai.OpenAI], Told], reason: str) -> None:
    async with house(tmp_path) as site:
        with client(site) as found:
            told = await asyncio.to_thread(call, found)
        assert (told.completion, told.reason) == (LIMIT, reason)
        await booked(site, told)


async def async_chat(found: openai.AsyncOpenAI) -> Told:
    return told_of_chat(await found.chat.completions.create(**CHAT, max_tokens=LIMIT))


async def async_chat_streamed(found: openai.AsyncOpenAI) -> Told:
    chunks = await found.chat.completions.create(**CHAT, **USAGE, max_tokens=LIMIT, stream=True)
    return told_of_chunks([chunk async for chunk in chunks])


async def async_response(found: openai.AsyncOpenAI) -> Told:
    return told_of_response(await found.responses.create(**ITEM, max_output_tokens=LIMIT))


async def async_response_streamed(found: openai.AsyncOpenAI) -> Told:
    events = await found.responses.create(**ITEM, max_output_tokens=LIMIT, stream=True)
    return told_of_events([event async for event in events])


@pytest.mark.parametrize("call", [async_chat, async_chat_streamed, async_response, async_response_streamed])
async def test_the_async_client_is_told_what_is_booked(
    tmp_path: Path, call: Callable[[openai.AsyncOpenAI], Awaitable[Told]]
) -> None:
    async with house(tmp_path) as site:
        async with async_client(site) as found:
            told = await call(found)
        assert told.completion == LIMIT
        await booked(site, told)


@pytest.mark.parametrize("form", ["float", "base64"])
async def test_embeddings_are_vectors_and_cost_their_texts(tmp_path: Path, form: Any) -> None:
    async with house(tmp_path) as site, async_client(site) as found:
        answer = await found.embeddings.create(model=MODEL, input=[PROMPT, "and the weir"], encoding_format=form)
        by_default = await found.embeddings.create(model=MODEL, input=PROMPT)
        vectors = by_default.data[0].embedding
        assert [item.index for item in answer.data] == [0, 1]
        assert len(vectors) > 1 and all(isinstance(number, float) for number in vectors)
        rows = await site.rows(2)
        assert [row.prompt_tokens for row in rows] == [answer.usage.prompt_tokens, by_default.usage.prompt_tokens]
        assert [row.completion_tokens for row in rows] == [0, 0]
        assert {answer.model, by_default.model} == {MODEL}


async def test_a_stream_that_did_not_ask_for_usage_has_none_and_is_booked(tmp_path: Path) -> None:
    async with house(tmp_path) as site:
        async with async_client(site) as found:
            chunks = [c async for c in await found.chat.completions.create(**CHAT, max_tokens=LIMIT, stream=True)]
        (row,) = await site.rows()
        assert all(chunk.choices and chunk.usage is None for chunk in chunks)
        assert (row.completion_tokens, row.usage_source) == (LIMIT, "engine")


async def test_the_raw_answer_has_the_headers_that_name_the_record_and_what_is_left(tmp_path: Path) -> None:
    async with house(tmp_path) as site, async_client(site) as found:
        raw = await found.chat.completions.with_raw_response.create(
            **CHAT, max_tokens=LIMIT, extra_headers={"x-request-id": "mine", "x-weir-tags": "feature=greeting"}
        )
        row = await booked(site, told_of_chat(raw.parse()))
        assert raw.headers["x-weir-request-id"] == str(row.request_id)
        assert row.tags == {"feature": "greeting"}
        assert raw.parse()._request_id == raw.request_id == "mine"
        assert raw.headers["x-weir-verdict"] == "base"
        assert int(raw.headers["x-ratelimit-remaining-tokens"]) < int(raw.headers["x-ratelimit-limit-tokens"])


async def test_it_lists_the_models_that_its_key_may_use(tmp_path: Path) -> None:
    async with house(tmp_path) as site, async_client(site) as found:
        assert MODEL in [model.id async for model in found.models.list()]
        assert (await found.models.retrieve(MODEL)).id == MODEL


# ---- tools -----------------------------------------------------------------------------------------------------------


async def test_a_tool_s_call_and_its_result_go_both_ways(tmp_path: Path) -> None:
    call = {"id": "call-1", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": "CET"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    said = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "tiny",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 338, "completion_tokens": 14, "total_tokens": 352},
    }
    async with worker(plain(said)) as stub, house(tmp_path, served="tiny", url=stub.url) as site:
        async with async_client(site) as found:
            answer = await found.chat.completions.create(**CHAT, max_tokens=100, tools=[TOOL], tool_choice="required")
            (asked,) = answer.choices[0].message.tool_calls or []
            result: Any = {"role": "tool", "tool_call_id": asked.id, "content": "12:00"}
            history = [*CHAT["messages"], answer.choices[0].message, result]
            await found.chat.completions.create(model=MODEL, messages=history, max_tokens=100, tools=[TOOL])
        first, second = (request.json for request in stub.requests)
        assert asked.type == "function" and asked.function.arguments == '{"zone": "CET"}'
        assert (first["tools"], first["tool_choice"]) == ([TOOL], "required")
        assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool"]
        assert second["messages"][1]["tool_calls"] == [call]
        assert answer.model == MODEL
        assert [(row.prompt_tokens, row.completion_tokens) for row in await site.rows(2)] == [(338, 14)] * 2


async def test_a_streamed_call_of_a_tool_comes_whole(tmp_path: Path) -> None:
    async with (
        worker(answered(recorded("chat_tools_usage"), SSE)) as stub,
        house(tmp_path, served="tiny", url=stub.url) as site,
        async_client(site) as found,
    ):
        async with found.chat.completions.stream(**CHAT, **USAGE, max_tokens=100, tools=[TOOL]) as stream:
            answer = await stream.get_final_completion()
        (call,) = answer.choices[0].message.tool_calls or []
        (row,) = await site.rows()
        assert (call.function.name, call.function.arguments) == ("get_time", '{"zone":"CET"}')
        assert answer.model == MODEL and answer.usage
        assert (row.prompt_tokens, row.completion_tokens) == (338, 73)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (338, 73)


async def test_a_response_s_call_of_a_tool_comes_whole(tmp_path: Path) -> None:
    tool: Any = {"type": "function", "name": "get_time", "parameters": ZONE, "strict": True}
    async with (
        worker(answered(recorded("responses_tools"), SSE)) as stub,
        house(tmp_path, served="tiny", url=stub.url) as site,
        async_client(site) as found,
    ):
        async with found.responses.stream(**ITEM, max_output_tokens=100, tools=[tool]) as stream:
            answer = await stream.get_final_response()
        (call,) = answer.output
        (row,) = await site.rows()
        assert call.type == "function_call" and call.name == "get_time"
        assert answer.model == MODEL and answer.usage
        assert (row.prompt_tokens, row.completion_tokens) == (16, 63)
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (16, 63)


# ---- refusals --------------------------------------------------------------------------------------------------------


def _chat(found: openai.OpenAI, **changed: Any) -> object:
    return found.chat.completions.create(**{**CHAT, "max_tokens": LIMIT, **changed})


def _response(found: openai.OpenAI, **changed: Any) -> object:
    return found.responses.create(**{**ITEM, "max_output_tokens": LIMIT, **changed})


HOPELESS = [
    ({"api_key": "wk-nobody"}, {}, None, openai.AuthenticationError, "invalid_api_key"),
    ({}, {"model": "nobody"}, None, openai.NotFoundError, "model_not_found"),
    ({}, {"n": 0}, None, openai.BadRequestError, None),
    ({}, {}, BLOCKED, openai.RateLimitError, "insufficient_quota"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("options", "changed", "tier", "kind", "code"), HOPELESS)
async def test_a_hopeless_request_is_its_own_class_of_error_and_is_not_sent_again(
    tmp_path: Path,
    options: dict[str, Any],
    changed: dict[str, Any],
    tier: dict[str, Any] | None,
    kind: type[openai.APIStatusError],
    code: str | None,
    stream: bool,
) -> None:
    async with house(tmp_path, tier=tier) as site:
        with client(site, max_retries=3, **options) as found, pytest.raises(kind) as raised:
            await asyncio.to_thread(_chat, found, stream=stream, **changed)
        assert raised.value.code == code
        assert raised.value.response.headers.get("x-should-retry", "false") == "false"
        assert statuses(site) == {raised.value.status_code: 1}
        assert not site.large.requests


@pytest.mark.parametrize("call", [_chat, _response])
async def test_what_no_quota_could_hold_is_refused_once(tmp_path: Path, call: Callable[..., object]) -> None:
    tier = {"rate": None, "burst": None, "cap": {"tokens": 5, "seconds": 3600}}
    async with house(tmp_path, tier=tier) as site:
        with client(site, max_retries=3) as found, pytest.raises(openai.APIStatusError) as raised:
            await asyncio.to_thread(call, found)
        assert (raised.value.status_code, raised.value.code) == (413, "request_exceeds_quota")
        assert statuses(site) == {413: 1}


async def test_a_refusal_that_waiting_helps_is_waited_for(tmp_path: Path) -> None:
    async with house(tmp_path, tier={"max_parallel": 1}) as site, async_client(site) as found:
        site.large.tokens_per_second = 20
        running = await found.chat.completions.create(**CHAT, max_tokens=BEYOND, stream=True)
        await anext(aiter(running))
        waiting = asyncio.create_task(found.with_options(max_retries=20).chat.completions.create(**CHAT, max_tokens=1))
        await until(lambda: asyncio.sleep(0, statuses(site)[429]), bool)
        await running.close()
        answer = await waiting
        assert told_of_chat(answer).completion == 1
        assert statuses(site)[429] >= 1
        assert sorted(row.ending for row in await site.rows(2)) == ["client_gone", "completed"]


# ---- how streams end -------------------------------------------------------------------------------------------------


async def test_a_stream_that_is_cut_at_the_cap_ends_with_length(tmp_path: Path) -> None:
    async with house(tmp_path, tier=CAPPED) as site:
        with client(site) as found:
            asked: dict[str, Any] = {**CHAT, **USAGE, "max_tokens": BEYOND, "stream": True}
            both = await asyncio.to_thread(side_by_side, site, lambda: found.chat.completions.create(**asked))
        await cut(site, [told_of_chunks(chunks) for chunks in both], LENGTH)


async def test_a_response_that_is_cut_at_the_cap_is_incomplete(tmp_path: Path) -> None:
    async with house(tmp_path, tier=CAPPED) as site:
        with client(site) as found:
            asked: dict[str, Any] = {**ITEM, "max_output_tokens": BEYOND, "stream": True}
            both = await asyncio.to_thread(side_by_side, site, lambda: found.responses.create(**asked))
        await cut(site, [told_of_events(events) for events in both], INCOMPLETE)
        assert "response.incomplete" in {events[-1].type for events in both}


async def test_a_stream_that_the_engine_broke_raises(tmp_path: Path) -> None:
    async with house(tmp_path) as site, async_client(site) as found:
        breaking(site)
        words = ""
        with pytest.raises(openai.APIError) as raised:
            async for chunk in await found.chat.completions.create(**CHAT, max_tokens=LIMIT, stream=True):
                words += chunk.choices[0].delta.content or ""
        assert raised.value.code == "engine_unavailable"
        await broken(site, len(words.split()))


async def test_a_response_that_the_engine_broke_raises(tmp_path: Path) -> None:
    async with house(tmp_path) as site, async_client(site) as found:
        breaking(site)
        words = ""
        with pytest.raises(openai.APIError) as raised:
            async for event in await found.responses.create(**ITEM, max_output_tokens=LIMIT, stream=True):
                words += event.delta if event.type == "response.output_text.delta" else ""
        assert raised.value.code == "engine_unavailable"
        await broken(site, len(words.split()), exact=False)


@pytest.mark.parametrize("call", ["chat", "responses"])
async def test_a_stream_that_is_closed_early_is_booked_as_left(tmp_path: Path, call: str) -> None:
    async with house(tmp_path) as site, async_client(site) as found:
        site.large.tokens_per_second = 50
        stream: Any = (
            await found.chat.completions.create(**CHAT, max_tokens=BEYOND, stream=True)
            if call == "chat"
            else await found.responses.create(**ITEM, max_output_tokens=BEYOND, stream=True)
        )
        words = 0
        async for event in stream:
            words += "delta" in event.type if call == "responses" else bool(event.choices[0].delta.content)
            if words == 3:
                break
        await stream.close()
        await left(site, words)
