"""A JSON body's top level, read in one pass: each value stays the bytes it came in. Standard: RFC 8259.

vLLM coerces types and lets the last of doubled keys win, so the few values that are looked at are read strictly here: what
was checked is then what the engine obeys.
"""

from __future__ import annotations

from typing import Final

import msgspec

from engine_adapter.json_size import strings

Members = dict[str, msgspec.Raw]

LARGEST: Final = 2**53
"""Whole numbers above this are not exact in every JSON reader (RFC 8259, section 6)."""

MOST_STRINGS: Final = 100_000
"""Names and texts in one body. Each is an object in this process, so a body of millions of empty ones would hold everybody
else up for seconds; real bodies have some thousands."""

TRUE, FALSE, NULL = msgspec.Raw(b"true"), msgspec.Raw(b"false"), msgspec.Raw(b"null")


class BadRequest(Exception):
    """The body is not what the endpoint takes (400 `invalid_request_error`). `param` names the field, if it is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


_READ_MEMBERS = msgspec.json.Decoder(Members)
_READ_STRING = msgspec.json.Decoder(str)


def read_object(raw: bytes) -> Members:
    """The top level of a body. msgspec checks the grammar all the way down (no NaN, no trailing bytes), UTF-8 is checked
    here. Of doubled keys the last is kept, as every engine does. Raises BadRequest, whatever the bytes."""
    if not raw:
        raise BadRequest("The body is empty: send a JSON object.")
    if raw.count(b'"') > 2 * MOST_STRINGS and strings(raw) > MOST_STRINGS:
        raise BadRequest(f"The body has more than {MOST_STRINGS} strings: send fewer of them, or several requests.")
    try:
        if not raw.isascii():
            raw.decode()
        return _READ_MEMBERS.decode(raw)
    except UnicodeDecodeError as error:
        raise BadRequest(f"The body is not valid UTF-8 (byte {error.start}).") from None
    except RecursionError:
        raise BadRequest("The body is nested too deeply.") from None
    except msgspec.ValidationError:
        raise BadRequest("The body must be a JSON object.") from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error}.") from None


def write_object(members: dict[str, msgspec.Raw] | dict[str, bytes] | dict[str, msgspec.Raw | bytes]) -> bytes:
    """A JSON object of these members, each value as it is."""
    pieces: list[bytes | msgspec.Raw] = []
    for name, value in members.items():
        pieces += (b"," if pieces else b"{", msgspec.json.encode(name), b":", value)
    return b"".join((*pieces, b"}" if pieces else b"{}"))


# ---- one value -------------------------------------------------------------------------------------------------------


def given(members: Members, name: str) -> bool:
    """Present and not null: null means "not set" to every engine."""
    return members.get(name, NULL) != NULL


def first(value: msgspec.Raw) -> bytes:
    """The first byte: what kind of value it is."""
    return bytes(memoryview(value)[:1])


def flag(members: Members, name: str, path: str = "") -> bool:
    value = members.get(name, NULL)
    if value == TRUE:
        return True
    if value in (FALSE, NULL):
        return False
    raise BadRequest(f"{path}{name} must be true or false.", path + name)


def whole(members: Members, name: str, least: int = 1, path: str = "") -> int | None:
    """A whole number of at least `least`, written as one; None where it is not given."""
    if not given(members, name):
        return None
    text = bytes(members[name])
    digits = text.removeprefix(b"-") if least < 0 else text
    if digits.isdigit() and len(digits) <= 16 and least <= (number := int(text)) <= LARGEST:
        return number
    raise BadRequest(f"{path}{name} must be a whole number, at least {least}.", path + name)


def text(members: Members, name: str, must_be: str) -> str:
    """A string that is not empty. `must_be`: the words of the refusal."""
    try:
        value = _READ_STRING.decode(members[name])
    except (KeyError, msgspec.ValidationError):
        value = ""
    if not value:
        raise BadRequest(f"{name} must be {must_be}.", name)
    return value


def object_of(members: Members, name: str) -> Members:
    """An object's own members; none where it is not given."""
    if not given(members, name):
        return {}
    try:
        return _READ_MEMBERS.decode(members[name])
    except msgspec.ValidationError:
        raise BadRequest(f"{name} must be an object.", name) from None
