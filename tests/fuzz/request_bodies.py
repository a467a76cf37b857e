"""Bodies that coverage leads to (https://github.com/google/atheris): each is a call of which all holds, or a refusal in words.

    python -m tests.fuzz.request_bodies DIRECTORY [-max_total_time=60] [-runs=100000]

DIRECTORY gets what was found on the way; the recorded prompts are put there first. The first byte says the endpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["engine_adapter"]):
    from engine_adapter.request import ENDPOINTS

from tests.engine_adapter.test_request_fuzz import called, holds

NAMES = list(ENDPOINTS.values())
RECORDED = Path(__file__).parent.parent / "engine_adapter" / "wire" / "prompts.jsonl"


def one(data: bytes) -> None:
    if data and (call := called(NAMES[data[0] % len(NAMES)], data[1:])):
        holds(call)


def seed(directory: Path) -> None:
    for number, line in enumerate(RECORDED.read_text(encoding="utf-8").splitlines()):
        recorded = json.loads(line)
        body = json.dumps(recorded["body"]).encode()
        directory.joinpath(f"recorded-{number}").write_bytes(bytes([NAMES.index(recorded["endpoint"])]) + body)


if __name__ == "__main__":
    seed(Path(sys.argv[1]))
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
