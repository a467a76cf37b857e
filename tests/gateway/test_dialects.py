"""The life of a request at the endpoints beside chat: responses and messages in their own events, rerank and score."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.house import House, until
from tests.gateway.stub import STREAM_END, STREAM_HEAD, Answering, Asked, chunk, plain, typed, worker

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PROMPT = 7
SERVED = "org/served"
ROUTES = {"m1": {"primary": [{"backend": "u1", "model": SERVED}], "overflow": [{"backend": "u2", "model": "m2"}]}}
ALONE = {"on_outage": "reject", "rate": None, "burst": None}


# ---- an engine that speaks both --------------------------------------------------------------------------------------


def message(model: str, made: int, *, reason: str | None = "max_tokens") -> dict[str, Any]:
    content = [{"type": "text", "text": "abc " * made}] if reason else []
    usage = {"input_tokens": PROMPT - 2, "output_tokens": made if reason else 0, "cache_read_input_tokens": 2}
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "content": content,
        "model": model,
        "stop_reason": reason,
        "usage": usage,
    }


def response(model: str, made: int, *, status: str = "incomplete") -> dict[str, Any]:
    part = {"annotations": [], "text": "abc " * made, "type": "output_text", "logprobs": None}
    item = {"id": "msg_1", "content": [part], "role": "assistant", "status": "completed", "type": "message"}
    usage = {
        "input_tokens": PROMPT,
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": PROMPT + made,
    }
    running = status == "in_progress"
    return {
        "id": "resp_1",
        "object": "response",
        "model": model,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": [] if running else [item],
        "usage": None if running else usage,
    }


def message_events(model: str, made: int) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """How it opens, its tokens, how it ends."""
    start = {"type": "message_start", "message": message(model, 0, reason=None)}
    block = {"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0}
    piece = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "abc "}, "index": 0}
    usage = message(model, made)["usage"]
    delta = {"type": "message_delta", "delta": {"stop_reason": "max_tokens", "stop_sequence": None}, "usage": usage}
    end = [{"type": "content_block_stop", "index": 0}, delta, {"type": "message_stop"}]
    return [typed(start), typed(block)], [typed(piece)] * made, [typed(event) for event in end]


def response_events(model: str, made: int) -> tuple[list[bytes], list[bytes], list[bytes]]:
    item = {"id": "msg_1", "content": [], "role": "assistant", "status": "in_progress", "type": "message"}
    part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
    place = {"content_index": 0, "item_id": "msg_1", "output_index": 0}
    start = [
        {"type": "response.created", "response": response(model, 0, status="in_progress")},
        {"type": "response.output_item.added", "item": item, "output_index": 0},
        {"type": "response.content_part.added", "part": part, **place},
    ]
    piece = {"type": "response.output_text.delta", "delta": "abc ", "logprobs": [], **place}
    whole = response(model, made)
    item = whole["output"][0]
    end = [
        {"type": "response.output_text.done", "text": "abc " * made, "logprobs": [], **place},
        {"type": "response.content_part.done", "part": item["content"][0], **place},
        {"type": "response.output_item.done", "item": item, "output_index": 0},
        {"type": "response.completed", "response": whole},
    ]
    numbered = [
        typed({**event, "sequence_number": number}) for number, event in enumerate([*start, *[piece] * made, *end])
    ]
    return numbered[: len(start)], numbered[len(start) : -len(end)], numbered[-len(end) :]


@dataclass(frozen=True)
class Dialect:
    path: str
    limit: str
    whole: Callable[..., dict[str, Any]]
    events: Callable[[str, int], tuple[list[bytes], list[bytes], list[bytes]]]
    last: str
    """The type of the event that ends a stream."""
    cut: str

    def body(self, limit: int = 5, **fields: Any) -> dict[str, Any]:
        prompt: dict[str, Any] = (
            {"input": "hi"} if self.path == RESPONSES else {"messages": [{"role": "user", "content": "hi"}]}
        )
        return {"model": "m1", **prompt, self.limit: limit, **fields}

    def failed(self, event: dict[str, Any]) -> str:
        """The code, or Anthropic's type, of an error event."""
        assert event["type"] == "error"
        if self.path == MESSAGES:
            assert set(event["error"]) == {"type", "message"}
            return str(event["error"]["type"])
        assert event["error"] == {"type": "server_error"} | {name: event[name] for name in ("message", "param", "code")}
        return str(event["code"])


