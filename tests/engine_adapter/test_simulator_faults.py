"""Every scripted fault, as a client sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine_adapter.errors import EngineBroke, EngineUnavailable
from engine_adapter.http1 import Origin, Workers
from engine_adapter.simulator import Faults, Simulator, describe, parse_fault, parse_faults
from tests.engine_adapter.raw_worker import PATIENCE, raw_request, until

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
USAGE = {"stream_options": {"include_usage": True}}


@pytest.fixture
async def simulator() -> AsyncIterator[Simulator]:
    made = Simulator()
    made.port = await made.start()  # type: ignore[attr-defined]
    yield made
    await made.stop()


async def outcome(
    simulator: Any, fault: str, *, head: float = PATIENCE, quiet_after: int | None = None, **members: Any
) -> tuple[str, int, list[str]]:
    """How it ended, the status, and the contents that came (stream) or the finish reason (plain).

    `quiet_after`: how many contents to wait for patiently; what comes then should be silence.
    """
    workers = Workers()
    got, status = b"", 0
    try:
        async with await workers.open(
            Origin("http", "127.0.0.1", simulator.port),
            method=b"POST",
            path="/v1/chat/completions",
            headers=[(b"content-type", b"application/json"), (b"x-sim-fault", fault.encode())],
            body=json.dumps(CHAT | members).encode(),
            connect_seconds=PATIENCE,
            head_seconds=head,
        ) as answer:
            status = answer.status
            while piece := await answer.read(0.05 if len(contents(got)) == quiet_after else PATIENCE):
                got += piece
            return "whole", status, contents(got)
    except EngineUnavailable as unavailable:
        return f"unavailable {unavailable.status}", status, []
    except EngineBroke as broke:
        return f"broke {broke.phase}", status, contents(got)
    except TimeoutError:
        return "silent", status, contents(got)
    finally:
        await workers.close()


def contents(got: bytes) -> list[str]:
    if got and not got.startswith((b"data: ", b": ")):
        answer = json.loads(got)
        return [answer["choices"][0]["finish_reason"]] if "choices" in answer else [answer["error"]["message"][:16]]
    found = []
    for event in got.decode().split("\n\n"):
        if event.startswith("data: {"):
            data = json.loads(event[6:])
            choices = data.get("choices") or [{}]
            word = choices[0].get("delta", {}).get("content")
            found += ["error"] if "error" in data else ["usage"] if "usage" in data else ["·"] if word else []
            found += [choices[0]["finish_reason"]] if choices[0].get("finish_reason") else []
        else:
            found += [event] if event else []
    return found


ALL = ["·"] * 4


@pytest.mark.parametrize(
    ("fault", "streamed", "plain"),
    [
        ("", ("whole", 200, [*ALL, "length", "data: [DONE]"]), ("whole", 200, ["length"])),
        ("refuse", ("whole", 503, ["The engine is cu"]), ("whole", 503, ["The engine is cu"])),
        ("status:500", ("whole", 500, ["Simulated error "]), ("whole", 500, ["Simulated error "])),
        ("garbage", ("unavailable 502", 0, []), ("unavailable 502", 0, [])),
        ("break:0", ("broke cut", 200, []), ("unavailable 502", 0, [])),
        ("break:2", ("broke cut", 200, ["·", "·"]), ("unavailable 502", 0, [])),
        ("break:4", ("broke cut", 200, [*ALL, "length"]), ("unavailable 502", 0, [])),
        ("cut:2", ("broke cut", 200, ["·", "·"]), ("unavailable 502", 0, [])),
        ("error:0", ("whole", 200, ["error", "data: [DONE]"]), ("whole", 500, ["EngineCore encou"])),
        ("error:3", ("whole", 200, ["·", "·", "·", "error", "data: [DONE]"]), ("whole", 500, ["EngineCore encou"])),
        ("abort:2", ("whole", 200, ["·", "·", "abort", "data: [DONE]"]), ("whole", 200, ["abort"])),
        ("abort:0", ("whole", 200, ["data: [DONE]"]), ("whole", 200, ["abort"])),
        ("close", ("whole", 200, [*ALL, "length", "data: [DONE]"]), ("whole", 200, ["length"])),
        ("delay:0.01,first:0.01", ("whole", 200, [*ALL, "length", "data: [DONE]"]), ("whole", 200, ["length"])),
    ],
)
async def test_faults(
    simulator: Simulator, fault: str, streamed: tuple[str, int, list[str]], plain: tuple[str, int, list[str]]
) -> None:
    assert await outcome(simulator, fault, stream=True) == streamed
    assert await outcome(simulator, fault) == plain
    await until(lambda: simulator.running == 0)


@pytest.mark.parametrize(
    ("fault", "stream", "expected"),
    [
        ("hang", True, ("unavailable 504", 0, [])),
        ("hang", False, ("unavailable 504", 0, [])),
        ("hang-after:0", True, ("silent", 200, [])),
        ("hang-after:2", True, ("silent", 200, ["·", "·"])),
        ("hang-after:2", False, ("unavailable 504", 0, [])),
        ("delay:3600", True, ("unavailable 504", 0, [])),
        ("first:3600", True, ("silent", 200, [])),
    ],
)
async def test_silence(simulator: Simulator, fault: str, stream: bool, expected: tuple[str, int, list[str]]) -> None:
    how, _, events = expected
    head = PATIENCE if how == "silent" else 0.05
    assert await outcome(simulator, fault, head=head, quiet_after=len(events), stream=stream) == expected
    await until(lambda: simulator.running == 0 and not simulator.connections)


async def test_comments_fill_the_silence(simulator: Simulator) -> None:
    how, _, events = await outcome(simulator, "first:0.05,keepalive:0.01", stream=True)
    assert how == "whole"
    assert events[0] == ": keep-alive" and events[-6:] == [*ALL, "length", "data: [DONE]"]
    assert events.count(": keep-alive") >= 3


async def test_no_usage_anywhere(simulator: Simulator) -> None:
    assert (await outcome(simulator, "", stream=True, **USAGE))[2][-2:] == ["usage", "data: [DONE]"]
    assert (await outcome(simulator, "nousage", stream=True, **USAGE))[2] == [*ALL, "length", "data: [DONE]"]
    body = json.dumps(CHAT).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\ncontent-type: application/json\r\nx-sim-fault: nousage\r\ncontent-length: %d\r\n\r\n"
    answer = await raw_request(simulator.port, head % len(body) + body)  # type: ignore[attr-defined]
    assert json.loads(answer.body)["usage"] is None


async def test_the_error_inside_a_stream_byte_for_byte(simulator: Simulator) -> None:
    """The one object that vLLM writes with blanks; [DONE] follows, and a proper end."""
    body = json.dumps(CHAT | {"stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\ncontent-type: application/json\r\nx-sim-fault: error:0\r\ncontent-length: %d\r\n\r\n"
    answer = await raw_request(simulator.port, head % len(body) + body)  # type: ignore[attr-defined]
    said = (
        b'data: {"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause.", '
        b'"type": "InternalServerError", "param": null, "code": 500}}\n\n'
    )
    assert answer.chunks == [said, b"data: [DONE]\n\n", b""]
    assert len(answer.chunks[0]) == 0xA9


async def test_what_was_made_before_a_fault_is_counted(simulator: Simulator) -> None:
    for fault in ("break:2", "cut:2", "error:2", "abort:2"):
        await outcome(simulator, fault, stream=True)
    assert simulator.generation_tokens_total == 4 * 2
    assert simulator.prompt_tokens_total == 4 * 9
    assert simulator.engine.finished == {"error": 1, "abort": 1}


async def test_faults_may_be_changed_while_it_runs_and_queued_for_the_next(simulator: Simulator) -> None:
    simulator.faults = parse_fault("status:429")
    simulator.next_faults.extend([Faults(), parse_fault("garbage")])
    assert [(await outcome(simulator, ""))[:2] for _ in range(4)] == [
        ("whole", 200),
        ("unavailable 502", 0),
        ("whole", 429),
        ("whole", 429),
    ]
    simulator.faults = Faults()
    assert (await outcome(simulator, ""))[:2] == ("whole", 200)


async def test_the_header_is_laid_over_the_simulators_own(simulator: Simulator) -> None:
    simulator.faults = parse_fault("abort:3")
    assert (await outcome(simulator, "cut:1", stream=True))[2] == ["·"]
    assert (await outcome(simulator, "abort:1", stream=True))[2] == ["·", "abort", "data: [DONE]"]


async def test_a_wrong_header_is_told_so(simulator: Simulator) -> None:
    assert (await outcome(simulator, "explode"))[1] == 400


async def test_what_is_not_a_post_stays_well(simulator: Simulator) -> None:
    simulator.faults = parse_fault("hang")
    answer = await raw_request(simulator.port, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")  # type: ignore[attr-defined]
    assert answer.status == 200


def test_faults_are_parsed_and_added_up() -> None:
    assert parse_faults(["break:3, delay:0.5", "nousage"]) == Faults(break_after=3, delay=0.5, nousage=True)
    assert parse_fault("refuse") == Faults(status=503)
    assert parse_fault("") == Faults()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("explode", "there is no fault 'explode'; there are refuse, status:CODE, garbage, hang, "),
        ("break", "the fault 'break' is written break:N: resets the connection after N events"),
        ("break:-1", "is written break:N"),
        ("break:x", "is written break:N"),
        ("status:200", "is written status:CODE"),
        ("delay:nan", "is written delay:S"),
        ("refuse:now", "the fault 'refuse:now' is written refuse"),
    ],
)
def test_a_wrong_fault_is_explained_in_a_sentence(spec: str, said: str) -> None:
    with pytest.raises(ValueError, match=r".+") as error:
        parse_fault(spec)
    assert said in str(error.value)


def test_every_fault_is_described() -> None:
    assert len(describe().splitlines()) == 14


async def test_a_hang_ends_with_its_client(simulator: Simulator) -> None:
    task = asyncio.ensure_future(outcome(simulator, "hang"))
    await until(lambda: simulator.requests)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not simulator.connections)
