"""How many bytes a text has: as it is, and as a tokenizer may have it that normalizes first.

Vocabularies made by SentencePiece (XLM-RoBERTa's, T5's) rewrite compatibility characters by NFKC: ½ becomes 1⁄2, and U+FDFA's
3 bytes become 33 (https://unicode.org/faq/normalization.html). Joining characters again only makes a text shorter, so its
growth is at most that of each by itself.
"""

from __future__ import annotations

import re
import unicodedata
from itertools import chain
from typing import Final

_BLOCKS: Final = (range(0xA0, 0x3400), range(0xF900, 0x10000), range(0x1D100, 0x1F300))
"""Where characters that grow are; a test looks at all the others."""


def utf8(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def normalized(character: str) -> int:
    """Bytes by which one character grows; none where it shrinks."""
    return max(0, utf8(unicodedata.normalize("NFKC", character)) - utf8(character))


GROWING: Final = {
    character: more
    for code in chain(*_BLOCKS)
    if (more := normalized(character := chr(code))) and not character.isascii()
}
_GROWING: Final = re.compile(f"[{''.join(GROWING)}]")


WORST: Final = max(GROWING.values())
MOST: Final = 50_000
"""So many are looked up, each takes a moment; what a text has more of counts as the worst."""


def growth(text: str) -> int:
    """Bytes by which normalization makes it longer at most. Linear, about 16 ns a character; nothing for ASCII."""
    if text.isascii():
        return 0
    more = 0
    for number, found in enumerate(_GROWING.finditer(text)):
        if number == MOST:
            return more + WORST * (len(text) - found.start())
        more += GROWING[found[0]]
    return more


_ESCAPE: Final = re.compile(rb"\\u([0-9a-fA-F]{4})")


def json_growth(raw: bytes) -> int:
    """The same of JSON, whose characters may stand there as escapes."""
    escapes = raw.count(b"\\u")
    if escapes > MOST:
        more = WORST * escapes
    else:
        more = sum(GROWING.get(chr(int(code, 16)), 0) for code in _ESCAPE.findall(raw))
    return more if raw.isascii() else more + growth(raw.decode())
