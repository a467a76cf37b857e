"""Answers that come compressed although the worker was asked for plain ones."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.coding import AT_ONCE, Decoder
from engine_adapter.errors import EngineBroke, EngineUnavailable
from engine_adapter.http1 import Answer, Origin, Workers
from tests.engine_adapter.raw_worker import PATIENCE, Line, RawWorker, always

untimed = settings(deadline=None)

Compress = Callable[[bytes], bytes]


def bare(data: bytes) -> bytes:
    return zlib.compress(data, wbits=-15)


CODINGS: list[tuple[bytes, Compress]] = [
    (b"gzip", gzip.compress),
    (b"X-GZIP", gzip.compress),
    (b"deflate", zlib.compress),
    (b"deflate", bare),
]


@pytest.fixture
async def workers() -> Any:
    made = Workers()
    yield made
    await made.close()


async def ask(workers: Workers, origin: Origin) -> Answer:
    return await workers.open(
        origin, method=b"POST", path="/x", headers=[], body=b"{}", connect_seconds=PATIENCE, head_seconds=PATIENCE
    )


def plain(coding: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Encoding: %b\r\nContent-Length: %d\r\n\r\n%b" % (coding, len(body), body)


@pytest.mark.parametrize(("coding", "compress"), CODINGS)
async def test_a_compressed_answer_is_read_as_what_it_says(workers: Workers, coding: bytes, compress: Compress) -> None:
    """T070."""
    body = b'{"usage":{"prompt_tokens":9,"completion_tokens":4}}' * 1000
    async with RawWorker(always(plain(coding, compress(body)))) as worker:
        for _ in range(2):
            async with await ask(workers, worker.origin) as answer:
                assert (answer.headers, answer.length) == ([], None)
                assert await answer.read_all(PATIENCE, 1 << 20) == body
        assert worker.connections == 1


@pytest.mark.parametrize(("coding", "wbits"), [(b"gzip", 31), (b"deflate", 15), (b"deflate", -15)])
async def test_events_of_a_compressed_stream_come_as_they_are_sent(workers: Workers, coding: bytes, wbits: int) -> None:
    """T070."""
    go = asyncio.Event()
    events = [b'data: {"n":%d}\n\n' % number for number in range(5)]

    async def script(line: Line) -> None:
        await line.request()
        await line.say(b"HTTP/1.1 200 OK\r\nContent-Encoding: %b\r\nTransfer-Encoding: chunked\r\n\r\n" % coding)
        compressor = zlib.compressobj(wbits=wbits)
        for event in events:
            await go.wait()
            go.clear()
            piece = compressor.compress(event) + compressor.flush(zlib.Z_SYNC_FLUSH)
            await line.say(b"%x\r\n%b\r\n" % (len(piece), piece))
        end = compressor.flush()
        await line.say(b"%x\r\n%b\r\n0\r\n\r\n" % (len(end), end))

    async with RawWorker(script) as worker, await ask(workers, worker.origin) as answer:
        for event in events:
            go.set()
            came = b""
            while len(came) < len(event):
                came += await answer.read(PATIENCE)
            assert came == event
        assert await answer.read(PATIENCE) == b""


async def test_a_small_answer_that_stands_for_a_large_one_is_decoded_in_steps(workers: Workers) -> None:
    size = 40 * AT_ONCE
    async with RawWorker(always(plain(b"gzip", gzip.compress(bytes(size))))) as worker:
        async with await ask(workers, worker.origin) as answer:
            sizes = []
            while piece := await answer.read(PATIENCE):
                sizes.append(len(piece))
        assert (sum(sizes), max(sizes)) == (size, AT_ONCE)
        async with await ask(workers, worker.origin) as answer:
            with pytest.raises(EngineBroke, match="larger than 1000000 bytes"):
                await answer.read_all(PATIENCE, 1_000_000)


@pytest.mark.parametrize("coding", [b"br", b"zstd", b"gzip, br", b"gzip\r\nContent-Encoding: gzip"])
async def test_an_unknown_coding_is_an_error_before_anything_is_passed_on(workers: Workers, coding: bytes) -> None:
    async with RawWorker(always(plain(coding, b"xyz"))) as worker:
        with pytest.raises(EngineUnavailable, match=r"content coding .* is not known"):
            await ask(workers, worker.origin)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"plain text", "cannot be decompressed"),
        (gzip.compress(b"hello")[:-3], "ends too early"),
        (b"\x1f", "ends too early"),
        (gzip.compress(b"hello") + b"garbage", "cannot be decompressed"),
    ],
    ids=["plain", "cut", "first byte", "more"],
)
async def test_a_body_that_is_not_what_its_label_says_is_broken(workers: Workers, body: bytes, message: str) -> None:
    async with RawWorker(always(plain(b"gzip", body))) as worker, await ask(workers, worker.origin) as answer:
        with pytest.raises(EngineBroke, match=message):
            await answer.read_all(PATIENCE, 1 << 20)


@pytest.mark.parametrize("coding", [b"identity", b"gzip", b"deflate"])
async def test_an_empty_answer_needs_no_decoding(workers: Workers, coding: bytes) -> None:
    body = b"" if coding != b"gzip" else gzip.compress(b"")
    async with RawWorker(always(plain(coding, body))) as worker, await ask(workers, worker.origin) as answer:
        assert await answer.read_all(PATIENCE, 10) == b""


@untimed
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4), st.integers(1, 50), st.sampled_from([True, False]))
def test_however_it_is_cut_it_decodes_to_the_same(members: list[bytes], cut: int, is_gzip: bool) -> None:
    coded = b"".join(map(gzip.compress, members)) if is_gzip else zlib.compress(b"".join(members))
    decoder, out = Decoder(is_gzip), b""
    for at in range(0, len(coded), cut):
        left: bytes | None = coded[at : at + cut]
        while left is not None:
            decoded, left = decoder.step(left)
            out += decoded
    assert (out, decoder.finished) == (b"".join(members), True)