DIALECTS = [
    Dialect(RESPONSES, "max_output_tokens", response, response_events, "response.completed", "response.incomplete"),
    Dialect(MESSAGES, "max_tokens", message, message_events, "message_stop", "message_stop"),
]
both = pytest.mark.parametrize("dialect", DIALECTS, ids=["responses", "messages"])


def engine(
    dialect: Dialect, *, pace: float = 0.0, then: Callable[[], AsyncIterator[bytes]] | None = None, after: int = 10**6
) -> Answering:
    """Makes as many tokens as it may, `pace` seconds each; after some of them goes on with `then`, and so breaks off."""

    async def answer(asked: Asked) -> AsyncIterator[bytes]:
        model, made = asked.json["model"], asked.json[dialect.limit]
        if not asked.json.get("stream"):
            await asyncio.sleep(pace * made)
            yield plain(dialect.whole(model, made))
            return
        opening, tokens, ending = dialect.events(model, made)
        yield STREAM_HEAD + b"".join(map(chunk, opening))
        for token in tokens[:after]:
            yield chunk(token)
            await asyncio.sleep(pace)
        if then is not None:
            async for piece in then():
                yield piece
            return
        yield b"".join(map(chunk, ending)) + STREAM_END

    return answer


async def silence() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def nothing() -> AsyncIterator[bytes]:
    for piece in ():
        yield piece


def events_of(body: bytes) -> list[dict[str, Any]]:
    """The data of a stream's events, each of which is named by its type."""
    events = []
    for part in body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


# ---- whole answers ---------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_metered_by_the_engine_s_figures_and_has_the_caller_s_name_of_the_model(
    tmp_path: Path, dialect: Dialect, stream: bool
) -> None:
    async with (
        worker(engine(dialect)) as stub,
        House(tmp_path, models=ROUTES, backends={"u1": {"url": stub.url}}) as house,
    ):
        headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x-2026", "openai-beta": "y"}
        answer = await house.post(dialect.body(5, stream=stream), path=dialect.path, headers=headers)
        row = (await house.rows())[0]
        assert answer.status == 200
        assert (row.endpoint, row.streamed, row.ending, row.usage_source) == (
            dialect.path,
            stream,
            "completed",
            "engine",
        )
        assert (row.prompt_tokens, row.cached_prompt_tokens, row.completion_tokens) == (PROMPT, 2, 5)
        assert (row.engine_prompt_tokens, row.engine_completion_tokens) == (PROMPT, 5)
        assert (row.model_requested, row.model_served) == ("m1", SERVED)
        assert (await house.windows())["hour"]["used"] == PROMPT + 5
        asked = stub.requests[0]
        assert (asked.path, asked.json["model"]) == (dialect.path, SERVED)
        assert {name for name in asked.headers if name.startswith(("anthropic", "openai"))} == (
            {"anthropic-version", "anthropic-beta"} if dialect.path == MESSAGES else set()
        )
        assert not {"stream_options", "return_token_ids"} & asked.json.keys()
        expected = b"".join(b"".join(events) for events in dialect.events("m1", 5)) if stream else None
        assert answer.body == (expected or json.dumps(dialect.whole("m1", 5)).encode())
        assert answer.headers["x-weir-verdict"] == "base"
        assert answer.headers["content-type"].startswith("text/event-stream" if stream else "application/json")


