"""Token accounting: what the engine says it used is what is booked, and what the client did not ask for it does not see."""

from __future__ import annotations

import json

import pytest

from tests.cases.house import House, streamed
from tests.cases.house import body as chat
from tests.cases.stub import DONE, FIN, OK, USE, Pause, T, answer, delta, event, if_asked, plain, stream, usage
from tests.cases.wire import Reply

pytestmark = pytest.mark.asyncio(loop_scope="session")


def tokens(row: object) -> str:
    """A row's figures as prompt/completion/total."""
    prompt, completion = row["prompt_tokens"], row["completion_tokens"]  # type: ignore[index]
    return f"{prompt}/{completion}/{prompt + completion}"


def usages(reply: Reply) -> list[object]:
    """Every non-null usage that a client sees in a stream."""
    objects = (json.loads(data) for data in reply.events if data != "[DONE]")
    return [found["usage"] for found in objects if isinstance(found, dict) and found.get("usage") is not None]


async def test_a_stream_is_metered_though_the_client_never_asked_for_usage(house: House) -> None:
    """T001"""
    key = await house.key(limit=1000)
    house.u1.does(stream(T("He"), T("llo"), FIN, if_asked(USE(9, 4)), DONE))
    reply = await house.post(key, streamed())
    assert reply.status == 200
    assert reply.complete
    assert house.u1.last.json()["stream_options"]["include_usage"] is True
    assert usages(reply) == []
    assert reply.body == T("He") + T("llo") + FIN + DONE
    assert await house.used(key) == 13
    row = await house.row(key)
    assert (tokens(row), row["usage_source"], row["ending"]) == ("9/4/13", "engine", "completed")


async def test_empty_stream_options_do_not_ask_for_usage(house: House) -> None:
    """T002"""
    key = await house.key()
    house.u1.does(stream(T("x"), FIN, USE(5, 2), DONE))
    for number, options in enumerate([None, {}, {"include_usage": None}, {"include_usage": None, "x_extra": 1}], 1):
        reply = await house.post(key, streamed(stream_options=options))
        assert reply.status == 200, reply.body
        assert usages(reply) == []
        assert reply.events[-1] == "[DONE]"
        assert await house.used(key) == 7 * number
    assert house.u1.last.json()["stream_options"]["x_extra"] == 1


async def test_usage_that_was_asked_for_comes_once_and_untouched(house: House) -> None:
    """T003"""
    key = await house.key()
    house.u1.does(stream(T("ok"), FIN, USE(13, 20), DONE))
    reply = await house.post(key, streamed(stream_options={"include_usage": True}, max_tokens=64))
    assert usages(reply) == [usage(13, 20)]
    assert json.loads(reply.events[-2])["choices"] == []
    assert reply.events[-1] == "[DONE]"
    assert await house.used(key) == 33


async def test_usage_that_comes_late_after_the_finish_is_read(house: House) -> None:
    """T004"""
    key = await house.key()
    house.u1.does(stream(T("x"), FIN, Pause(0.7), USE(26, 7), Pause(0.3), DONE))
    reply = await house.post(key, streamed())
    assert reply.events[-1] == "[DONE]"
    assert await house.used(key) == 33
    assert tokens(await house.row(key)) == "26/7/33"


async def test_null_usage_in_ordinary_events_is_no_figure(house: House) -> None:
    """T005"""
    key = await house.key()
    logged = len(house.proxy.log())
    texts = [T(text, usage=None) for text in "abc"]
    house.u1.does(stream(*texts, delta({}, "stop", usage=None), USE(8, 3), DONE))
    reply = await house.post(key, streamed())
    assert reply.status == 200
    assert await house.used(key) == 11
    assert '"level":"error"' not in house.proxy.log()[logged:].replace(" ", "")


async def test_running_usage_is_replaced_not_summed(house: House) -> None:
    """T006"""
    key = await house.key()
    events = [T(text, usage=usage(5, number)) for number, text in enumerate("abcd")]
    house.u1.does(stream(*events, FIN, USE(5, 3), DONE))
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = await house.post(key, streamed(stream_options=options))
    assert reply.body == b"".join([*events, FIN, USE(5, 3), DONE])
    assert await house.used(key) == 8
    assert tokens(await house.row(key)) == "5/3/8"


async def test_the_engines_last_figure_wins_over_what_was_counted_on_the_way(house: House) -> None:
    """T006, T066: an engine that spreads a token over several events; quota and books must say the same."""
    key = await house.key()
    house.u1.does(stream(*[T("w ")] * 600, FIN, USE(5, 200), DONE))
    assert (await house.post(key, streamed(max_tokens=1000))).events[-1] == "[DONE]"
    assert tokens(await house.row(key)) == "5/200/205"
    assert await house.used(key) == 205


async def test_events_without_choices_do_not_break_the_relay(house: House) -> None:
    """T007"""
    key = await house.key()
    odd = [event({"usage": usage(4, 1)}), event({"note": "keepalive"}), b"data: 7\n\n", b"data: null\n\n"]
    house.u1.does(stream(T("a"), *odd, FIN, DONE))
    reply = await house.post(key, streamed())
    assert reply.complete
    for sent in (T("a"), FIN, DONE):
        assert reply.body.count(sent) == 1
    assert await house.used(key) == 5


async def test_a_reported_zero_is_a_figure(house: House) -> None:
    """T008"""
    key = await house.key()
    house.u1.does(stream(FIN, USE(0, 0), DONE))
    assert (await house.post(key, streamed())).status == 200
    row = await house.row(key)
    assert (tokens(row), row["usage_source"]) == ("0/0/0", "engine")
    assert await house.used(key) == 0


