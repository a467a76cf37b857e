"""What the journal says to those who ask what was used, and what it tells a successor."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from meter.ledger.journal import Journal
from tests.ledger.samples import opened, record


def journal_in(directory: Path, **terms: float) -> Journal:
    journal = Journal(directory, fsync_seconds=0.05, max_bytes=1 << 26, **terms)
    journal.start()
    return journal


def ship(journal: Journal, rows: int) -> None:
    batch = journal.read(rows)
    assert batch is not None
    journal.shipped(batch)


def test_what_is_finished_waits_until_it_is_shipped(journal: Journal) -> None:
    written = [record(prompt_tokens=number) for number in range(10)]
    for each in written:
        journal.finished(each)
    assert journal.waiting(0) == written
    ship(journal, 4)
    assert journal.waiting(0) == written[4:]
    ship(journal, 100)
    assert journal.waiting(0) == []


def test_only_what_ended_since_is_told(journal: Journal) -> None:
    noon = datetime(2026, 3, 14, 12, tzinfo=UTC)
    long = record(started_at=noon - timedelta(minutes=10), duration_ms=900_000)
    old = record(started_at=noon - timedelta(minutes=10), duration_ms=1_000)
    for each in (old, long):
        journal.finished(each)
    assert journal.waiting(noon.timestamp()) == [long]


def test_what_has_begun_runs_until_it_is_finished(journal: Journal) -> None:
    first, second = opened(), opened()
    for each in (first, second):
        journal.opened(each)
    journal.finished(first.record)
    assert journal.running() == [second.record]


def test_what_an_ended_process_finished_is_waiting_at_its_successors_too(tmp_path: Path) -> None:
    before = journal_in(tmp_path)
    written = [record() for _ in range(3)]
    for each in written:
        before.finished(each)
    ship(before, 1)
    before.stop()
    successor = journal_in(tmp_path)
    successor.adopt()
    assert successor.waiting(0) == written[1:]
    successor.stop()


def test_what_it_finished_lately_is_told_once_shipped_or_not(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    before = journal_in(tmp_path)
    late, old = record(started_at=now), record(started_at=now - timedelta(hours=1))
    for each in (old, late):
        before.finished(each)
    ship(before, 1)
    before.stop()
    successor = journal_in(tmp_path, lately=600)
    successor.adopt()
    assert successor.left() == ([late], [])
    assert successor.left() == ([], [])
    successor.stop()


def test_a_note_is_found_by_whoever_adopts_and_only_the_last_one(tmp_path: Path) -> None:
    before = journal_in(tmp_path)
    for note in (b"first", b"last"):
        before.leave(note)
    before.stop()
    successor = journal_in(tmp_path)
    successor.adopt()
    assert successor.left().notes == [b"last"]
    successor.adopt()
    assert successor.left().notes == []
    successor.stop()
    assert list(tmp_path.iterdir()) == []


def test_an_empty_note_is_none(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    journal.leave(b"something")
    journal.leave(b"")
    journal.stop()
    assert list(tmp_path.iterdir()) == []
