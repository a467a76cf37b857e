"""What the simulator writes is what vLLM 0.32.0 wrote, recorded in wire_sim/, apart from words, names and moments."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine_adapter.simulator import Simulator
from tests.engine_adapter.raw_worker import RawAnswer, raw_request

RECORDED = Path(__file__).parent / "wire_sim"


@dataclass(frozen=True)
class Scene:
    """One recorded request and its answer."""

    title: str
    request: bytes
    status: int
    headers: list[tuple[str, str]]
    body: list[str]
    """the data of events, or the one body"""

    @property
    def stream(self) -> bool:
        return ("transfer-encoding", "chunked") in self.headers


def scenes() -> list[Scene]:
    found = []
    for file in sorted(RECORDED.glob("*.txt")):
        for part in file.read_text().removeprefix("=== ").split("\n=== "):
            title, _, rest = part.partition("\n")
            found.append(scene(f"{file.stem}: {title}", rest.splitlines()))
    return found


def scene(title: str, lines: list[str]) -> Scene:
    asked = "\n".join(line[2:] for line in lines if line.startswith(">"))
    said = "\n".join(line[2:] for line in lines if line.startswith("<"))
    head, _, body = said.partition("\n\n")
    status, *fields = head.split("\n")
    headers = [tuple(line.split(": ", 1)) for line in fields if line]
    events = [line for line in body.split("\n") if line.startswith(("event: ", "data: "))]
    whole = [body] if body.strip() else []
    return Scene(title, request_of(asked), int(status.split()[1]), headers, events or whole)  # type: ignore[arg-type]


def request_of(asked: str) -> bytes:
    head, _, body = asked.partition("\n\n")
    return head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body.encode()


SAMENESS = [
    (r'"id":"(chatcmpl|cmpl|embd|modelperm)-(?!my-|body-)[0-9a-f]+"', r'"id":"\1-…"'),
    (r'"created":\d+', '"created":0'),
    (r'"system_fingerprint":"vllm-0.32.0-[0-9a-f]{8}"', '"system_fingerprint":"…"'),
    (r'"(content|text)":"(?:[^"\\]|\\.)*"', r'"\1":"…"'),
    (r'"prompt_token_ids":\[[\d,]+\]', '"prompt_token_ids":[…]'),
    (r'"(embedding)":\[[^\]]+\]', r'"\1":[…]'),
    (r'"(embedding)":"[^"]+"', r'"\1":"…"'),
    (r'"(tokens)":\[[\d,]+\]', r'"\1":[…]'),
    (r'"(token_strs)":\[.+\]', r'"\1":[…]'),
    (r'"count":[1-9]\d*', '"count":1'),
    (r'^{"prompt":".*"}$', '{"prompt":"…"}'),
    (r'"(id|item_id)":"(resp|msg)_[0-9a-f]+"', r'"\1":"\2_…"'),
    (r'"created_at":\d+', '"created_at":0'),
    (r'"(delta)":"(?:[^"\\]|\\.)*"', r'"\1":"…"'),
    (r'"(\w+_ms|tokens_per_second)":(null|[\d.]+)', r'"\1":…'),
    (r'"(original_)?input_tokens":[1-9]\d*', r'"\1input_tokens":1'),
    (r'"output_tokens":4(.*),"total_tokens":\d+', r'"output_tokens":4\1,"total_tokens":5'),
    (r'"sequence_number":\d+', '"sequence_number":0'),
]


def alike(text: str) -> str:
    """The text without what may differ. Sizes of prompts differ with the tokenizer; sums must add up."""
    for pattern, instead in SAMENESS:
        text = re.sub(pattern, instead, text)
    text = re.sub(r'"token_ids":\[([\d,]+)\]', lambda found: f'"token_ids":{found[1].count(",") + 1}', text)
    return re.sub(r'"prompt_tokens":(\d+),"total_tokens":(\d+),"completion_tokens":(\d+)', _sum, text)


def _sum(found: re.Match[str]) -> str:
    prompt, total, completion = map(int, found.groups())
    assert total == prompt + completion
    return f'"completion_tokens":{completion}'


MORE = "event: response.output_text.delta"


def once(lines: list[str]) -> list[str]:
    """Of the pieces of text that a Response comes in only the first: how many tokens are in one is chance."""
    seen: list[str] = []
    for line in lines:
        if not (MORE in seen and (line == MORE or '"type":"response.output_text.delta"' in line)) or seen[-1] == MORE:
            seen.append(line)
    return seen


def by_choice(events: list[str]) -> list[str]:
    """Choices take turns as they like: the order counts within each."""
    return sorted(events, key=lambda event: ((found := re.search(r'"index":(\d+)', event)) and found[1]) or "z")


@pytest.fixture(scope="module")
def recorded() -> list[Scene]:
    return scenes()


@pytest.fixture
async def port() -> AsyncIterator[int]:
    simulator = Simulator("tiny", context=4096)
    yield await simulator.start()
    await simulator.stop()


@pytest.mark.parametrize("recording", scenes(), ids=lambda scene: scene.title)
async def test_says_what_vllm_said(recording: Scene, port: int) -> None:
    answer = await raw_request(port, recording.request)
    assert answer.status == recording.status
    assert shape(answer.headers) == shape(recording.headers)
    expected = [alike(text) for text in once(recording.body)]
    said = once([line for text in texts(answer) for line in text.removesuffix("\n\n").split("\n")])
    assert by_choice([alike(text) for text in said]) == by_choice(expected)


def shape(headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, "…" if name in {"date", "content-length"} else value) for name, value in headers]


def texts(answer: RawAnswer) -> list[str]:
    if ("transfer-encoding", "chunked") in answer.headers:
        return [chunk.decode() for chunk in answer.chunks if chunk]
    return [answer.body.decode()] if answer.body else []


async def test_the_recordings_are_read(recorded: list[Scene]) -> None:
    assert len(recorded) == 110
    assert sum(scene.stream for scene in recorded) == 21
    assert all(scene.body for scene in recorded if scene.title not in {"basics: /health", "basics: /ping"})


async def test_a_stream_is_framed_like_uvicorns(port: int) -> None:
    answer = await raw_request(port, chat({"max_tokens": 2, "stream": True}))
    assert [chunk[:6] for chunk in answer.chunks if chunk] == [b"data: "] * 4
    assert [chunk[-2:] for chunk in answer.chunks if chunk] == [b"\n\n"] * 4
    assert answer.chunks[-2:] == [b"data: [DONE]\n\n", b""]


async def test_the_head_is_uvicorns_byte_for_byte(port: int) -> None:
    answer = await raw_request(port, b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    pattern = (
        rb"HTTP/1\.1 200 OK\r\ndate: \w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT\r\nserver: uvicorn\r\n"
        rb"content-length: 20\r\ncontent-type: application/json\r\nvary: Origin"
    )
    assert re.fullmatch(pattern, answer.head)
    assert answer.body == b'{"version":"0.32.0"}'


async def test_a_prompt_beyond_the_context_is_refused_as_by_vllm(port: int) -> None:
    """Of text vLLM says only that it is too long; of token ids it knows the number."""
    said = (
        "This model's maximum context length is 4096 tokens. However, your prompt contains {} input tokens, which exceeds this "
        "limit even without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value={})"
    )
    long = await raw_request(port, chat({"messages": [{"role": "user", "content": "Hello " * 5000}]}))
    assert (long.status, error_of(long)) == (
        400,
        {
            "message": said.format("at least 4097", 4097),
            "type": "BadRequestError",
            "param": "input_tokens",
            "code": 400,
        },
    )
    ids = await raw_request(port, post("/v1/completions", {"prompt": [55] * 5000}))
    assert error_of(ids)["message"] == said.format(5000, 5000)


async def test_more_than_what_is_left_of_the_context_is_cut_without_a_word(port: int) -> None:
    answer = await raw_request(port, post("/v1/completions", {"prompt": [55] * 4090, "max_tokens": 100}))
    assert json.loads(answer.body)["usage"]["completion_tokens"] == 6
    full = await raw_request(port, post("/v1/completions", {"prompt": [55] * 4096, "max_tokens": 100}))
    assert error_of(full)["message"] == "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"


async def test_invalid_utf8_has_its_own_shape(port: int) -> None:
    answer = await raw_request(
        port, post_bytes("/v1/chat/completions", b'{"messages":[{"role":"user","content":"\xff"}]}')
    )
    assert (answer.status, answer.body) == (400, b'{"detail":"There was an error parsing the body"}')


async def test_garbage_is_answered_as_by_uvicorn(port: int) -> None:
    answer = await raw_request(port, b"hello\r\n\r\n")
    assert (answer.status, answer.body) == (400, b"Invalid HTTP request received.")
    assert ("connection", "close") in answer.headers


async def test_a_percent_encoded_slash_is_a_slash(port: int) -> None:
    answer = await raw_request(port, post("/v1%2Fchat%2Fcompletions", {"messages": [{"role": "user", "content": "x"}]}))
    assert answer.status == 200


def chat(members: dict[str, object]) -> bytes:
    return post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], **members})


def post(path: str, body: dict[str, object]) -> bytes:
    return post_bytes(path, json.dumps(body).encode())


def post_bytes(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def error_of(answer: RawAnswer) -> dict[str, object]:
    error: dict[str, object] = json.loads(answer.body)["error"]
    return error
