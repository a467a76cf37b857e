"""Request bodies: nothing odd is a fault of ours, and nothing good is changed on its way."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cases.house import BODY, House, streamed
from tests.cases.house import body as chat
from tests.cases.stub import DONE, FIN, USE, T, stream
from tests.cases.wire import as_json

pytestmark = pytest.mark.asyncio(loop_scope="session")

GOOD = as_json(BODY)

ODD = {
    "nothing": b"",
    "half": b"{",
    "list": b"[]",
    "null": b"null",
    "text": b'"x"',
    "number": b"5",
    "more behind": GOOD + b"x",
    "twice": GOOD + GOOD,
    "comma": GOOD[:-1] + b",}",
    "single quotes": GOOD.replace(b'"', b"'"),
    "broken UTF-8": GOOD.replace(b"hi", b"\xff\xfe"),
    "a lone surrogate": GOOD.replace(b"hi", rb"\ud800"),
    "UTF-16": GOOD.decode().encode("utf-16"),
}


@pytest.mark.parametrize("name", ODD)
async def test_an_odd_body_is_refused(house: House, name: str) -> None:
    """T116"""
    key = await house.key()
    reply = await house.post(key, ODD[name])
    if name == "a lone surrogate" and reply.status == 200:
        return
    reply.error(400)
    assert house.u1.seen == []
    await house.rows(key, 0)


def deep(field: str, depth: int = 50_000) -> bytes:
    return GOOD[:-1] + b', "' + field.encode() + b'": ' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"


NESTED = {
    "list": b"[" * 20_000 + b"]" * 20_000,
    "metadata": deep("metadata"),
    "tools": GOOD[:-1]
    + b', "tools": [{"type":"function","function":{"name":"f","parameters":'
    + b'{"a":' * 50_000
    + b"1"
    + b"}" * 50_003
    + b"]}",
    "messages": b'{"model":"m1","messages":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
}


@pytest.mark.parametrize("name", NESTED)
async def test_deep_nesting_is_refused_or_passed_on(house: House, name: str) -> None:
    """T117"""
    key = await house.key()
    reply = await house.post(key, NESTED[name])
    assert reply.status in (200, 400), reply.body[:300]
    assert (await house.post(key, chat())).status == 200


@pytest.mark.parametrize("member", ['"temperature":NaN', '"top_p":Infinity', '"max_tokens":-Infinity', '"x":NaN'])
async def test_what_is_no_json_number_is_refused(house: House, member: str) -> None:
    """T118"""
    key = await house.key()
    (await house.post(key, GOOD[:-1] + f", {member}}}".encode())).error(400)
    assert house.u1.seen == []
    await house.rows(key, 0)


MODELS: dict[str, Any] = {
    "null": None,
    "number": 5,
    "list": [],
    "object": {},
    "empty": "",
    "blank before": " m1",
    "blank after": "m1 ",
    "upper case": "M1",
    "line end": "m1\n",
    "long": "m" * 10_000,
    "zero width": "m1\u200b",
}


@pytest.mark.parametrize("name", MODELS)
async def test_a_model_is_named_exactly(house: House, name: str) -> None:
    """T119"""
    key = await house.key()
    reply = await house.post(key, chat(model=MODELS[name]))
    assert reply.status in (400, 404)
    assert reply.error()["param"] == "model"
    assert house.u1.seen == []
    await house.rows(key, 0)


async def test_a_body_without_a_model_is_refused(house: House) -> None:
    """T119"""
    key = await house.key()
    reply = await house.post(key, {name: value for name, value in BODY.items() if name != "model"})
    assert reply.status in (400, 404)
    assert reply.error()["param"] == "model"
    assert house.u1.seen == []


async def test_a_key_may_be_limited_to_some_models(house: House) -> None:
    """T119"""
    key = await house.key(models=["m2"])
    assert (await house.post(key, chat())).error(404)["code"] == "model_not_found"
    assert house.u1.seen == []
    assert (await house.post(key, chat(model="m2"))).status == 200
    listed = (await house.get(key, "/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["m2"]


RICH = (
    '{"seed":12345678901234567890,"model":"m1","temperature":1.0,"top_p":0.1,"x":1e2,"y":"\\u00e9\\/","z":"é",'
    '"messages":[{"role":"user","content":"hi","unknown":{"b":1,"a":[1.10,null]}}],"max_tokens":16,'
    '"stream":true,"q":{"2":1,"1":2}}'
)
ADDED = {"stream_options", "return_token_ids", "cache_salt", "priority", "request_id"}
"""What may be added for a vLLM."""


def exactly(data: str | bytes) -> Any:
    """JSON with order, numbers as they are written, and doubled members kept."""
    return json.loads(data, parse_int=str, parse_float=str, object_pairs_hook=list)


async def test_what_the_user_sent_goes_on_unchanged(house: House) -> None:
    """T120"""
    key = await house.key()
    house.u1.does(stream(T("a"), FIN, USE(5, 1), DONE))
    assert (await house.post(key, RICH.encode())).status == 200
    members = [pair for pair in exactly(house.u1.last.body) if pair[0] not in ADDED]
    assert members == exactly(RICH)
    assert house.u1.last.json()["stream_options"]["include_usage"] is True


async def test_of_doubled_members_one_goes_on(house: House) -> None:
    """T120: the engine would take the last; what was checked is what it gets."""
    key = await house.key()
    reply = await house.post(key, b'{"max_tokens":5,' + GOOD[1:-1] + b',"max_tokens":7}')
    if reply.status == 200:
        assert [value for name, value in exactly(house.u1.last.body) if name == "max_tokens"] == ["7"]
    else:
        reply.error(400)


@pytest.mark.parametrize(
    "changes",
    [{"stream": "yes"}, {"stream": 1}, {"stream_options": 5}, {"stream_options": {"include_usage": "yes"}}, {"n": "2"},
     {"n": 0}, {"n": -1}, {"n": 1.5}, {"messages": "hi"}, {"messages": []}],
    ids=str,
)  # fmt: skip
async def test_what_the_engine_would_coerce_is_refused_by_name(house: House, changes: dict[str, Any]) -> None:
    """T036, T116: a vLLM takes "yes" for true and "2" for 2, so nothing unread may reach it."""
    key = await house.key()
    reply = await house.post(key, streamed(**changes))
    (field,) = changes
    assert (reply.error(400)["param"] or "").startswith(field)
    assert house.u1.seen == []
    await house.rows(key, 0)
