"""Streams and answers that coverage leads to (https://github.com/google/atheris): however they are cut, the same comes out, and
no byte is lost.

    python -m tests.fuzz.event_streams DIRECTORY [-max_total_time=60] [-runs=100000]

DIRECTORY gets what was found on the way; the recorded streams and their events are put there first. The first byte says the
endpoint, the second one how large the pieces are.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["engine_adapter"]):
    from engine_adapter.answers import NotAnAnswer, read_answer
    from engine_adapter.request import ENDPOINTS

from tests.engine_adapter.streams import WIRE
from tests.engine_adapter.test_events_dialects import KINDS, asked_for_all, endpoint_of, outcome

STREAMED: list[Any] = sorted(KINDS)
ANSWERED = list(ENDPOINTS.values())
CLIENT: dict[str, Any] = {"choices": 2, "rename": ("tiny", "mine")}


def one(data: bytes) -> None:
    if len(data) < 2:
        return
    endpoint, size, stream = STREAMED[data[0] % len(STREAMED)], data[1] % 17 + 1, data[2:]
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert outcome(endpoint, pieces, CLIENT) == outcome(endpoint, [stream], CLIENT)
    scan = asked_for_all(endpoint)
    out = scan.feed(stream) + scan.end()
    assert out == stream or (scan.error is not None and stream.startswith(out))
    scan = asked_for_all(endpoint)
    scan.feed(stream[: 4 * data[1]])
    scan.cut()
    with suppress(NotAnAnswer):
        read_answer(ANSWERED[data[0] % len(ANSWERED)], stream, prompt_estimate=1, rename=CLIENT["rename"])


def seed(directory: Path) -> None:
    for path in WIRE.glob("*.sse"):
        stream, endpoint = path.read_bytes(), bytes([STREAMED.index(endpoint_of(path.stem))])
        for number, part in enumerate([stream, *(event + b"\n\n" for event in stream.split(b"\n\n"))]):
            directory.joinpath(f"{path.stem}-{number}").write_bytes(endpoint + bytes([number % 256]) + part)


if __name__ == "__main__":
    seed(Path(sys.argv[1]))
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
