"""Exact prompt sizes: when they are asked for, and that nobody else waits for them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.exact_size import TooLong
from engine_adapter.http1 import Workers
from engine_adapter.prompts import PromptParts
from engine_adapter.request import parse
from meter.gateway.fleet import Model
from meter.gateway.tokenizers import ExactPrompts
from tests.gateway.house import HELLO, House

CALL = parse("chat", json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode())
MODEL = Model("m", (), (), "slow", False)


class Slow:
    """A tokenizer that counts until it is told to end, one way or the other."""

    def __init__(self) -> None:
        self.counting = threading.Event()
        self.done = threading.Event()
        self.ended: list[str] = []

    def count(self, parts: PromptParts, given_up: Callable[[], bool] = lambda: False) -> int:
        self.counting.set()
        while not self.done.wait(0.01):
            if given_up():
                self.ended.append("given up")
                raise TooLong
        self.ended.append("counted")
        return 7


@pytest.fixture
def slow() -> Slow:
    return Slow()


async def ended(slow: Slow) -> list[str]:
    """How the count ended, once it has."""
    async with asyncio.timeout(10):
        while not slow.ended:
            await asyncio.sleep(0.01)
    return slow.ended


async def test_others_go_on_while_a_prompt_is_counted(slow: Slow) -> None:
    """The count ends only because something else can run beside it."""
    counting = asyncio.create_task(ExactPrompts(Workers(), {"slow": slow}).count(MODEL, CALL))
    async with asyncio.timeout(10):
        while not slow.counting.is_set():
            await asyncio.sleep(0.01)
    slow.done.set()
    assert await counting == 7


async def test_a_count_that_takes_too_long_is_given_up(slow: Slow) -> None:
    assert await ExactPrompts(Workers(), {"slow": slow}, seconds=0.05).count(MODEL, CALL) is None
    assert await ended(slow) == ["given up"]


async def test_a_count_ends_with_its_request(slow: Slow) -> None:
    counting = asyncio.create_task(ExactPrompts(Workers(), {"slow": slow}).count(MODEL, CALL))
    async with asyncio.timeout(10):
        while not slow.counting.is_set():
            await asyncio.sleep(0.01)
    counting.cancel()
    assert await ended(slow) == ["given up"]


@pytest.mark.parametrize(("tokenizer", "output"), [("engine", 200), ("bytes", 131)])
async def test_an_answer_is_not_cut_for_what_its_prompt_might_have_had(
    tmp_path: Path, tokenizer: str, output: int
) -> None:
    """The cap has room for the prompt's tokens and the answer, not for the prompt's bytes and the answer."""
    cap: dict[str, Any] = {"rate": None, "burst": None, "cap": {"tokens": 1_405, "seconds": 3600}}
    body = {**HELLO, "messages": [{"role": "user", "content": "incomprehensibilities " * 57}], "max_tokens": 200}
    models = {"m1": {"primary": [{"backend": "u1", "model": "m1"}], "overflow": [], "tokenizer": tokenizer}}
    async with House(tmp_path, tier=cap, models=models) as house:
        answer = await house.post(body)
        assert answer.status == 200
        assert answer.json["usage"]["completion_tokens"] == output
        assert answer.headers.get("x-weir-max-tokens") == (str(output) if output < 200 else None)


async def test_an_answer_is_not_cut_for_a_schema_that_is_not_in_its_prompt(tmp_path: Path) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"description": "word " * 2_000}}}
    tier: dict[str, Any] = {"rate": None, "burst": None, "cap": None}
    target = {"backend": "u1", "model": "m1", "context_tokens": 2_000}
    async with House(tmp_path, tier=tier, models={"m1": {"primary": [target], "overflow": []}}) as house:
        answer = await house.post({**HELLO, "max_tokens": 1_000, "response_format": schema})
        assert "x-weir-max-tokens" not in answer.headers
        assert answer.json["usage"]["completion_tokens"] == 1_000
