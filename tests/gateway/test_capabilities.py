"""What a backend is asked to count: found out once, remembered, given up where it is not known, found out anew."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine_adapter import request
from engine_adapter.request import Live
from meter.app import now
from meter.callers.edits import KeyDraft
from meter.callers.registry import Registry
from meter.gateway.capabilities import Capabilities, refused_field, unfit
from tests.gateway.house import HELLO, House
from tests.gateway.stub import Answering, Asked, answered, plain, streamed, worker

STREAM = {**HELLO, "stream": True}
ALONE = {"on_outage": "reject", "rate": None, "burst": None}
NOT_KNOWN = "[{'type': 'extra_forbidden', 'loc': ('body', '%s'), 'msg': 'Extra inputs are not permitted'}]"


def call(**fields: Any) -> request.Call:
    return request.parse("chat", json.dumps({**STREAM, **fields}).encode())


@pytest.mark.parametrize(
    ("kind", "unknown", "best"),
    [
        ("vllm", [], "token_ids"),
        ("vllm", ["return_token_ids"], "usage"),
        ("vllm", ["continuous_usage_stats"], "token_ids"),
        ("vllm", ["return_token_ids", "continuous_usage_stats"], "none"),
        ("vllm", ["stream_options"], "nothing"),
        ("openai", [], "none"),
        ("openai", ["stream_options"], "nothing"),
    ],
)
def test_the_best_is_asked_for_that_needs_nothing_unknown(kind: Any, unknown: list[str], best: str) -> None:
    backend = Capabilities(kind)
    assert backend.best(unknown) == best
    assert backend.learn(unknown) is bool(unknown)
    assert not backend.learn(unknown)
    assert backend.best() == best
    backend.forget()
    assert backend.best() == ("token_ids" if kind == "vllm" else "none")


@pytest.mark.parametrize(
    ("fields", "live", "status", "message", "expected"),
    [
        ({}, "token_ids", 400, NOT_KNOWN % "return_token_ids", "return_token_ids"),
        ({}, "token_ids", 422, NOT_KNOWN % "return_token_ids", "return_token_ids"),
        ({}, "usage", 400, NOT_KNOWN % "return_token_ids", None),
        ({}, "token_ids", 404, NOT_KNOWN % "return_token_ids", None),
        ({}, "token_ids", 400, "Unrecognized request argument supplied: stream_options", "stream_options"),
        ({}, "token_ids", 400, "unknown field include_usage", "stream_options"),
        ({}, "usage", 400, NOT_KNOWN % "stream_options', 'continuous_usage_stats", "continuous_usage_stats"),
        ({}, "none", 400, NOT_KNOWN % "stream_options", "stream_options"),
        ({}, "nothing", 400, NOT_KNOWN % "stream_options", None),
        ({}, "token_ids", 400, "my_return_token_ids_too is unknown", None),
        ({}, "token_ids", 400, "max_tokens is too large", None),
        ({"return_token_ids": True}, "token_ids", 400, NOT_KNOWN % "return_token_ids", None),
        ({"stream_options": {}}, "none", 400, NOT_KNOWN % "stream_options", None),
        ({"stream": False}, "token_ids", 400, NOT_KNOWN % "return_token_ids", None),
    ],
)
def test_a_refusal_is_ours_only_where_it_names_a_field_that_we_added(
    fields: dict[str, Any], live: Live, status: int, message: str, expected: str | None
) -> None:
    body = json.dumps({"error": {"message": message}}).encode()
    assert refused_field(call(**fields), live, status, body) == expected


@pytest.mark.parametrize(
    ("endpoint", "fields", "prompt_tokens", "live"),
    [
        ("chat", {}, 9, "token_ids"),
        ("chat", {"include_reasoning": True, "echo": False}, 9, "token_ids"),
        ("chat", {"include_reasoning": False}, 9, "usage"),
        ("completions", {"echo": True}, 9, "usage"),
        ("completions", {"n": 2, "best_of": 9}, 32_768, "token_ids"),
        ("chat", {}, 65_537, "usage"),
        ("chat", {"n": 4}, 16_385, "usage"),
    ],
)
def test_ids_are_not_asked_for_where_they_would_change_the_answer_be_hidden_from_it_or_be_too_many(
    endpoint: Any, fields: dict[str, Any], prompt_tokens: int, live: str
) -> None:
    prompt: dict[str, Any] = {"messages": STREAM["messages"]} if endpoint == "chat" else {"prompt": "hi"}
    asked = request.parse(endpoint, json.dumps({"model": "m", "stream": True, **prompt, **fields}).encode())
    assert Capabilities("vllm").best(unfit(asked, prompt_tokens)) == live


# ---- beside a worker -------------------------------------------------------------------------------------------------


def _chunk(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "id": "c",
        "model": "m1",
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}],
        **more,
    }


USAGE = {"id": "c", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}


def engine(*refused: str, ignores: bool = False) -> Answering:
    """Answers streams of two tokens; refuses these fields, or passes over what it does not know."""

    async def answer(asked: Asked) -> AsyncIterator[bytes]:
        body = asked.json
        options = body.get("stream_options") or {}
        for field in refused:
            if field in body or field in options:
                yield plain({"object": "error", "message": NOT_KNOWN % field, "code": 400}, 400)
                return
        if body.get("top_k") == "x":
            yield plain({"error": {"message": "top_k: return_token_ids is not supported"}}, 400)
            return
        ids = body.get("return_token_ids") and not ignores
        usage = options.get("continuous_usage_stats") and not ignores
        chunks = [_chunk("a"), _chunk("b", "stop")]
        for number, chunk in enumerate(chunks, 1):
            if ids:
                chunk["choices"][0]["token_ids"] = [7]
            if usage:
                chunk["usage"] = {"prompt_tokens": 3, "completion_tokens": number, "total_tokens": 3 + number}
        if ids:
            chunks[0]["prompt_token_ids"] = [1, 2, 3]
        last = [USAGE] if options.get("include_usage") else []
        yield streamed(*chunks, *last, "[DONE]")

    return answer


def asked_for(asked: Asked) -> str:
    """The fields of ours in a body, by their initials."""
    body = asked.json
    options = body.get("stream_options", {})
    fields = {
        "i": body.get("return_token_ids"),
        "c": options.get("continuous_usage_stats"),
        "u": options.get("include_usage"),
    }
    return "".join(name for name, there in fields.items() if there)


@pytest.mark.parametrize(
    ("refused", "bodies", "source"),
    [
        ((), ["iu", "iu"], "engine"),
        (("return_token_ids",), ["iu", "cu", "cu"], "engine"),
        (("return_token_ids", "continuous_usage_stats"), ["iu", "cu", "u", "u"], "engine"),
        (("return_token_ids", "stream_options"), ["iu", "cu", "", ""], "counted"),
        (("stream_options",), ["iu", "", ""], "counted"),
    ],
)
async def test_what_an_engine_refuses_is_left_out_at_once_and_from_then_on(
    tmp_path: Path, refused: tuple[str, ...], bodies: list[str], source: str
) -> None:
    async with (
        worker(engine(*refused)) as stub,
        House(tmp_path, tier=ALONE, backends={"u1": {"url": stub.url}}) as house,
    ):
        answers = [await house.post(STREAM) for _ in range(2)]
        rows = await house.rows(2)
        assert [answer.status for answer in answers] == [200, 200]
        assert [asked_for(asked) for asked in stub.requests] == bodies
        assert {(row.ending, row.attempt, row.completion_tokens, row.usage_source) for row in rows} == {
            ("completed", 1, 2, source)
        }
        for answer in answers:
            texts = [json.loads(event)["choices"][0]["delta"]["content"] for event in answer.events[:-1]]
            assert texts == ["a", "b"]
            assert b"usage" not in answer.body and b"[7]" not in answer.body


async def test_an_engine_that_passes_a_field_over_is_asked_for_the_next_best(tmp_path: Path) -> None:
    async with (
        worker(engine(ignores=True)) as stub,
        House(tmp_path, tier=ALONE, backends={"u1": {"url": stub.url}}) as house,
    ):
        for _ in range(3):
            assert (await house.post(STREAM)).status == 200
        assert [asked_for(asked) for asked in stub.requests] == ["iu", "cu", "cu"]


async def test_a_caller_s_own_mistake_is_told_and_makes_us_ask_for_no_less(tmp_path: Path) -> None:
    async with (
        worker(engine()) as stub,
        House(tmp_path, tier=ALONE, backends={"u1": {"url": stub.url}}) as house,
    ):
        mistaken = await house.post({**STREAM, "top_k": "x"})
        assert (mistaken.status, "top_k" in mistaken.json["error"]["message"]) == (400, True)
        await house.post(STREAM)
        assert [asked_for(asked) for asked in stub.requests] == ["iu", "cu", "iu"]
        rows = await house.rows(2)
        assert sorted(row.ending for row in rows) == ["completed", "engine_refused"]


async def test_what_a_client_asked_for_itself_is_its_own_to_hear_about(tmp_path: Path) -> None:
    async with (
        worker(engine("return_token_ids")) as stub,
        House(tmp_path, tier=ALONE, backends={"u1": {"url": stub.url}}) as house,
    ):
        answer = await house.post({**STREAM, "return_token_ids": True})
        assert answer.status == 400
        assert len(stub.requests) == 1


async def test_a_call_that_ids_do_not_fit_says_nothing_about_what_the_backend_knows(tmp_path: Path) -> None:
    async with (
        worker(engine()) as stub,
        House(tmp_path, tier=ALONE, backends={"u1": {"url": stub.url}}) as house,
    ):
        for fields in ({}, {"include_reasoning": False}, {}):
            assert (await house.post({**STREAM, **fields})).status == 200
        assert [asked_for(asked) for asked in stub.requests] == ["iu", "cu", "iu"]


async def test_a_backend_that_was_away_is_asked_for_everything_again(tmp_path: Path) -> None:
    away = False

    async def answer(asked: Asked) -> AsyncIterator[bytes]:
        if away:
            yield answered(b"", status=b"500 Away")
            return
        async for piece in engine("return_token_ids")(asked):
            yield piece

    async with worker(answer) as stub, House(tmp_path, tier=ALONE, backends={"u1": {"url": stub.url}}) as house:
        assert (await house.post(STREAM)).status == 200
        away = True
        assert (await house.post(STREAM)).status == 500
        away = False
        assert (await house.post(STREAM)).status == 200
        assert [asked_for(asked) for asked in stub.requests] == ["iu", "cu", "cu", "iu", "cu"]


async def test_a_backend_that_is_no_vllm_is_asked_for_its_usage_alone(tmp_path: Path) -> None:
    async with (
        worker(engine()) as stub,
        House(tmp_path, tier=ALONE, backends={"u1": {"url": stub.url, "kind": "openai"}}) as house,
    ):
        await house.post(STREAM)
        assert [asked_for(asked) for asked in stub.requests] == ["u"]
        assert "cache_salt" not in stub.requests[0].json


# ---- whose prefix cache ----------------------------------------------------------------------------------------------


async def salts(house: House, *fields: dict[str, Any], secret: str | None = None) -> list[str]:
    """What the engine was sent as `cache_salt` for bodies with these fields."""
    for each in fields:
        headers = {"Authorization": f"Bearer {secret}"} if secret else None
        assert (await house.post({**HELLO, **each}, headers=headers)).status == 200
    return [json.loads(asked.body)["cache_salt"] for asked in list(house.large.requests)[-len(fields) :]]


async def member(house: House, name: str, team: str | None) -> str:
    """The secret of a new key."""
    _, secret = await Registry(house.engine, now).create_key("tests", KeyDraft(name=name, tier="test", team=team))
    await house.sidecar.look_again()
    return secret


async def test_every_team_has_a_prefix_cache_of_its_own_whichever_process_serves_it(tmp_path: Path) -> None:
    seen = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        async with House(tmp_path / name, teams={"t": {}, "s": {}}) as house:
            secrets = [
                await member(house, f"k{number}", team) for number, team in enumerate(("t", "t", "s", None, None))
            ]
            seen.append([(await salts(house, {}, secret=secret))[0] for secret in secrets])
    (first, colleague, other_team, alone, lonely), (elsewhere, *_) = seen
    assert first == colleague == elsewhere
    assert len({first, other_team, alone, lonely}) == 4


async def test_a_salt_of_a_caller_s_own_only_divides_its_team_s_cache(tmp_path: Path) -> None:
    async with House(tmp_path) as house:
        stranger = await member(house, "stranger", None)
        none, mine, again, other = await salts(house, *({}, *({"cache_salt": salt} for salt in ("a", "a", "b"))))
        assert mine == again
        assert len({none, mine, other, "a", "b"}) == 5
        # who knows another's salt gets no nearer to its cache
        assert none not in await salts(house, {"cache_salt": none}, secret=stranger)
