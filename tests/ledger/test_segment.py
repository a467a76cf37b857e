"""The journal's file format under truncation, flipped bits and garbage."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meter.ledger.segment import (
    HEADER_BYTES,
    MARK,
    MAX_PAYLOAD,
    Damage,
    Frame,
    Kind,
    NotASegment,
    Segment,
    frame,
    frames,
    write,
)

ENTRIES = st.lists(
    st.tuples(st.sampled_from(Kind), st.binary(min_size=16, max_size=16), st.binary(max_size=200) | st.just(MARK * 3)),
    max_size=8,
)
Entry = tuple[Kind, bytes, bytes]


def entries(items: list[Frame | Damage]) -> list[Entry]:
    return [(Kind(item.kind), item.exchange_id, item.payload) for item in items if isinstance(item, Frame)]


def read(data: bytes) -> list[Frame | Damage]:
    return list(frames(data, final=True))


def joined(written: list[Entry]) -> bytes:
    return b"".join(frame(*entry) for entry in written)


@given(ENTRIES)
def test_what_is_written_is_read(written: list[Entry]) -> None:
    found = read(joined(written))
    assert entries(found) == written
    assert not any(isinstance(item, Damage) for item in found)


@given(ENTRIES, st.data())
def test_a_torn_tail_costs_only_the_entry_it_tears(written: list[Entry], data: st.DataObject) -> None:
    whole = joined(written)
    cut = data.draw(st.integers(0, len(whole)))
    found = read(whole[:cut])
    complete = [entry for position, entry in enumerate(written) if len(joined(written[: position + 1])) <= cut]
    assert entries(found) == complete
    kept = len(joined(complete))
    assert [item for item in found if isinstance(item, Damage)] == ([Damage(kept, cut)] if kept < cut else [])


@given(ENTRIES.filter(bool), st.data())
def test_a_flipped_bit_costs_only_the_entry_it_hits(written: list[Entry], data: st.DataObject) -> None:
    whole = bytearray(joined(written))
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit // 8] ^= 1 << bit % 8
    hit = next(position for position in range(len(written)) if len(joined(written[: position + 1])) > bit // 8)
    found = read(bytes(whole))
    assert entries(found) == written[:hit] + written[hit + 1 :]
    assert any(isinstance(item, Damage) for item in found)


@given(ENTRIES, ENTRIES, st.binary(min_size=1, max_size=100))
def test_garbage_between_entries_is_passed_over(before: list[Entry], after: list[Entry], garbage: bytes) -> None:
    found = read(joined(before) + garbage + joined(after))
    assert entries(found) == before + after
    damaged = sum(item.end - item.start for item in found if isinstance(item, Damage))
    assert damaged == len(garbage)


@given(ENTRIES, st.binary(max_size=60), st.data())
def test_reading_in_parts_is_reading_at_once(written: list[Entry], garbage: bytes, data: st.DataObject) -> None:
    whole = joined(written) + garbage + joined(written)
    at, found = 0, []
    for window in sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5))):
        for item in frames(whole[at:window], final=False, base=at):
            found.append(item)
            at = item.end
    found += frames(whole[at:], final=True, base=at)
    assert entries(found) == written * 2
    assert sum(item.end - item.start for item in found if isinstance(item, Damage)) == len(garbage)


def test_entries_larger_than_a_window_of_the_file_are_read(tmp_path: Path) -> None:
    segment, descriptor = Segment.create(tmp_path / "000001.journal")
    written = [(Kind.FINISHED, UUID(int=n).bytes, bytes([n]) * (MAX_PAYLOAD - n)) for n in range(5)]
    write(descriptor, joined(written), HEADER_BYTES)
    found = Segment.open(segment.path)
    assert entries(list(found.read(HEADER_BYTES, found.size))) == written


def test_an_entry_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="larger than the journal takes"):
        frame(Kind.FINISHED, bytes(16), bytes(MAX_PAYLOAD + 1))


def test_the_position_is_kept_in_the_file(tmp_path: Path) -> None:
    segment, _ = Segment.create(tmp_path / "000001.journal")
    segment.move_to(12_345)
    assert Segment.open(segment.path).position == 12_345


@pytest.mark.parametrize("content", [b"", b"WEIR", b"WEIRJNL\x00" + bytes(8), b"garbage" * 10])
def test_a_file_of_another_version_is_told_apart(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "000001.journal"
    path.write_bytes(content)
    with pytest.raises(NotASegment, match="is no journal segment of version 1"):
        Segment.open(path)
