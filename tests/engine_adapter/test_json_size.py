"""How much there is in a JSON text, and how much it may become."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.json_size import growth, marks, strings, structure
from tests.engine_adapter.calls import json_values
from tests.engine_adapter.test_prompt_bound import WRITERS, Writer

untimed = settings(deadline=None)
"""What a property takes depends on the machine: the run's own time limit is enough."""

numerals = st.from_regex(r"-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?", fullmatch=True)
leaves = numerals | st.sampled_from(["null", "true", "1e15", "-1E15", "0.1e16", "1e-4", '""', '"\\u00e9"'])
leaves |= st.text(max_size=5).map(lambda text: json.dumps(text, ensure_ascii=False))
texts = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4).map(lambda values: f"[{','.join(values)}]")
        | st.dictionaries(leaves.filter(lambda text: text[0] == '"'), inner, max_size=4).map(
            lambda members: f"{{{','.join(f'{name}:{value}' for name, value in members.items())}}}"
        )
    ),
    max_leaves=20,
)


@untimed
@given(texts, st.sampled_from(WRITERS))
def test_what_is_written_anew_is_no_longer_than_foreseen(text: str, write: Writer) -> None:
    raw = text.encode()
    assert len(write(json.loads(raw)).encode()) <= len(raw) + growth(raw, marks(raw))


@untimed
@given(texts, st.sampled_from(WRITERS[:3]))
def test_so_is_what_stood_in_a_string(text: str, write: Writer) -> None:
    """A tool call's arguments: JSON in a string of JSON, without it afterwards."""
    raw = json.dumps(text, ensure_ascii=False).encode()
    assert len(write(json.loads(json.loads(raw))).encode()) <= len(raw) + growth(raw, marks(raw))


@untimed
@given(json_values, st.booleans(), st.sampled_from([None, 3]))
def test_strings_and_structure_are_told_apart(value: Any, ascii_only: bool, indent: int | None) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    found: list[str] = []

    def seen(inner: Any) -> int:
        """Strings in a value."""
        if isinstance(inner, str):
            found.append(inner)
        elif isinstance(inner, dict):
            found.extend(inner)
        for each in inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ():
            seen(each)
        return len(found)

    assert strings(raw) == seen(value)
    left = structure(raw)
    assert b'"' not in left
    assert set(marks(raw)) <= set(b"{}[],")
    assert left.count(b"{") == left.count(b"}")


@pytest.mark.parametrize(
    ("text", "more"),
    [
        (b"1", 0),
        (b'"a,b:c"', 2),
        (b"[1,2]", len(b"[\n    1,\n    2\n]") - 5),
        (b'"\xc3\xa9"', 4),
        (b"1e15", 14),
        (b'[[{"a":[1]}]]', 4 * (1 + 2 + 3 + 4 + 3 + 2 + 1 + 0) + 8 + 1),
    ],
)
def test_how_much_a_text_grows_at_most(text: bytes, more: int) -> None:
    assert growth(text, marks(text)) == more