@both
async def test_the_output_limit_has_its_own_name_and_the_answer_tells_that_it_was_lowered(
    tmp_path: Path, dialect: Dialect
) -> None:
    tier = {"max_output_tokens": 3}
    async with worker(engine(dialect)) as stub, House(tmp_path, tier=tier, backends={"u1": {"url": stub.url}}) as house:
        lowered = await house.post(dialect.body(9), path=dialect.path)
        asked_less = await house.post(dialect.body(2), path=dialect.path)
        assert [asked.json[dialect.limit] for asked in stub.requests] == [3, 2]
        assert lowered.headers["x-weir-max-tokens"] == "3"
        assert "x-weir-max-tokens" not in asked_less.headers
        assert not {"max_tokens", "max_completion_tokens", "max_output_tokens", dialect.limit} & (
            stub.requests[0].json.keys() - {dialect.limit}
        )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {"query": "which is it", "documents": ["this one", "that one"]}),
        ("/v1/score", {"text_1": "which is it", "text_2": ["this one", "that one"]}),
        ("/v1/embeddings", {"input": ["this one", "that one"]}),
    ],
)
async def test_what_only_reads_is_charged_what_the_engine_read(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    said = {"model": SERVED, "data": [], "usage": {"prompt_tokens": 15, "total_tokens": 15}}
    async with (
        worker(plain(said)) as stub,
        House(tmp_path, models=ROUTES, backends={"u1": {"url": stub.url}}) as house,
    ):
        answer = await house.post({"model": "m1", **body}, path=path)
        row = (await house.rows())[0]
        assert answer.json == {**said, "model": "m1"}
        assert (row.endpoint, row.prompt_tokens, row.completion_tokens, row.usage_source) == (path, 15, 0, "engine")
        assert (row.engine_prompt_tokens, row.engine_completion_tokens) == (15, 0)
        assert row.ceiling_tokens >= 15
        assert (await house.windows())["hour"]["used"] == 15
        ratio = house.sidecar._metrics.registry.get_sample_value("weir_estimate_error_ratio_sum")
        assert ratio == pytest.approx(row.expected_tokens / 15)


@both
async def test_what_the_engine_refuses_goes_on_as_it_came(tmp_path: Path, dialect: Dialect) -> None:
    error: dict[str, Any] = {
        "type": "BadRequestError",
        "message": "This model's maximum context length is 4096 tokens.",
    }
    said = (
        {"type": "error", "error": error}
        if dialect.path == MESSAGES
        else {"error": {**error, "param": "input_tokens", "code": 400}}
    )
    async with worker(plain(said, 400)) as stub, House(tmp_path, backends={"u1": {"url": stub.url}}) as house:
        for stream in (False, True):
            answer = await house.post(dialect.body(5, stream=stream), path=dialect.path)
            assert (answer.status, answer.body) == (400, json.dumps(said).encode())
        assert {(row.ending, row.completion_tokens) for row in await house.rows(2)} == {("engine_refused", 0)}


# ---- other routes ----------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("stream", [False, True])
async def test_overage_and_outage_are_served_by_the_cheaper_backend(
    tmp_path: Path, dialect: Dialect, stream: bool
) -> None:
    away = False

    async def first(asked: Asked) -> AsyncIterator[bytes]:
        if away:
            yield plain({"error": {"message": "busy", "code": 503}}, 503)
            return
        async for piece in engine(dialect)(asked):
            yield piece

    tier = {"rate": {"tokens": 400, "seconds": 60}, "burst": None}
    async with worker(first) as u1, worker(engine(dialect)) as u2:
        backends = {"u1": {"url": u1.url}, "u2": {"url": u2.url}}
        async with House(tmp_path, tier=tier, models=ROUTES, backends=backends) as house:
            away = True
            through_outage = await house.post(dialect.body(9, stream=stream), path=dialect.path)
            away = False
            within = await house.post(dialect.body(350, stream=stream), path=dialect.path)
            over = await house.post(dialect.body(350, stream=stream), path=dialect.path)
            strict = await house.post(
                dialect.body(350, stream=stream), path=dialect.path, headers={"x-weir-on-overage": "reject"}
            )
            answers = (through_outage, within, over, strict)
            assert [answer.status for answer in answers] == [200, 200, 200, 429]
            assert [answer.headers.get("x-weir-backend") for answer in answers] == ["u2", "u1", "u2", None]
            assert [asked.json["model"] for asked in u2.requests] == ["m2", "m2"]
            assert b'"m2"' not in over.body and b'"m1"' in over.body
            rows = await house.rows(4)
            assert sorted((row.route, row.ending) for row in rows) == [
                ("overflow", "completed"),
                ("overflow", "completed"),
                ("primary", "completed"),
                ("primary", "engine_unavailable"),
            ]


async def test_an_overflow_that_cannot_serve_the_endpoint_is_no_way_out(tmp_path: Path) -> None:
    tier = {"rate": {"tokens": 100, "seconds": 60}, "burst": None}
    messages = DIALECTS[1]
    async with worker(engine(messages)) as stub:
        backends = {"u1": {"url": stub.url}, "u2": {"kind": "openai"}}
        async with House(tmp_path, tier=tier, backends=backends) as house:
            answers = [await house.post(messages.body(80), path=MESSAGES) for _ in range(2)]
            assert [answer.status for answer in answers] == [200, 429]
            assert answers[1].json["error"]["type"] == "rate_limit_error"
            assert answers[1].headers["x-weir-verdict"] == "rate"
            assert not house.cheap.requests


# ---- how streams end -------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(("then", "reason"), [(nothing, "cut"), (silence, "idle")])
async def test_a_stream_that_breaks_ends_with_an_error_event_of_its_dialect(
    tmp_path: Path, dialect: Dialect, then: Any, reason: str
) -> None:
    async with (
        worker(engine(dialect, then=then, after=3)) as stub,
        House(tmp_path, backends={"u1": {"url": stub.url, "idle_seconds": 0.3}}) as house,
    ):
        answer = await house.post(dialect.body(9, stream=True), path=dialect.path)
        events = events_of(answer.body)
        row = (await house.rows())[0]
        assert answer.status == 200
        assert dialect.failed(events[-1]) == ("api_error" if dialect.path == MESSAGES else "engine_unavailable")
        assert dialect.last not in [event["type"] for event in events]
        if dialect.path == RESPONSES:
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert (row.ending, row.reason, row.completion_tokens, row.usage_source) == (
            "engine_broke",
            reason,
            3,
            "counted",
        )
        assert not house.cheap.requests


@both
@pytest.mark.parametrize("after", [0, 3])
async def test_an_error_event_of_the_engine_is_told_in_our_words_and_as_a_status_while_nothing_was_sent(
    tmp_path: Path, dialect: Dialect, after: int
) -> None:
    said = {"type": "error", "error": {"type": "overloaded_error", "message": "busy", "code": 503}}
    event = typed({**said, "code": "503", "message": "busy", "sequence_number": 99})

    async def error() -> AsyncIterator[bytes]:
        yield chunk(event) + STREAM_END

    async def at_once(asked: Asked) -> AsyncIterator[bytes]:
        yield STREAM_HEAD + chunk(dialect.events("m1", 1)[0][0]) + chunk(event) + STREAM_END

    answering = engine(dialect, then=error, after=after) if after else at_once
    async with (
        worker(answering) as stub,
        House(tmp_path, tier=ALONE, backends={"u1": {"url": stub.url}}) as house,
    ):
        answer = await house.post(dialect.body(9, stream=True), path=dialect.path)
        row = (await house.rows())[0]
        if after:
            assert answer.status == 200
            assert dialect.failed(events_of(answer.body)[-1])
            assert (row.ending, row.reason) == ("engine_broke", "error_event")
        else:
            assert answer.status >= 500
            assert answer.json["error"]["message"] == "busy"
            assert ("type" in answer.json) is (dialect.path == MESSAGES)
            assert (row.ending, row.prompt_tokens, row.completion_tokens) == ("engine_unavailable", 0, 0)


@both
async def test_a_running_stream_is_ended_cleanly_at_the_cap(tmp_path: Path, dialect: Dialect) -> None:
    """Two streams share what is left; neither was told how much the other would take."""
    cap = {"rate": None, "burst": None, "cap": {"tokens": 1000, "seconds": 3600}, "max_output_tokens": None}
    async with (
        worker(engine(dialect, pace=0.0003)) as stub,
        House(tmp_path, tier=cap, backends={"u1": {"url": stub.url}}) as house,
    ):
        asked = dialect.body(900, stream=True)
        answers = await asyncio.gather(*(house.post(asked, path=dialect.path) for _ in range(2)))
        rows = await house.rows(2)
        assert "cut_at_cap" in {row.ending for row in rows}
        ends = {events_of(answer.body)[-1]["type"] for answer in answers}
        assert dialect.cut in ends <= {dialect.cut, dialect.last}
        assert stub.left >= 1
        used = (await house.windows())["hour"]["used"]
        assert used == sum(row.prompt_tokens + row.completion_tokens for row in rows)
        assert used <= 1000 + 2


@both
async def test_a_client_that_hangs_up_pays_for_what_was_made_and_the_engine_stops_at_once(
    tmp_path: Path, dialect: Dialect
) -> None:
    async with (
        worker(engine(dialect, then=silence, after=3)) as stub,
        House(tmp_path, backends={"u1": {"url": stub.url}}) as house,
    ):
        body = dialect.body(50, stream=True)
        async with house.session.post(house.base + dialect.path, json=body, headers=house.auth) as answer:
            piece = b""
            while piece.count(b"abc") < 3:
                piece += await answer.content.readany()
        assert await until(lambda: asyncio.sleep(0, stub.left), bool) == 1
        row = (await house.rows())[0]
        assert (row.ending, row.usage_source) == ("client_gone", "counted")
        assert row.prompt_tokens > 0 and 3 <= row.completion_tokens <= 4
        assert (await house.windows())["hour"]["used"] == row.prompt_tokens + row.completion_tokens


@both
@pytest.mark.parametrize("stream", [False, True])
async def test_with_drain_a_client_that_leaves_does_not_stop_the_engine(
    tmp_path: Path, dialect: Dialect, stream: bool
) -> None:
    async with (
        worker(engine(dialect, pace=0.05)) as stub,
        House(tmp_path, tier={"on_hangup": "drain"}, backends={"u1": {"url": stub.url}}) as house,
    ):
        asked = asyncio.create_task(house.post(dialect.body(8, stream=stream), path=dialect.path))
        await until(lambda: asyncio.sleep(0, len(stub.requests)), bool)
        asked.cancel()
        row = (await house.rows())[0]
        assert (row.ending, row.reason, row.usage_source) == ("client_gone", "drained", "engine")
        assert (row.prompt_tokens, row.completion_tokens, stub.left) == (PROMPT, 8, 0)


@both
async def test_a_plain_answer_that_nobody_waits_for_is_charged_by_the_time_at_the_engine_s_pace(
    tmp_path: Path, dialect: Dialect
) -> None:
    async with (
        worker(engine(dialect, pace=0.02)) as stub,
        House(tmp_path, backends={"u1": {"url": stub.url}}) as house,
    ):
        await house.post(dialect.body(10), path=dialect.path)
        asked = asyncio.create_task(house.post(dialect.body(500), path=dialect.path))
        await until(lambda: asyncio.sleep(0, len(stub.requests)), lambda seen: seen == 2)
        await asyncio.sleep(0.3)  # what is charged is the time that passes here
        asked.cancel()
        row = (await house.rows(2))[-1]
        assert (row.ending, row.usage_source, stub.left) == ("client_gone", "estimated", 1)
        assert row.prompt_tokens > 0
        assert 1 <= row.completion_tokens <= 500


@both
async def test_streams_that_outlast_the_grace_are_ended_in_their_own_words(tmp_path: Path, dialect: Dialect) -> None:
    async with worker(engine(dialect, pace=0.05)) as stub:
        house = House(tmp_path, listen={"grace_seconds": 0.2}, backends={"u1": {"url": stub.url}})
        await house.__aenter__()
        asked = asyncio.create_task(house.post(dialect.body(400, stream=True), path=dialect.path))
        gateway = house.sidecar._gateway
        assert gateway is not None
        await until(lambda: asyncio.sleep(0, [e.first_token for e in gateway.running.values()]), any)
        await house.sidecar.__aexit__(None, None, None)
        event = events_of((await asked).body)[-1]
        assert dialect.failed(event) == ("overloaded_error" if dialect.path == MESSAGES else "shutting_down")
        assert (await house.rows())[0].ending == "shut_down"
        await house.session.close()
        await house.engine.dispose()
        await house.large.stop()
        await house.cheap.stop()
