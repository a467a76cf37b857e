"""Counting and tokenizing: authenticated, renamed, bounded, and free."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.simulator import parse_fault
from meter.gateway.free import AT_ONCE, PATHS
from tests.gateway.house import House, until
from tests.gateway.stub import Asked, plain, worker

RENAMED = {"m1": {"primary": [{"backend": "u1", "model": "org/served"}]}}
TEXT = {"model": "m1", "prompt": "one two three"}


async def test_tokenizing_there_and_back_costs_nothing_and_leaves_no_record(tmp_path: Path) -> None:
    async with House(tmp_path) as house:
        tokens = (await house.post(TEXT, path="/tokenize")).json
        again = (await house.post({"model": "m1", "tokens": tokens["tokens"]}, path="/detokenize")).json
        assert (tokens["count"], again["prompt"].split()) == (3, ["one", "two", "three"])
        await house.post()
        await house.rows(1)  # of the metered request alone
        used = (await house.windows())["hour"]["used"]
        assert used == house.large.prompt_tokens_total + house.large.generation_tokens_total
        labels = {"endpoint": "/tokenize", "model": "m1", "backend": "u1", "verdict": "none", "status": "200"}
        assert house.sidecar._metrics.registry.get_sample_value("weir_requests_total", labels) == 1


@pytest.mark.parametrize("path", PATHS)
async def test_the_model_has_its_own_name_on_either_side_and_all_else_goes_on_as_it_came(
    tmp_path: Path, path: str
) -> None:
    said = {"input_tokens": 3, "model": "org/served"}
    async with (
        worker(plain(said)) as stub,
        House(tmp_path, backends={"u1": {"url": stub.url}}, models=RENAMED) as house,
    ):
        body = b'{ "x":1e2, "model" : "m1","y":"\\u00e9/" }'
        answer = await house.post(body, path=f"{path}?beta=true", headers={"anthropic-version": "2023-06-01"})
        asked = stub.requests[0]
        assert (answer.status, answer.json) == (200, {**said, "model": "m1"})
        assert asked.body == b'{"x":1e2,"model":"org/served","y":"\\u00e9/"}'
        assert asked.path == f"{path}?beta=true"
        assert asked.headers.get("anthropic-version") == ("2023-06-01" if "messages" in path else None)
        assert house.secret not in str(asked)
        assert (answer.headers["x-weir-backend"], answer.headers["x-weir-model"]) == ("u1", "org/served")
        assert answer.headers["content-type"].startswith("application/json")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": "x"}, 400),
        ({"model": 5, "prompt": "x"}, 400),
        ({"model": "hidden", "prompt": "x"}, 404),
        ({"model": "no", "prompt": "x"}, 404),
        (b"{", 400),
        (b"", 400),
    ],
)
async def test_only_the_caller_s_models_are_asked_and_only_for_what_is_json(
    tmp_path: Path, path: str, body: Any, status: int
) -> None:
    hidden = {"hidden": {"primary": [{"backend": "u1", "model": "m1"}]}}
    async with House(tmp_path, tier={"models": ["m1"]}, models=hidden) as house:
        assert (await house.post(body, path=path)).status == status
        assert (await house.raw("POST", path, headers={}, body=json.dumps(TEXT).encode())).status == 401
        assert not house.large.requests


@pytest.mark.parametrize(
    ("fault", "status"), [("refuse", 503), ("status:500", 500), ("garbage", 502), ("hang", 504), ("status:401", 502)]
)
async def test_another_worker_of_the_model_is_asked_where_one_fails_and_never_the_cheaper_model(
    tmp_path: Path, fault: str, status: int
) -> None:
    both = [{"backend": "u1", "model": "m1"}, {"backend": "u3", "model": "m1"}]
    terms = {"u1": {"first_event_seconds": 0.3}}
    async with worker(plain({"count": 1})) as other, House(tmp_path, backends=terms) as alone:
        alone.large.faults = parse_fault(fault)
        assert (await alone.post(TEXT, path="/tokenize")).status == status
        assert not alone.cheap.requests
        (tmp_path / "two").mkdir()
        backends = {**terms, "u3": {"url": other.url}}
        async with House(tmp_path / "two", backends=backends, models={"m1": {"primary": both}}) as house:
            house.large.faults = parse_fault(fault)
            answers = [await house.post(TEXT, path="/tokenize") for _ in range(2)]
            assert [answer.json for answer in answers] == [{"count": 1}] * 2


async def test_the_engine_s_own_refusal_is_passed_on_in_the_caller_s_dialect(tmp_path: Path) -> None:
    said = {"error": {"message": "Field required", "type": "Bad Request", "param": "body.messages", "code": 400}}
    async with worker(plain(said, 400)) as stub, House(tmp_path, backends={"u1": {"url": stub.url}}) as house:
        tokenized = await house.post(TEXT, path="/tokenize")
        counted = await house.post(TEXT, path="/v1/messages/count_tokens")
        assert (tokenized.status, tokenized.json) == (400, said)
        assert (counted.status, counted.json) == (
            400,
            {"type": "error", "error": {"type": "invalid_request_error", "message": "Field required"}},
        )


@pytest.mark.parametrize(("tier", "most"), [({}, AT_ONCE), ({"max_parallel": 2}, 2), ({"max_parallel": None}, AT_ONCE)])
async def test_a_key_may_ask_for_only_a_few_at_once(tmp_path: Path, tier: dict[str, Any], most: int) -> None:
    go = asyncio.Event()

    async def slow(asked: Asked) -> AsyncIterator[bytes]:
        await go.wait()
        yield plain({"count": 1})

    async with worker(slow) as stub, House(tmp_path, tier=tier, backends={"u1": {"url": stub.url}}) as house:
        running = [asyncio.create_task(house.post(TEXT, path="/tokenize")) for _ in range(most)]
        await until(lambda: asyncio.sleep(0, len(stub.requests)), lambda asked: asked == most)
        refused = await house.post(TEXT, path="/tokenize")
        go.set()
        assert {answer.status for answer in await asyncio.gather(*running)} == {200}
        assert (refused.status, refused.json["error"]["code"]) == (429, "concurrency_limit_exceeded")
        assert refused.headers["retry-after"] == "1"
        assert (await house.post(TEXT, path="/tokenize")).status == 200


async def test_a_client_that_leaves_frees_its_place(tmp_path: Path) -> None:
    async with House(tmp_path, tier={"max_parallel": 1}) as house:
        house.large.faults = parse_fault("hang")
        asked = asyncio.create_task(house.post(TEXT, path="/tokenize"))
        await until(lambda: asyncio.sleep(0, len(house.large.requests)), bool)
        asked.cancel()
        house.large.faults = parse_fault("")

        async def again() -> int:
            return (await house.post(TEXT, path="/tokenize")).status

        assert await until(again, lambda status: status == 200) == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/messages/count_tokens", {"messages": []}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
        ("/v1/rerank", {"query": "q", "documents": ["d"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ],
)
async def test_a_backend_that_is_no_vllm_is_not_asked_for_what_only_vllm_serves(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    both = [{"backend": "u1", "model": "m1"}, {"backend": "u2", "model": "m2"}]
    models = {"m1": {"primary": both}, "m2": {"primary": [{"backend": "u2", "model": "m2"}]}}
    async with (
        worker(plain({"usage": {"prompt_tokens": 1, "total_tokens": 1}})) as stub,
        House(tmp_path, backends={"u1": {"url": stub.url}, "u2": {"kind": "openai"}}, models=models) as house,
    ):
        refused = await house.post({**body, "model": "m2"}, path=path)
        assert (refused.status, "not served at" in refused.json["error"]["message"]) == (404, True)
        assert {(await house.post({**body, "model": "m1"}, path=path)).status for _ in range(4)} == {200}
        assert not house.cheap.requests
