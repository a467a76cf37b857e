"""Members of a JSON text, changed where they stand: whatever else is in it goes on byte for byte, and is not read again.

A quoted name that stands in a text only once is a member of that name: within a string its quotes would be escaped.
Where it stands several times, the objects on the way to it are written anew from their members.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from engine_adapter.body import NULL, Members, write_object


def rename_model(text: bytes, model: str | None, name: str, within: str | None = None) -> bytes:
    """`text`, a JSON object whose `model` is `model`, with `name` there instead; `within` its member that has it."""
    if model is None or model == name:
        return text
    at = only(text, b'"model"')
    if at >= 0:
        compact = b'"model":' + msgspec.json.encode(model)
        if text.startswith(compact, at):
            return b"".join((text[: at + 8], msgspec.json.encode(name), text[at + len(compact) :]))
        if member := _MODEL_MEMBER.match(text, at):
            return b"".join((text[: member.start(1)], msgspec.json.encode(name), text[member.end() :]))
    members = read_members(text)
    if within is None:
        return write_object(members | {"model": msgspec.json.encode(name)})
    inner = read_members(members[within]) | {"model": msgspec.json.encode(name)}
    return write_object(members | {within: write_object(inner)})


def without_usage(text: bytes) -> bytes:
    """`text`, a JSON object, without its top-level `usage`: cut out where it stands, or else written anew without."""
    at = only(text, b'"usage"')
    if at > 0 and text[at - 1] == _COMMA and (end := _usage_end(text, at)) > 0:
        return text[: at - 1] + text[end:]
    members = read_members(text)
    members.pop("usage", None)
    return write_object(members)


def nulled(text: bytes, name: bytes, value: msgspec.Raw) -> bytes | None:
    """`text` with null for the only value of that (quoted) name, which is `value`. None where it is not that simple."""
    at = only(text, name)
    stop = at + len(name)
    written = b":%b" % value
    if at <= 0 or text[at - 1] not in _BEFORE_NAMES or not text.startswith(written, stop):
        return None
    return b"%b:null%b" % (text[:stop], text[stop + len(written) :])


def nulled_in_choices(text: bytes, names: tuple[str, ...]) -> bytes:
    """The same for several names, at the top level and in each of the `choices`: written anew from their members."""
    members = read_members(text)
    if "choices" in members:
        choices = _READ_ITEMS.decode(members["choices"]) or []
        members["choices"] = msgspec.Raw(b"[%b]" % b",".join(_nulled(each, names) for each in choices))
    return write_object(_null(members, names))


def only(text: bytes, quoted: bytes) -> int:
    """Where it stands if it stands there once, else -1."""
    at = text.find(quoted)
    return at if at >= 0 and text.find(quoted, at + len(quoted)) < 0 else -1


def read_members(text: bytes | msgspec.Raw) -> Members:
    """Of what was seen to be a JSON object."""
    return _READ_MEMBERS.decode(text)


def _nulled(item: msgspec.Raw, names: tuple[str, ...]) -> bytes | msgspec.Raw:
    return write_object(_null(read_members(item), names)) if bytes(memoryview(item)[:1]) == b"{" else item


def _null(members: Members, names: tuple[str, ...]) -> Members:
    return members | {name: NULL for name in names if name in members}


def _usage_end(text: bytes, at: int) -> int:
    """Where the member's object ends; -1 if it is deeper than figures and their details."""
    end = text.find(b"}", at) + 1
    flat = text.startswith(b'"usage":{', at) and text.count(b"{", at, end) == 1
    if flat and text.count(b'"', at, end) % 2 == 0 and text.find(b"\\", at, end) < 0:  # so the brace is in no string
        return end
    member = _USAGE_MEMBER.match(text, at)
    return member.end() if member else -1


_READ_MEMBERS = msgspec.json.Decoder(Members)
_READ_ITEMS = msgspec.json.Decoder(list[msgspec.Raw] | None)

_COMMA: Final = ord(",")
_BEFORE_NAMES: Final = b"{, \t\r\n"
_STRING: Final = rb'"(?:[^"\\]|\\.)*+"'
_MODEL_MEMBER = re.compile(rb'"model"\s*:\s*(' + _STRING + rb")")
_DETAILS: Final = rb'\{(?:[^{}"]++|' + _STRING + rb")*+\}"
_USAGE_MEMBER = re.compile(rb'"usage"\s*:\s*\{(?:[^{}"]++|' + _STRING + rb"|" + _DETAILS + rb")*+\}")
"""A usage object with figures and, one level down, their details."""
