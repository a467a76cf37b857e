"""How much text was said, for where the engine gives no figures. Costs time linear in the text."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from engine_adapter.json_size import strings, structure

BYTES_PER_TOKEN: Final = 4
"""Where there is nothing but text: about four characters of English make a token
(https://help.openai.com/en/articles/4936856-what-are-tokens-and-how-to-count-them)."""

MOST_VALUES: Final = 100_000
"""Values that are looked at one by one. Of more, the size of their JSON is weighed: a worker's answer must not hold
everybody else up."""

_NOT_SAID: Final = frozenset(
    {
        "id", "type", "role", "index", "status", "phase", "finish_reason", "stop_reason", "logprobs",
        "call_id", "item_id", "tool_use_id", "signature", "encrypted_content",
    }
)  # fmt: skip
"""Members whose strings are not the model's words."""

_WRITTEN: Final = frozenset({"input", "arguments"})
"""Members that the model wrote as JSON, so that their names and signs are its words too."""


def tokens_of_text(size: int) -> int:
    """Tokens in `size` bytes of text, rounded up."""
    return -(-size // BYTES_PER_TOKEN)


def bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def bytes_said(text: bytes) -> int:
    """UTF-8 bytes of all strings in a JSON value that may be the model's words."""
    if has_many_values(text):
        return len(text)
    try:
        return sum(map(bytes_of, words(msgspec.json.decode(text))))
    except RecursionError:
        return len(text)


def has_many_values(text: bytes) -> bool:
    if len(text) <= MOST_VALUES:
        return False
    return strings(text) > MOST_VALUES or structure(text).count(b",") > MOST_VALUES


def words(value: Any) -> list[str]:
    """All strings in it that may be the model's words. A list of what is left, no recursion: the depth is the sender's."""
    found: list[str] = []
    left: list[Any] = [value]
    while left:
        match left.pop():
            case str() as text:
                found.append(text)
            case dict() as members:
                left += [_word(name, member) for name, member in members.items() if name not in _NOT_SAID]
            case list() as items:
                left += items
            case _:
                pass
    return found


def _word(name: str, member: Any) -> Any:
    return msgspec.json.encode(member).decode() if name in _WRITTEN and isinstance(member, dict | list) else member
