"""The simulated model's tokens: a word is a token, and what comes next depends on the word before alone.

So sizes can be told by eye, any text turns back into the tokens it came from, and a reply that was cut goes on the same
way when its text so far is sent along. Pure.
"""

from __future__ import annotations

import re
from zlib import crc32

_LANDSCAPE = """
river weir water stone mill wheel bank reed trout heron bridge meadow willow spring brook pool stream current
gate channel level flood rain cloud hill valley path field barn fence lane village tower clock market bread
honey apple orchard summer autumn winter evening morning light shadow wind leaf root seed grain harvest wagon
horse rider letter story song lantern harbour island
"""
WORDS = _LANDSCAPE.split()

_TOKEN = re.compile(r"\s*\S+(?:\s+$)?|\s+$")
_PLACE = {word: place for place, word in enumerate(WORDS)}
_FIRST_WORD_ID = 1_000
_FIRST_OTHER_ID = 2_000
_TEMPLATE = {"<|im_start|>": 1, "<|im_end|>": 2, "\n": 3}
_TEMPLATE_TEXTS = {number: token for token, number in _TEMPLATE.items()}
_REMEMBERED = 65_536


def count(text: str) -> int:
    """Tokens of a text: its words; text of nothing but blanks is one."""
    return len(text.split()) or (1 if text else 0)


def split(text: str) -> list[str]:
    """The tokens of a text, each with the blanks before it; joined they are the text again."""
    return _TOKEN.findall(text)


class Vocabulary:
    """Ids of tokens and back. A word of WORDS has the same id everywhere; others are remembered, the latest 65,536."""

    def __init__(self) -> None:
        self._seen: dict[int, str] = {}

    def ids(self, tokens: list[str]) -> list[int]:
        return [self._id(token) for token in tokens]

    def text(self, ids: list[int]) -> str:
        """Unknown ids are no text, as in vLLM."""
        return "".join(self._text(number) for number in ids)

    def _id(self, token: str) -> int:
        if token in _TEMPLATE:
            return _TEMPLATE[token]
        if token[:1] == " " and token[1:] in _PLACE:
            return _FIRST_WORD_ID + _PLACE[token[1:]]
        number = _FIRST_OTHER_ID + crc32(token.encode("utf-8", "surrogatepass"))
        self._seen[number] = token
        if len(self._seen) > _REMEMBERED:
            del self._seen[next(iter(self._seen))]
        return number

    def _text(self, number: int) -> str:
        place = number - _FIRST_WORD_ID
        if 0 <= place < len(WORDS):
            return " " + WORDS[place]
        return _TEMPLATE_TEXTS.get(number) or self._seen.get(number, "")


def word_id(place: int) -> int:
    """The id of the word at `place` of WORDS."""
    return _FIRST_WORD_ID + place


def place_after(text: str) -> int:
    """Where in WORDS a reply begins that follows `text`."""
    last = text.rsplit(None, 1)[-1] if text.strip() else text
    if last in _PLACE:
        return (_PLACE[last] + 1) % len(WORDS)
    return crc32(text.encode("utf-8", "surrogatepass")) % len(WORDS)


def place_after_id(number: int) -> int:
    """The same after a token id."""
    return (number - _FIRST_WORD_ID + 1) % len(WORDS)
