"""How much there is in a JSON text, before objects are made of it: passes over bytes alone, some milliseconds a megabyte.

A text of millions of empty values is small to send, and takes seconds to decode, while which everybody else waits. The
texts are JSON already: what is none gives some number too. Grammar of strings: RFC 8259, section 7.
"""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Final

BLANKS: Final = b" \t\r\n"


def strings(text: bytes) -> int:
    """How many strings there are, names included."""
    text = text.replace(b"\\\\", b"")
    return (text.count(b'"') - text.count(b'\\"')) // 2


def structure(text: bytes) -> bytes:
    """The text without blanks and strings. Takes memory for each string: look at their number first."""
    text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(text.split(b'"')[::2]).translate(None, BLANKS)


MARKS: Final = b"{}[],"
_OTHER_BYTES: Final = bytes(byte for byte in range(256) if byte not in MARKS)
_ASCII: Final = bytes(range(128))
_INDENT: Final = 4
_DEEPER: Final = bytes.maketrans(MARKS, bytes([2, 0, 2, 0, 1]))
"""By how many levels a mark goes deeper, and one more: bytes are not negative."""
_EXPONENT: Final = re.compile(rb"[0-9][eE]")
_EXPONENT_GROWTH: Final = 14
"""`1e15` becomes 1000000000000000.0; numbers from 1e16 on, and those below 0.0001, keep an exponent."""


def marks(text: bytes) -> bytes:
    """Brackets and commas alone, in their order."""
    return structure(text).translate(None, _OTHER_BYTES)


def growth(text: bytes, marked: bytes) -> int:
    """Bytes by which this JSON grows at most if it is read and written anew, as engines and chat templates do.

    By Python's json: one value a line with `_INDENT` blanks a level (Llama 3.1's template writes tools so), or one line with
    a blank after each comma and colon; characters beyond ASCII as \\u escapes (2 bytes to 6, 3 to 6, 4 to 12). What is
    JSON inside a string, as a tool call's arguments are, gets one line. `marked`: the text's `marks`.
    """
    count = len(marked)
    levels = sum(accumulate(marked.translate(_DEEPER))) - count * (count + 1) // 2
    lines = _INDENT * levels + count
    blanks = text.count(b",") - marked.count(b",") + text.count(b":")
    escapes = 0 if text.isascii() else 2 * len(text.translate(None, _ASCII))
    return lines + blanks + escapes + _EXPONENT_GROWTH * len(_EXPONENT.findall(text))
