"""The journal of one process, and what its successor makes of it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meter.ledger.journal import Journal, JournalBroken, JournalFull
from meter.ledger.record import Advanced, UsageRecord
from meter.ledger.segment import HEADER_BYTES
from tests.ledger.samples import NOON, opened, record


@contextmanager
def running(directory: Path, **terms: Any) -> Iterator[Journal]:
    journal = Journal(directory, **({"fsync_seconds": 0.05, "max_bytes": 1 << 26} | terms))
    journal.start()
    try:
        yield journal
    finally:
        journal.stop()


def ship_all(journal: Journal, rows: int = 100) -> list[UsageRecord]:
    shipped = []
    while batch := journal.read(rows):
        shipped += batch.records
        journal.shipped(batch)
    return shipped


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*.journal"))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def test_finished_records_come_back_in_order_until_they_are_shipped(journal: Journal) -> None:
    written = [record(prompt_tokens=number) for number in range(250)]
    for each in written:
        journal.finished(each)
    assert journal.backlog_rows == 250
    first = journal.read(100)
    assert first is not None
    assert first == journal.read(100)
    assert first.records == written[:100]
    assert ship_all(journal) == written
    assert journal.backlog_rows == 0
    assert journal.read(100) is None


def test_a_record_comes_back_as_it_was(journal: Journal) -> None:
    full = record(
        attempt=2, team_id="search", tags={"a": "ä", "b": "😀"}, reason="rate", streamed=True, cached_prompt_tokens=3,
        reasoning_tokens=2, engine_prompt_tokens=18, engine_completion_tokens=10**18, expected_tokens=50, ceiling_tokens=60,
        finish_reason="stop", started_at=NOON.replace(microsecond=123_456), first_token_ms=7, duration_ms=900,
        price_id=4, cost_nanousd=2**62,
    )  # fmt: skip
    journal.finished(full)
    assert ship_all(journal) == [full]


def test_text_and_numbers_that_no_file_takes_are_cleaned(journal: Journal) -> None:
    journal.finished(record(reason="a\ud800b", tags={"\udfff": "x"}, prompt_tokens=10**30))
    [kept] = ship_all(journal)
    assert (kept.reason, kept.tags, kept.prompt_tokens) == ("a?b", {"?": "x"}, 2**63 - 1)


def test_a_stopped_journal_leaves_nothing_where_all_is_shipped(directory: Path) -> None:
    with running(directory) as journal:
        begun = opened()
        journal.opened(begun)
        journal.finished(begun.record)
        ship_all(journal)
    assert list(directory.iterdir()) == []


def test_what_was_not_shipped_is_shipped_by_the_successor_once(directory: Path) -> None:
    written = [record() for _ in range(30)]
    with running(directory) as journal:
        for each in written:
            journal.finished(each)
        batch = journal.read(10)
        assert batch is not None
        journal.shipped(batch)
    with running(directory) as successor:
        assert successor.adopt() == (20, [])
        assert successor.backlog_rows == 20
        ages = [successor.oldest_at]
        assert ship_all(successor) == written[10:]
        ages.append(successor.oldest_at)
    assert ages == [NOON.timestamp(), None]
    assert list(directory.iterdir()) == []


def test_a_living_process_keeps_its_journal(directory: Path) -> None:
    with running(directory) as living, running(directory) as other:
        living.opened(opened())
        living.finished(record())
        assert other.adopt() == (0, [])
        assert living.backlog_rows == 1


def test_what_was_open_is_handed_out_with_what_was_known(directory: Path) -> None:
    silent, streaming, over = opened(), opened(), opened()
    with running(directory) as journal:
        for each in (silent, streaming, over):
            journal.opened(each)
        for tokens in (1, 2, 3):
            journal.advanced(
                Advanced(
                    exchange_id=streaming.record.exchange_id,
                    prompt_tokens=9,
                    completion_tokens=tokens * 256,
                    engine_prompt_tokens=18,
                    duration_ms=tokens * 1_000,
                )
            )
        journal.finished(over.record)
    with running(directory) as successor:
        adopted = successor.adopt()
        counted = msgspec.structs.replace(
            streaming.record,
            prompt_tokens=9,
            completion_tokens=768,
            engine_prompt_tokens=18,
            engine_completion_tokens=768,
            usage_source="counted",
            duration_ms=3_000,
        )
        assert {each.record.exchange_id: each for each in adopted.unfinished} == {
            silent.record.exchange_id: silent,
            streaming.record.exchange_id: msgspec.structs.replace(streaming, record=counted),
        }
        assert adopted.records == 1


def test_an_unfinished_exchange_is_handed_out_until_somebody_booked_it(directory: Path) -> None:
    begun = opened()
    with running(directory) as journal:
        journal.opened(begun)
    for _ in range(3):
        with running(directory) as successor:
            assert successor.adopt().unfinished == [begun]
    with running(directory) as successor:
        for each in successor.adopt().unfinished:
            successor.finished(each.record)
        assert ship_all(successor) == [begun.record]
    with running(directory) as successor:
        assert successor.adopt() == (0, [])


def test_segments_go_once_shipped_and_what_is_open_in_them_is_carried_over(directory: Path) -> None:
    begun = opened()
    with running(directory, segment_bytes=4_096) as journal:
        journal.opened(begun)
        journal.advanced(Advanced(exchange_id=begun.record.exchange_id, prompt_tokens=9, completion_tokens=5))
        for _ in range(100):
            journal.finished(record())
        assert len(segments(directory)) > 5
        size = sum(path.stat().st_size for path in segments(directory))
        assert journal.bytes == size
        ship_all(journal)
        assert len(segments(directory)) == 1
        assert journal.bytes == segments(directory)[0].stat().st_size < size
    with running(directory) as successor:
        [unfinished] = successor.adopt().unfinished
        assert unfinished.record.exchange_id == begun.record.exchange_id
        assert unfinished.record.completion_tokens == 5


def test_directories_take_turns(directory: Path) -> None:
    with running(directory) as dead:
        for _ in range(50):
            dead.finished(record(key_id="old"))
    with running(directory) as journal:
        journal.adopt()
        for _ in range(50):
            journal.finished(record(key_id="new"))
        seen = [each.key_id for each in ship_all(journal, rows=10)]
    assert seen[:40].count("new") == 20


def test_a_full_journal_opens_nothing_more_but_finishes_what_is_open(directory: Path) -> None:
    with running(directory, max_bytes=64 * 1024) as journal:
        begun = []
        with pytest.raises(
            JournalFull, match=r"has reached its limit of 65536 bytes with 0 records .* check the database"
        ):
            while True:
                each = opened(tags={"why": "x" * 500})
                journal.opened(each)
                begun.append(each)
        assert journal.full
        with pytest.raises(JournalFull):
            journal.finished(record())
        for each in begun:
            journal.finished(each.record)
        assert journal.backlog_rows == len(begun) > 5
        assert len(ship_all(journal)) == len(begun)
        journal.opened(opened())
        assert not journal.full


def test_a_long_life_within_a_small_limit(directory: Path) -> None:
    with running(directory, max_bytes=64 * 1024) as journal:
        for _ in range(500):
            begun = opened()
            journal.opened(begun)
            journal.finished(begun.record)
            ship_all(journal)
        assert journal.bytes < 64 * 1024


def test_a_full_disk_refuses_the_new_and_is_forgotten_when_there_is_room(directory: Path) -> None:
    with running(directory, fsync_seconds=60) as journal:
        begun = opened()
        journal.opened(begun)
        with disk_full(journal):
            with pytest.raises(JournalFull, match=r"The disk of the journal .* is full: free some space on it"):
                journal.opened(opened())
            with pytest.raises(JournalFull, match="free some space"):
                journal.finished(begun.record)
            journal.advanced(Advanced(exchange_id=begun.record.exchange_id, prompt_tokens=1, completion_tokens=1))
        assert journal.failures >= 2
        assert journal.full  # until the room that was given up is taken again
        journal.finished(begun.record)
        assert ship_all(journal) == [begun.record]


@pytest.mark.parametrize("fsync_seconds", [0, 60])
@pytest.mark.parametrize("taken", ["", "*", "*/*.journal", "*/lock"])
def test_a_directory_that_is_taken_away_is_made_anew_and_nothing_written_lately_is_lost(
    directory: Path, taken: str, fsync_seconds: float
) -> None:
    with running(directory, fsync_seconds=fsync_seconds) as journal:
        begun, written = opened(), [record() for _ in range(5)]
        journal.opened(begun)
        for each in written[:3]:
            journal.finished(each)
        take_away(directory, taken)
        for each in written[3:]:
            journal.finished(each)
        assert ship_all(journal) == written
        journal.opened(opened())
        assert (journal.damaged, journal.full) == (0, False)
        assert journal.bytes == sum(path.stat().st_size for path in segments(directory))
    with running(directory) as successor:
        assert begun in successor.adopt().unfinished


def test_a_directory_that_is_taken_away_is_noticed_without_a_request(directory: Path) -> None:
    with running(directory) as journal:
        journal.finished(record())
        shutil.rmtree(directory.rename(directory.with_name("taken")))  # at one moment, whatever the journal does now
        assert reached(lambda: segments(directory) and not journal.full)
        assert journal.backlog_rows == 1


def test_what_is_open_in_a_segment_that_was_taken_away_is_noted_anew(directory: Path) -> None:
    begun = opened()
    with running(directory, fsync_seconds=60, segment_bytes=4_096) as journal:
        journal.opened(begun)
        while len(segments(directory)) < 3:
            journal.finished(record())
        lost = sum(path.read_bytes().count(b"exchange_id") for path in segments(directory)[:2]) - 1
        written = journal.backlog_rows
        shutil.rmtree(directory.rename(directory.with_name("taken")))
        assert len(ship_all(journal)) == written - lost
        assert (journal.damaged, journal.backlog_rows, journal.oldest_at) == (2, 0, None)
    with running(directory) as successor:
        assert successor.adopt().unfinished == [begun]


def test_a_directory_that_cannot_be_made_anew_is_said_plainly_and_nothing_is_lost(directory: Path) -> None:
    with running(directory, segment_bytes=4_096) as journal:
        begun = [opened() for _ in range(30)]
        for each in begun:
            journal.opened(each)
        shutil.rmtree(directory.rename(directory.with_name("taken")))
        directory.write_text("no directory")
        assert reached(lambda: journal.full)
        with pytest.raises(JournalBroken, match=r"was taken away: check disk and rights"):
            journal.opened(opened())
        for each in begun:
            journal.finished(each.record)
        with pytest.raises(OSError, match="directory"):
            journal.read(100)
        assert journal.failures >= 1, "a flush may have failed besides"
        assert journal.backlog_rows == 30
        directory.unlink()
        assert reached(lambda: not journal.full)
        assert ship_all(journal) == [each.record for each in begun]


def test_a_place_that_is_no_directory_is_said_plainly(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalBroken, match=r"cannot be written .*: check disk and rights"):
        Journal(tmp_path / "file", fsync_seconds=0.1, max_bytes=1 << 20).start()


def test_every_entry_may_be_flushed_by_itself(directory: Path) -> None:
    with running(directory, fsync_seconds=0, segment_bytes=4_096) as journal:
        descriptors = len(list(Path("/dev/fd").iterdir()))
        written = [record() for _ in range(40)]
        for each in written:
            journal.finished(each)
        assert len(list(Path("/dev/fd").iterdir())) <= descriptors + 1
        assert ship_all(journal) == written


def test_files_of_another_version_are_set_aside_and_the_rest_goes_on(directory: Path) -> None:
    written = [record() for _ in range(40)]
    with running(directory, segment_bytes=4_096) as journal:
        for each in written:
            journal.finished(each)
    oldest = segments(directory)[0]
    lost = oldest.read_bytes().count(b"exchange_id")
    oldest.write_bytes(b"WEIRJNL\x00" + oldest.read_bytes()[8:])
    with running(directory) as successor:
        assert successor.adopt().records == 40 - lost
        assert ship_all(successor) == written[lost:]
        assert successor.damaged == 1
    assert [path.suffix for path in directory.iterdir()] == [".damaged"]


def test_a_lost_position_sends_everything_again(directory: Path) -> None:
    written = [record() for _ in range(10)]
    with running(directory) as journal:
        for each in written:
            journal.finished(each)
        batch = journal.read(5)
        assert batch is not None
        journal.shipped(batch)
    path = segments(directory)[0]
    path.write_bytes(path.read_bytes()[:8] + b"\x99" * 8 + path.read_bytes()[HEADER_BYTES:])
    with running(directory) as successor:
        assert successor.adopt().records == 10
        assert ship_all(successor) == written


def test_damage_while_it_runs_does_not_block_it(directory: Path) -> None:
    with running(directory) as journal:
        written = [record() for _ in range(3)]
        for each in written:
            journal.finished(each)
        path = segments(directory)[0]
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        assert ship_all(journal) == [written[0], written[2]]
        assert journal.backlog_rows == 0
        assert journal.damaged == 1


def test_a_file_that_is_gone_does_not_block_the_rest(directory: Path) -> None:
    written = [record() for _ in range(40)]
    with running(directory, segment_bytes=4_096) as journal:
        for each in written:
            journal.finished(each)
        gone = segments(directory)[0]
        lost = gone.read_bytes().count(b"exchange_id")
        gone.unlink()
        assert ship_all(journal) == written[lost:]
        assert (journal.backlog_rows, journal.damaged) == (0, 1)


def test_a_file_that_cannot_be_read_now_is_tried_again(directory: Path) -> None:
    with running(directory) as journal:
        journal.finished(record())
    [path] = segments(directory)
    kept = path.rename(directory / "kept")
    path.mkdir()
    with running(directory) as successor:
        assert successor.adopt() == (0, [])
        assert successor.failures == 1
        path.rmdir()
        kept.rename(path)
        assert successor.adopt() == (1, [])


def test_segments_in_which_something_is_open_go_even_at_the_limit(directory: Path) -> None:
    with running(directory, max_bytes=64 * 1024, segment_bytes=4_096) as journal:
        begun = opened()
        journal.opened(begun)
        while not journal.full:
            each = opened()
            journal.opened(each)
            journal.finished(each.record)
        ship_all(journal)
        assert len(segments(directory)) == 1
        assert journal.bytes < 16 * 1024
        journal.finished(begun.record)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(cut=st.integers(0, 10_000) | st.none(), flips=st.lists(st.integers(0, 80_000), max_size=3))
def test_whatever_happens_to_the_file_the_rest_is_read(tmp_path: Path, cut: int | None, flips: list[int]) -> None:
    directory = tmp_path / str(len(list(tmp_path.iterdir())))
    written = [record() for _ in range(20)]
    with running(directory) as journal:
        for each in written:
            journal.finished(each)
    path = segments(directory)[0]
    content = bytearray(path.read_bytes())
    for bit in flips:
        content[HEADER_BYTES + bit // 8 % (len(content) - HEADER_BYTES)] ^= 1 << bit % 8
    path.write_bytes(content[: max(cut, HEADER_BYTES)] if cut is not None else content)
    with running(directory) as successor:
        successor.adopt()
        found = ship_all(successor)
    assert [each for each in written if each in found] == found
    if cut is None:
        assert len(found) >= len(written) - len(flips)
    assert segments(directory) == []


def take_away(directory: Path, taken: str) -> None:
    """What the pattern finds in it; without one, all of it."""
    for path in directory.glob(taken) if taken else [directory]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def reached(look: Callable[[], object]) -> bool:
    """Whether it comes true within a deadline."""
    deadline = time.monotonic() + 20
    while not look() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(look())


@contextmanager
def disk_full(journal: Journal) -> Iterator[None]:
    """The journal's descriptor becomes that of a device on which the kernel finds no room."""
    written = journal._descriptor
    assert written is not None
    kept, full = os.dup(written), os.open("/dev/full", os.O_RDWR)
    os.dup2(full, written)
    try:
        yield
    finally:
        os.dup2(kept, written)
        os.close(kept)
        os.close(full)
