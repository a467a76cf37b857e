"""JSON objects of which some members have odd types: what has the right type is taken, nothing else is believed."""

from __future__ import annotations

from functools import cache
from typing import Any, Final, TypeVar, get_args

import msgspec

Shape = TypeVar("Shape", bound=msgspec.Struct)


NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What is raised for bytes that are no JSON text, or one that is nested too deeply."""


def check_utf8(text: bytes) -> None:
    """msgspec does not look into strings that it passes over. Raises UnicodeDecodeError."""
    if not text.isascii():
        text.decode()


def read_object(shape: type[Shape], text: bytes) -> tuple[Shape | None, bool]:
    """As much of a `shape` as there is, None if it is no object, and whether all of it had the right types.

    Raises one of NOT_JSON.
    """
    check_utf8(text)
    try:
        return _strict(shape).decode(text), True
    except msgspec.ValidationError:
        return read_parts(shape, text), False


def read_parts(shape: type[Shape], text: bytes | msgspec.Raw) -> Shape | None:
    """As much of a `shape` as there is in a JSON text; None if it is no object. The shapes decide how deep it goes.

    Raises msgspec.DecodeError for what is not JSON. Members that the shape does not name are passed over, however many.
    """
    reader, kinds = _unread(shape)
    try:
        members = reader.decode(text)
    except msgspec.ValidationError:
        return None
    parts = {name: _read_part(kind, value) for name, kind in kinds if (value := getattr(members, name)) is not _ABSENT}
    return shape(**{name: part for name, part in parts.items() if part is not None})


def _read_part(kind: Any, value: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.ValidationError:
        return next((read_parts(each, value) for each in get_args(kind) if _is_shape(each)), None)


@cache
def _strict(shape: type[Shape]) -> msgspec.json.Decoder[Shape]:
    return msgspec.json.Decoder(shape)


@cache
def _unread(shape: type[msgspec.Struct]) -> tuple[msgspec.json.Decoder[Any], list[tuple[str, Any]]]:
    """A reader of the shape's members that leaves each as its bytes, and what each has to be."""
    kinds = [(field.name, field.type) for field in msgspec.structs.fields(shape)]
    raw = msgspec.defstruct(f"_Unread{shape.__name__}", [(name, msgspec.Raw, _ABSENT) for name, _ in kinds])
    return msgspec.json.Decoder(raw), kinds


def _is_shape(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


_ABSENT: Final = msgspec.Raw()