async def test_a_tool_call_without_usage_is_estimated_from_its_arguments(house: House) -> None:
    """T009"""
    key = await house.key()
    names = delta({"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "get_weather"}}]})
    pieces = [
        delta({"tool_calls": [{"index": 0, "function": {"arguments": f'{{"city": "{number:09d}"}}'[:20]}}]})
        for number in range(10)
    ]
    upstream = [names, *pieces, delta({}, "tool_calls"), DONE]
    house.u1.does(stream(*upstream))
    reply = await house.post(key, streamed(max_tokens=300))
    assert reply.body == b"".join(upstream)
    row = await house.row(key)
    assert row["usage_source"] in ("counted", "estimated")
    assert 20 <= row["completion_tokens"] <= 200


async def test_reasoning_tokens_are_part_of_the_completion(house: House) -> None:
    """T010"""
    key = await house.key()
    figures = {**usage(2008, 266), "completion_tokens_details": {"reasoning_tokens": 261}}
    house.u1.does(plain(200, answer(figures)))
    prompt = [{"role": "user", "content": "word " * 500}]
    assert (await house.post(key, chat(messages=prompt, max_tokens=300))).status == 200
    row = await house.row(key)
    assert (tokens(row), row["reasoning_tokens"]) == ("2008/266/2274", 261)
    assert await house.used(key) == 2274


async def test_one_large_figure_of_the_engine_shuts_nobody_out(house: House) -> None:
    """T010, T014: what an engine counted for one request is no reason to refuse small ones of other keys."""
    first, second = await house.key(), await house.key(limit=100)
    house.u1.does(OK(2008, 266), OK(9, 4))
    assert (await house.post(first, chat(model="odd", max_tokens=300))).status == 200
    assert (await house.post(second, chat(model="odd"))).status == 200
    assert await house.used(second) == 13


@pytest.mark.parametrize("total", [{}, {"total_tokens": 5}, {"total_tokens": 0}], ids=["absent", "wrong", "zero"])
async def test_the_total_is_prompt_and_completion_whatever_it_says(house: House, total: dict[str, int]) -> None:
    """T011"""
    key = await house.key()
    house.u1.does(plain(200, answer({"prompt_tokens": 7, "completion_tokens": 5, **total})))
    assert (await house.post(key, chat())).status == 200
    assert await house.used(key) == 12


async def test_embeddings_and_text_completions_are_metered(house: House) -> None:
    """T012"""
    key = await house.key()
    vector = {"object": "list", "model": "m1", "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}]}
    text = {
        "id": "cmpl-1",
        "object": "text_completion",
        "choices": [{"index": 0, "text": "d", "finish_reason": "stop"}],
    }
    house.u1.does(
        plain(200, json.dumps({**vector, "usage": {"prompt_tokens": 8, "total_tokens": 8}}).encode()),
        plain(200, json.dumps({**text, "usage": usage(3, 5)}).encode()),
    )
    embedded = await house.post(key, {"model": "m1", "input": "abc"}, path="/v1/embeddings")
    assert embedded.status == 200, embedded.body
    assert embedded.json()["data"] == vector["data"]
    completed = await house.post(key, {"model": "m1", "prompt": "abc", "max_tokens": 5}, path="/v1/completions")
    assert completed.status == 200, completed.body
    assert [tokens(row) for row in await house.rows(key, 2)] == ["8/0/8", "3/5/8"]
    assert await house.used(key) == 16


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/images/generations"])
async def test_an_endpoint_that_is_not_served_is_not_forwarded(house: House, path: str) -> None:
    """T013"""
    key = await house.key()
    reply = await house.post(key, {"model": "m1", "input": "hi", "max_output_tokens": 50}, path=path)
    reply.error(404)
    assert house.u1.seen == []
    await house.rows(key, 0)


async def test_prompt_and_output_count_together(house: House) -> None:
    """T014: a prompt that an empty quota would have taken is refused once most of it is used."""
    key = await house.key(limit=900)
    await house.spent(key, 5, 496)
    assert await house.used(key) == 501
    prompt = [{"role": "user", "content": "word " * 100}]
    reply = await house.post(key, chat(messages=prompt))
    assert reply.error(429)["code"] == "insufficient_quota"
    assert len(house.u1.seen) == 1
    await house.rows(key, 1)


async def test_a_negative_figure_is_no_gift(house: House) -> None:
    """T015"""
    key = await house.key()
    house.u1.does(plain(200, answer({"prompt_tokens": 9, "completion_tokens": -1618, "total_tokens": -1609})))
    assert (await house.post(key, chat())).status == 200
    row = await house.row(key)
    assert row["usage_source"] in ("counted", "estimated")
    assert row["completion_tokens"] >= 0
    assert row["prompt_tokens"] > 0
    assert await house.used(key) == row["prompt_tokens"] + row["completion_tokens"]


async def test_a_good_answer_without_usage_is_estimated_from_its_text(house: House) -> None:
    """T016"""
    key = await house.key()
    house.u1.does(plain(200, answer(None, text=" ".join(["seven"] * 100))))
    assert (await house.post(key, chat(max_tokens=400))).status == 200
    row = await house.row(key)
    assert row["usage_source"] == "estimated"
    assert 80 <= row["completion_tokens"] <= 250
    assert row["prompt_tokens"] > 0


async def test_a_plain_answer_reaches_the_client_byte_for_byte(house: House) -> None:
    key = await house.key()
    house.u1.does(OK(9, 4))
    reply = await house.post(key, chat())
    assert reply.body == answer(usage(9, 4))
    row = await house.row(key)
    assert (row["endpoint"], row["model_requested"], row["model_served"], row["backend"], row["route"]) == (
        "/v1/chat/completions",
        "m1",
        "m1",
        "u1",
        "primary",
    )
