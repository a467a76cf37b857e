"""A process that writes is killed; its successor has everything that it said was through."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from meter.ledger.journal import Journal


@pytest.mark.parametrize("lines", [9, 200, 1_003])
def test_kill_9_loses_nothing_that_was_through(tmp_path: Path, lines: int) -> None:
    directory = tmp_path / "journal"
    successor = Journal(directory, fsync_seconds=0.1, max_bytes=1 << 28)
    successor.start()
    with subprocess.Popen(
        [sys.executable, "-m", "tests.ledger.writer", str(directory)], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        said = [writer.stdout.readline() for _ in range(lines)]
        assert successor.adopt() == (0, [])  # it lives
        writer.kill()
        said += writer.stdout.readlines()
        writer.wait()
    through = {
        word: {line.split()[1].decode() for line in said if line.startswith(word) and line.endswith(b"\n")}
        for word in (b"opened", b"finished")
    }
    adopted = successor.adopt()
    unfinished = {str(each.record.exchange_id) for each in adopted.unfinished}
    records = []
    while batch := successor.read(500):
        records += batch.records
        successor.shipped(batch)
    finished = {str(each.exchange_id) for each in records}
    assert len(finished) == len(records) == adopted.records
    assert through[b"finished"] <= finished
    assert through[b"opened"] <= finished | unfinished
    assert not finished & unfinished
    assert successor.damaged <= 1  # the entry at which it was hit
    successor.stop()
