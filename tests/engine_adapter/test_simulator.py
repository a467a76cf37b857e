"""What the simulated worker does: sizes, counts, speed, and what it stops doing when nobody listens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.http1 import Answer, Origin, Workers
from engine_adapter.simulator import Simulator, run, tokens
from engine_adapter.vllm import read_counters
from tests.engine_adapter.raw_worker import PATIENCE, until

untimed = settings(deadline=None)

HELLO = [{"role": "user", "content": "Hello"}]
LIVE = {"include_usage": True, "continuous_usage_stats": True}


class Bench:
    """A simulator and a pool that speaks to it."""

    def __init__(self, simulator: Simulator, workers: Workers, origin: Origin) -> None:
        self.simulator = simulator
        self._workers = workers
        self._origin = origin

    async def open(self, path: str, body: dict[str, Any] | None, headers: dict[str, str] | None = None) -> Answer:
        fields = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        return await self._workers.open(
            self._origin,
            method=b"GET" if body is None else b"POST",
            path=path,
            headers=[(b"content-type", b"application/json"), *fields],
            body=b"" if body is None else json.dumps(body).encode(),
            connect_seconds=PATIENCE,
            head_seconds=PATIENCE,
        )

    async def whole(self, path: str, body: dict[str, Any] | None, headers: dict[str, str] | None = None) -> bytes:
        async with await self.open(path, body, headers) as answer:
            return await answer.read_all(PATIENCE, 1 << 30)

    async def json(self, path: str, body: dict[str, Any] | None, headers: dict[str, str] | None = None) -> Any:
        return json.loads(await self.whole(path, body, headers))

    async def chat(self, **members: Any) -> Any:
        return await self.json("/v1/chat/completions", {"messages": HELLO, **members})

    async def events(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> list[Any]:
        return events_of(await self.whole(path, {"stream": True, **body}, headers))


def events_of(stream: bytes) -> list[Any]:
    """The data of each event, [DONE] as None; comments are left out."""
    found = [event.removeprefix(b"data: ") for event in stream.split(b"\n\n") if event.startswith(b"data: ")]
    return [None if data == b"[DONE]" else json.loads(data) for data in found]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    simulator, workers = Simulator(), Workers()
    port = await simulator.start()
    yield Bench(simulator, workers, Origin("http", "127.0.0.1", port))
    await workers.close()
    await simulator.stop()


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ({}, 128),
        ({"max_tokens": 1}, 1),
        ({"max_tokens": 700}, 700),
        ({"max_tokens": None}, 128),
        ({"max_tokens": 9, "max_completion_tokens": 4}, 4),
        ({"max_tokens": 0, "max_completion_tokens": 4}, 4),
        ({"max_tokens": 5, "n": 3}, 15),
    ],
)
async def test_an_answer_has_exactly_as_many_tokens_as_asked(bench: Bench, asked: dict[str, Any], made: int) -> None:
    plain = await bench.chat(**asked)
    assert plain["usage"]["completion_tokens"] == made
    assert sum(len(choice["message"]["content"].split()) for choice in plain["choices"]) == made
    body = {"messages": HELLO, "stream_options": LIVE, **asked}
    *events, usage, done = await bench.events("/v1/chat/completions", body)
    assert usage["usage"] == {"prompt_tokens": 9, "total_tokens": 9 + made, "completion_tokens": made}
    assert done is None
    contents = [event for event in events if event["choices"][0]["delta"]["content"]]
    assert len(contents) == made
    assert bench.simulator.generation_tokens_total == 2 * made


@pytest.mark.parametrize(
    ("messages", "size"),
    [
        (HELLO, 9),
        ([{"role": "system", "content": "be brief"}, {"role": "user", "content": "one two three"}], 2 * 5 + 5 + 3),
        ([{"role": "user", "content": [{"type": "text", "text": "a b"}, {"type": "text", "text": "c"}]}], 5 + 3 + 3),
        ([{"role": "user", "content": ""}], 8),
        ([*HELLO, {"role": "assistant", "content": None}], 9 + 5),
        ([{"role": "user", "content": "word " * 10_000}], 10_008),
    ],
)
async def test_a_prompts_size_can_be_told_by_eye(bench: Bench, messages: list[Any], size: int) -> None:
    answer = await bench.json("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert answer["usage"]["prompt_tokens"] == size
    counted = await bench.json("/tokenize", {"messages": messages})
    assert counted["count"] == len(counted["tokens"]) == size


async def test_the_same_question_has_the_same_answer_everywhere(bench: Bench) -> None:
    other = Simulator()
    port = await other.start()
    there = Bench(other, bench._workers, Origin("http", "127.0.0.1", port))
    here = await bench.chat(max_tokens=20, n=2)
    assert [c["message"] for c in here["choices"]] == [
        c["message"] for c in (await there.chat(max_tokens=20, n=2))["choices"]
    ]
    assert here["choices"][0]["message"] != here["choices"][1]["message"]
    await other.stop()


@pytest.mark.parametrize("cut", [1, 7, 63, 70])
async def test_a_reply_that_was_cut_goes_on_elsewhere(bench: Bench, cut: int) -> None:
    whole = await bench.chat(max_tokens=80, return_token_ids=True)
    text, ids = whole["choices"][0]["message"]["content"], whole["choices"][0]["token_ids"]
    so_far = "".join(tokens.split(text)[:cut])
    rest = await bench.chat(
        messages=[*HELLO, {"role": "assistant", "content": so_far}],
        add_generation_prompt=False,
        continue_final_message=True,
        max_tokens=80 - cut,
    )
    assert so_far + rest["choices"][0]["message"]["content"] == text
    by_ids = {"prompt": whole["prompt_token_ids"] + ids[:cut], "max_tokens": 80 - cut, "return_token_ids": True}
    assert (await bench.json("/v1/completions", by_ids))["choices"][0]["token_ids"] == ids[cut:]


@untimed
@given(st.text())
def test_any_text_is_its_tokens_again(text: str) -> None:
    vocabulary, found = tokens.Vocabulary(), tokens.split(text)
    assert "".join(found) == text
    assert len(found) == tokens.count(text)
    assert vocabulary.text(vocabulary.ids(found)) == text


def test_the_memory_for_odd_words_is_bounded() -> None:
    vocabulary = tokens.Vocabulary()
    first = vocabulary.ids(["first"])
    vocabulary.ids([f"w{n}" for n in range(70_000)])
    assert len(vocabulary._seen) <= 65_536
    assert vocabulary.text(first) == ""


# ---- what it counts --------------------------------------------------------------------------------------------------


async def test_counts_a_prompt_once_for_each_choice_as_vllm_does(bench: Bench) -> None:
    answer = await bench.json("/v1/completions", {"prompt": ["a b", "c"], "n": 3, "max_tokens": 2})
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "total_tokens": 15,
        "completion_tokens": 12,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
    counted = read_counters((await bench.whole("/metrics", None)).decode())
    assert (counted.prompt_tokens, counted.generation_tokens, counted.running) == (9, 12, 0)


async def test_embeddings_count_their_input(bench: Bench) -> None:
    answer = await bench.json("/v1/embeddings", {"input": ["a b", "c", "a b"]})
    assert answer["usage"]["prompt_tokens"] == bench.simulator.prompt_tokens_total == 5
    first, second, third = (item["embedding"] for item in answer["data"])
    assert first == third != second


async def test_a_refused_request_counts_nothing(bench: Bench) -> None:
    await bench.chat(max_tokens=0)
    await bench.chat(model="other")
    assert (bench.simulator.prompt_tokens_total, bench.simulator.generation_tokens_total) == (0, 0)


# ---- what it stops ---------------------------------------------------------------------------------------------------


async def test_a_client_that_leaves_a_stream_stops_it_within_a_token(bench: Bench) -> None:
    bench.simulator.tokens_per_second = 4
    answer = await bench.open("/v1/chat/completions", {"messages": HELLO, "max_tokens": 10_000, "stream": True})
    got = b""
    while b'"delta":{"content":" ' not in got:
        got += await answer.read(PATIENCE)
    made = bench.simulator.generation_tokens_total
    assert (made, bench.simulator.prompt_tokens_total, bench.simulator.running) == (1, 9, 1)
    answer.close()
    await until(lambda: bench.simulator.running == 0)
    assert bench.simulator.generation_tokens_total <= made + 1


async def test_a_client_that_leaves_a_plain_answer_stops_it(bench: Bench) -> None:
    bench.simulator.tokens_per_second = 100
    waiting = asyncio.ensure_future(bench.chat(max_tokens=10_000))
    await until(lambda: bench.simulator.generation_tokens_total >= 2)
    waiting.cancel()
    await until(lambda: bench.simulator.running == 0)
    assert bench.simulator.generation_tokens_total < 10_000


async def test_a_fast_stream_stops_too(bench: Bench) -> None:
    """Without a speed it is still one event after the other, with room for the client to leave."""
    answer = await bench.open("/v1/chat/completions", {"messages": HELLO, "max_tokens": 30_000, "stream": True})
    await answer.read(PATIENCE)
    answer.close()
    await until(lambda: bench.simulator.running == 0)
    assert bench.simulator.generation_tokens_total < 30_000


async def test_a_half_close_counts_as_gone(bench: Bench) -> None:
    """As in uvicorn: a client that half-closes and reads on gets nothing more."""
    bench.simulator.tokens_per_second = 50
    reader, writer = await asyncio.open_connection("127.0.0.1", bench._origin.port)
    body = json.dumps({"messages": HELLO, "max_tokens": 5_000, "stream": True}).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    writer.write(head % len(body) + body)
    await reader.readuntil(b'"delta":{"content":" ')
    writer.write_eof()
    async with asyncio.timeout(PATIENCE):
        await reader.read()
    await until(lambda: bench.simulator.running == 0)
    writer.close()


async def test_a_slow_engine_sends_its_head_at_once_and_its_tokens_when_they_are_due(bench: Bench) -> None:
    bench.simulator.tokens_per_second = 0.001
    async with await bench.open("/v1/chat/completions", {"messages": HELLO, "stream": True}) as answer:
        with pytest.raises(TimeoutError):
            await answer.read(0.05)
        assert (bench.simulator.running, bench.simulator.prompt_tokens_total) == (1, 0)
    await until(lambda: bench.simulator.running == 0)
    bench.simulator.tokens_per_second = 1e6
    assert (await bench.chat(max_tokens=50))["usage"]["completion_tokens"] == 50


# ---- what it remembers -----------------------------------------------------------------------------------------------


async def test_requests_are_kept_as_they_came() -> None:
    simulator, workers = Simulator(remember=2), Workers()
    bench = Bench(simulator, workers, Origin("http", "127.0.0.1", await simulator.start()))
    for number in range(3):
        await bench.whole(f"/v1/completions?n={number}", {"prompt": "a", "max_tokens": number + 1}, {"X-Who": "me"})
    seen = simulator.requests[-1]
    assert [request.path for request in simulator.requests] == ["/v1/completions?n=1", "/v1/completions?n=2"]
    assert (seen.method, json.loads(seen.body), seen.header(b"x-who")) == (
        "POST",
        {"prompt": "a", "max_tokens": 3},
        b"me",
    )
    await workers.close()
    await simulator.stop()
    assert repr(simulator) == "<Simulator sim: 0 connections, 0 running, 3 prompt tokens, 6 generated>"


async def test_idle_connections_are_closed_by_the_worker() -> None:
    """As in uvicorn: idle since the last answer; a connection that has not asked yet may take its time."""
    simulator = Simulator(keep_alive_seconds=0.01)
    reader, writer = await asyncio.open_connection("127.0.0.1", await simulator.start())
    await asyncio.sleep(0.02)
    writer.write(b"GET /load HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(PATIENCE):
        assert (await reader.read()).endswith(b'{"server_load":0}')
    writer.close()
    await simulator.stop()


async def test_requests_that_come_together_are_answered_in_turn(bench: Bench) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", bench._origin.port)
    writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\nGET /load HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    async with asyncio.timeout(PATIENCE):
        said = await reader.read()
    assert said.index(b'{"version":"0.32.0"}') < said.index(b'{"server_load":0}')
    writer.close()


async def test_expect_continue_is_answered_at_once(bench: Bench) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", bench._origin.port)
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-type: application/json\r\ncontent-length: 14\r\n\r\n"
    writer.write(head)
    async with asyncio.timeout(PATIENCE):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b'{"prompt":"a"}')
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    writer.close()


async def test_stopping_breaks_what_is_running_and_frees_the_port() -> None:
    simulator, workers = Simulator(tokens_per_second=10), Workers()
    port = await simulator.start()
    bench = Bench(simulator, workers, Origin("http", "127.0.0.1", port))
    answer = await bench.open("/v1/chat/completions", {"messages": HELLO, "stream": True})
    await simulator.stop()
    await until(lambda: simulator.running == 0)
    answer.close()
    assert await simulator.start(port=port) == port
    assert (await bench.json("/version", None)) == {"version": "0.32.0"}
    await workers.close()
    await simulator.stop()


async def test_run_serves_until_cancelled() -> None:
    ports: list[int] = []
    serving = asyncio.ensure_future(run("127.0.0.1", 0, "m", None, ["status:418"], ports.append))
    await until(lambda: ports)
    workers = Workers()
    bench = Bench(Simulator(), workers, Origin("http", "127.0.0.1", ports[0]))
    async with await bench.open("/v1/chat/completions", {"messages": HELLO}) as answer:
        assert answer.status == 418
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    await workers.close()


@pytest.mark.parametrize("faults", [["what"], ["break"], ["refuse:1"]])
async def test_run_refuses_wrong_faults_with_a_sentence(faults: list[str]) -> None:
    with pytest.raises(ValueError, match="fault"):
        await run("127.0.0.1", 0, faults=faults)


FIELDS = [
    *(
        "model",
        "messages",
        "prompt",
        "input",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "stream",
        "stream_options",
        "echo",
    ),
    *("return_token_ids", "request_id", "tools", "temperature", "add_generation_prompt", "continue_final_message"),
    *("encoding_format", "tokens", "return_token_strs"),
]


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize"]
)
async def test_odd_bodies_are_answered(bench: Bench, path: str) -> None:
    """Every field with values of every kind: 200, 400 or 404, and the connection stays in step."""
    odd = [
        None,
        True,
        0,
        -1,
        3,
        2.5,
        1e400,
        10**20,
        "",
        "x",
        "3",
        [],
        [1],
        [[1]],
        ["a", 1],
        [[]],
        {},
        {"role": 1},
        [{}],
    ]
    sound = {"messages": HELLO, "prompt": "a", "input": "a", "tokens": [1], "max_tokens": 2}
    for field in FIELDS:
        for value in odd:
            async with await bench.open(path, {**sound, field: value}) as answer:
                assert answer.status in {200, 400, 404}, (field, value)
                await answer.read_all(PATIENCE, 1 << 20)
    assert len(bench.simulator.connections) == 1


@pytest.mark.parametrize("port", [-1, 65_536, 99_999])
async def test_a_port_that_is_none_is_refused_in_words(port: int) -> None:
    with pytest.raises(ValueError, match=f"{port} is no port: give one from 1 to 65535"):
        await run("127.0.0.1", port)
