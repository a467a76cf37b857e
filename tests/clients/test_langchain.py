"""LangChain's `ChatOpenAI`, over chat and over responses: it is told what is booked, and understands how answers end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

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
from tests.gateway.house import House
from tests.gateway.stub import answered, worker

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "get_time", "parameters": ZONE}}
SSE = b"Content-Type: text/event-stream"


def model(site: House, limit: int = LIMIT, **options: Any) -> ChatOpenAI:
    given = {"model": MODEL, "base_url": f"{site.base}/v1", "api_key": SecretStr(site.secret), "stream_usage": True}
    return ChatOpenAI(**{**given, "max_completion_tokens": limit, **options})


def told_of(message: AIMessage) -> Told:
    used, said = message.usage_metadata, message.response_metadata
    assert used and used["total_tokens"] == used["input_tokens"] + used["output_tokens"]
    reason = said.get("finish_reason") or (said.get("incomplete_details") or {}).get("reason")
    return Told(said.get("model_name"), used["input_tokens"], used["output_tokens"], str(message.text), reason)


def whole(chunks: Iterable[AIMessage]) -> AIMessage:
    return reduce(add, chunks)


def told_of_chunks(chunks: Iterable[AIMessage]) -> Told:
    return told_of(whole(chunks))


# ---- whole answers ---------------------------------------------------------------------------------------------------


async def invoked(found: ChatOpenAI) -> Told:
    return told_of(await asyncio.to_thread(found.invoke, PROMPT))


async def streamed(found: ChatOpenAI) -> Told:
    return told_of_chunks(await asyncio.to_thread(lambda: list(found.stream(PROMPT))))


async def async_invoked(found: ChatOpenAI) -> Told:
    return told_of(await found.ainvoke(PROMPT))


async def async_streamed(found: ChatOpenAI) -> Told:
    return told_of_chunks([chunk async for chunk in found.astream(PROMPT)])


@pytest.mark.parametrize(
    ("options", "reason"),
    [({}, "length"), ({"use_responses_api": True}, "max_output_tokens")],
    ids=["chat", "responses"],
)
@pytest.mark.parametrize("call", [invoked, streamed, async_invoked, async_streamed])
async def test_it_is_told_what_is_booked(
    tmp_path: Path, call: Callable[[ChatOpenAI], Awaitable[Told]], options: dict[str, Any], reason: str
) -> None:
    async with house(tmp_path) as site:
        told = await call(model(site, **options))
        assert (told.completion, told.reason) == (LIMIT, reason)
        await booked(site, told)


async def test_a_batch_is_booked_one_by_one(tmp_path: Path) -> None:
    async with house(tmp_path) as site:
        messages = await model(site).abatch(["say one word", "say two words more"])
        told = sorted((one.prompt, one.completion) for one in map(told_of, messages))
        assert sorted((row.prompt_tokens, row.completion_tokens) for row in await site.rows(2)) == told


# ---- tools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "arguments", "usage"),
    [
        ("chat_tools_usage", {}, {"zone": "CET"}, (338, 73)),
        ("responses_tools", {"use_responses_api": True}, {"zone": "UTC"}, (16, 63)),
    ],
)
async def test_a_bound_tool_is_called_and_its_result_goes_back(
    tmp_path: Path, name: str, options: dict[str, Any], arguments: dict[str, str], usage: tuple[int, int]
) -> None:
    async with (
        worker(answered(recorded(name), SSE)) as stub,
        house(tmp_path, served="tiny", url=stub.url) as site,
    ):
        bound = model(site, 100, **options).bind_tools([TOOL])
        history: list[Any] = [HumanMessage(PROMPT)]
        asked = whole([chunk async for chunk in bound.astream(history)])
        (call,) = asked.tool_calls
        history += [asked, ToolMessage("12:00", tool_call_id=call["id"])]
        assert [chunk async for chunk in bound.astream(history)]
        assert (call["name"], call["args"]) == ("get_time", arguments)
        told = told_of(asked)
        assert (told.model, told.prompt, told.completion) == (MODEL, *usage)
        assert [(row.prompt_tokens, row.completion_tokens) for row in await site.rows(2)] == [usage, usage]
        assert b"12:00" in stub.requests[1].body


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"use_responses_api": True}], ids=["chat", "responses"])
@pytest.mark.parametrize(
    ("changed", "tier", "kind"),
    [
        ({"api_key": SecretStr("wk-nobody")}, None, openai.AuthenticationError),
        ({"model": "nobody"}, None, openai.NotFoundError),
        ({"max_completion_tokens": 0}, None, openai.BadRequestError),
        ({}, BLOCKED, openai.RateLimitError),
    ],
)
async def test_a_hopeless_request_is_its_own_class_of_error_and_is_not_sent_again(
    tmp_path: Path,
    changed: dict[str, Any],
    tier: dict[str, Any] | None,
    kind: type[openai.APIStatusError],
    options: dict[str, Any],
) -> None:
    async with house(tmp_path, tier=tier) as site:
        found = model(site, max_retries=3, **{**options, **changed})
        with pytest.raises(kind) as raised:
            await found.ainvoke(PROMPT)
        assert statuses(site) == {raised.value.status_code: 1}
        with pytest.raises(kind):
            async for _ in found.astream(PROMPT):
                pass
        assert statuses(site) == {raised.value.status_code: 2}
        assert not site.large.requests


# ---- how streams end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [({}, "length"), ({"use_responses_api": True}, "max_output_tokens")],
    ids=["chat", "responses"],
)
async def test_a_stream_that_is_cut_at_the_cap_says_so(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    async with house(tmp_path, tier=CAPPED) as site:
        found = model(site, BEYOND, **options)
        both = await asyncio.to_thread(side_by_side, site, lambda: found.stream(PROMPT))
        await cut(site, [told_of_chunks(chunks) for chunks in both], reason)


@pytest.mark.parametrize("options", [{}, {"use_responses_api": True}], ids=["chat", "responses"])
async def test_a_stream_that_the_engine_broke_raises(tmp_path: Path, options: dict[str, Any]) -> None:
    async with house(tmp_path) as site:
        breaking(site)
        words = ""
        with pytest.raises(openai.APIError) as raised:
            async for chunk in model(site, **options).astream(PROMPT):
                words += str(chunk.text)
        assert raised.value.code == "engine_unavailable"
        await broken(site, len(words.split()), exact=not options)


@pytest.mark.parametrize("options", [{}, {"use_responses_api": True}], ids=["chat", "responses"])
async def test_a_stream_that_is_closed_early_is_booked_as_left(tmp_path: Path, options: dict[str, Any]) -> None:
    async with house(tmp_path) as site:
        site.large.tokens_per_second = 50
        words = 0
        stream: Any = model(site, BEYOND, **options).astream(PROMPT)
        async for chunk in stream:
            words += bool(chunk.text)
            if words == 3:
                break
        await stream.aclose()
        await left(site, words)
