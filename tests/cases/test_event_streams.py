"""Reading event streams: every legal way to write one is read, and passed on as it came."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.cases.house import House, streamed
from tests.cases.stub import CUT, DONE, FIN, USE, Call, Pause, Step, T, event, stream

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_data_lines_without_the_blank_are_read(house: House) -> None:
    """T017"""
    key = await house.key()
    events = [data.replace(b"data: ", b"data:") for data in (T("a"), T("b"), FIN, USE(6, 2), DONE)]
    house.u1.does(stream(*events))
    reply = await house.post(key, streamed())
    assert reply.body == b"".join([*events[:3], events[4]])
    assert await house.used(key) == 8


async def test_crlf_line_ends_are_read_and_held_back_by_nobody(house: House) -> None:
    """T018: the second event is sent only when the client has the first."""
    key = await house.key()
    arrived = asyncio.Event()
    first, *rest = (data.replace(b"\n", b"\r\n") for data in (T("a"), T("b"), FIN, USE(6, 5), DONE))
    house.u1.does(stream(first, arrived, *rest))
    async with house.posted(key, streamed()) as client:
        await client.start()
        assert await client.event() == first
        arrived.set()
        reply = await client.reply()
    assert reply.complete
    assert reply.events[-1] == "[DONE]"
    assert await house.used(key) == 11


async def test_comments_are_never_data(house: House) -> None:
    """T019"""
    key = await house.key()
    pings: list[Step] = [b": ping\n\n", Pause(0.2)] * 3
    house.u1.does(stream(*pings, T("a"), b":\n\n", T("b"), FIN, USE(3, 2), DONE))
    reply = await house.post(key, streamed())
    assert reply.events == [data.decode()[6:-2] for data in (T("a"), T("b"), FIN, DONE)]
    assert await house.used(key) == 5


async def test_a_character_cut_by_the_network_stays_whole(house: House) -> None:
    """T020"""
    key = await house.key()
    whole = T("北京 😀 é")
    han, face = whole.index("北".encode()) + 1, whole.index("😀".encode()) + 2
    pieces: list[Step] = [whole[:han], Pause(0.05), whole[han:face], Pause(0.05), whole[face:]]
    house.u1.does(stream(*pieces, FIN, DONE), stream(whole, FIN, DONE))
    cut, uncut = [await house.post(key, streamed()) for _ in range(2)]
    assert cut.body == uncut.body == whole + FIN + DONE
    first, second = await house.rows(key, 2)
    assert first["completion_tokens"] == second["completion_tokens"] > 0


async def test_one_very_long_data_line_is_passed_on(house: House) -> None:
    """T021"""
    key = await house.key()
    long = T("x" * 200_000)
    house.u1.does(stream(long, FIN, USE(5, 50_000), DONE))
    reply = await house.post(key, streamed(max_tokens=60_000))
    assert reply.body == long + FIN + DONE
    assert await house.used(key) == 50_005


async def test_an_event_of_several_data_lines_is_one_event(house: House) -> None:
    """T022"""
    key = await house.key()
    lines = json.dumps(json.loads(USE(6, 4)[6:]), indent=1).split("\n")
    lines = ["".join(lines[:3]), "".join(lines[3:5]), "".join(lines[5:])]
    split = b"".join(b"data: " + line.encode() + b"\n" for line in lines) + b"\n"
    house.u1.does(stream(T("a"), FIN, split, DONE))
    reply = await house.post(key, streamed())
    assert reply.events[-1] == "[DONE]"
    assert await house.used(key) == 10


async def test_other_fields_and_a_byte_order_mark_are_passed_over(house: House) -> None:
    """T023"""
    key = await house.key()
    dressed = b"\xef\xbb\xbfevent: message\nid: 7\n" + T("a")[:-1] + b"retry: 10\n\n"
    odd = b"data\n\n"
    last = b"retry: 10\nevent: message\n" + FIN
    house.u1.does(stream(dressed, odd, last, USE(3, 1), DONE))
    reply = await house.post(key, streamed())
    assert reply.body == dressed + odd + last + DONE
    assert await house.used(key) == 4


async def test_one_broken_line_stops_neither_relay_nor_metering(house: House) -> None:
    """T024"""
    key = await house.key()
    logged = len(house.proxy.log())
    broken = b'data: {"choices":[{"delta":{"content":"b"\n\n'
    house.u1.does(stream(T("a"), broken, T("c"), FIN, USE(4, 3), DONE))
    reply = await house.post(key, streamed())
    assert reply.body == T("a") + broken + T("c") + FIN + DONE
    assert await house.used(key) == 7
    lines = house.proxy.log()[logged:].replace(" ", "")
    assert lines.count('"level":"warning"') + lines.count('"level":"error"') <= 1


@pytest.mark.parametrize("end", [b"\n", b""], ids=["one line end", "none"])
async def test_a_last_event_without_its_blank_line_counts(house: House, end: bytes) -> None:
    """T025"""
    key = await house.key()
    unfinished = USE(9, 1).rstrip(b"\n") + end
    house.u1.does(stream(T("a"), FIN, unfinished))
    reply = await house.post(key, streamed(stream_options={"include_usage": True}))
    assert reply.complete
    assert reply.body.rstrip(b"\n") == (T("a") + FIN + unfinished).rstrip(b"\n")
    assert await house.used(key) == 10


async def test_a_finished_answer_without_done_is_complete(house: House) -> None:
    """T026"""
    key = await house.key()
    house.u1.does(stream(T("a"), FIN, USE(9, 1)))
    reply = await house.post(key, streamed())
    assert reply.complete
    assert reply.body.startswith(T("a") + FIN)
    assert "error" not in reply.body.decode()
    row = await house.row(key)
    assert row["ending"] == "completed"
    assert await house.used(key) == 10


async def test_events_reach_the_client_one_by_one(house: House) -> None:
    """T083: each event is sent only when the client has the one before."""
    key = await house.key()
    turns = [asyncio.Event() for _ in range(5)]

    async def script(call: Call) -> None:
        await call.open_stream()
        for number, turn in enumerate(turns):
            await call.chunk(T(str(number)))
            await turn.wait()
        for last in (FIN, USE(5, 5), DONE):
            await call.chunk(last)
        await call.finish()

    house.u1.does(script)
    async with house.posted(key, streamed(), headers=[("Accept-Encoding", "gzip")]) as client:
        head = await client.start()
        for number, turn in enumerate(turns):
            assert await client.event() == T(str(number))
            turn.set()
        assert (await client.reply()).complete
    assert (head.get("content-type") or "").startswith("text/event-stream")
    assert "no-cache" in (head.get("cache-control") or "")
    assert head.get("x-accel-buffering") == "no"
    assert head.get("content-encoding") is None


async def test_an_event_in_a_stream_cut_short_is_not_invented(house: House) -> None:
    key = await house.key()
    house.u1.does(stream(T("a"), event({"half": 1})[:8], CUT))
    reply = await house.post(key, streamed())
    assert "[DONE]" not in reply.events
