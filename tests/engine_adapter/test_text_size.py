"""How many bytes a text has, before and after normalization."""

from __future__ import annotations

import json
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.text_size import GROWING, MOST, WORST, growth, json_growth, normalized, utf8


@pytest.mark.parametrize(
    ("text", "more"),
    [("", 0), ("plain", 0), ("北京，你好", 0), ("é", 0), ("½", 3), ("\ufdfa", 30), ("a\ufdfa½\ufdfa", 63)],
)
def test_a_text_grows_by_its_compatibility_characters(text: str, more: int) -> None:
    assert growth(text) == more


def test_no_other_character_grows() -> None:
    codes = (code for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000)
    assert {chr(code) for code in codes if normalized(chr(code))} == GROWING.keys()


texts = st.text() | st.text(st.sampled_from([*GROWING, "a", "\u0301", "\u0323", "\u0654"]))


@given(texts, st.booleans())
def test_what_stands_in_json_grows_as_it_would_by_itself(text: str, escaped: bool) -> None:
    raw = json.dumps({"x": text}, ensure_ascii=escaped).encode()
    assert json_growth(raw) == sum(map(growth, text if not escaped else [c for c in text if c < "\U00010000"]))


@given(texts)
def test_a_normalized_text_is_no_longer_than_foreseen(text: str) -> None:
    assert len(unicodedata.normalize("NFKC", text).encode()) <= utf8(text) + growth(text)


@pytest.mark.parametrize(("character", "more"), [("½", 3), ("\ufdfa", 30)])
def test_more_of_them_than_any_text_has_count_as_the_worst(character: str, more: int) -> None:
    assert growth(character * MOST) == more * MOST
    assert growth(character * MOST + "a" + character) == more * MOST + WORST
    assert growth(character * MOST + character + "a") == more * MOST + 2 * WORST
    escape = b"\\u%04x" % ord(character)
    assert json_growth(escape * MOST) == more * MOST
    assert json_growth(escape * (MOST + 1)) == WORST * (MOST + 1)
