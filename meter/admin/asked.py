"""What a request asks: its body, query, preconditions and cursor, each checked, each mistake named."""

from __future__ import annotations

import base64
import binascii
import re
from datetime import UTC, datetime
from typing import Annotated, TypeVar

import msgspec
from aiohttp import web
from pydantic import Field
from pydantic_core import from_json

from meter.admin.answers import Refusal
from meter.callers.edits import read
from meter.callers.tiers import Terms

MAX_BODY = 4 * 1024 * 1024
ETAGS = re.compile(r'\s*(?:W/)?"[^"]*"\s*(?:,\s*(?:W/)?"[^"]*"\s*)*')
STRONG = re.compile(r'(?<!W/)"(\d{1,18})"')

Query = TypeVar("Query", bound=Terms)


class Page(Terms):
    """Which part of a list."""

    page_size: Annotated[int, Field(ge=1, le=1_000)] = 100
    cursor: Annotated[str, Field(max_length=1_000)] | None = None


async def body(request: web.Request) -> dict[str, object]:
    """The JSON object that was sent; its fields are for a model to judge."""
    try:
        values = from_json(await request.read())
    except ValueError as error:
        raise Refusal(400, "invalid_json", f"The body is not JSON: {error}.") from None
    if not isinstance(values, dict):
        raise Refusal(400, "invalid_body", "The body must be a JSON object.")
    return values


def query(request: web.Request, model: type[Query]) -> Query:
    """The query's parameters; unknown ones are mistakes, doubled ones are one list with commas. Raises Invalid."""
    return read(model, {name: ",".join(request.query.getall(name)) for name in set(request.query)})


def name_of(request: web.Request, part: str = "id") -> str:
    """A part of the path. No name has a NUL, and Postgres takes none."""
    name = request.match_info[part]
    if "\x00" in name:
        raise Refusal(404, "not_found", "There is nothing of that name.")
    return name


def expected(request: web.Request) -> frozenset[int] | None:
    """The versions of If-Match; None: `*`, whatever stands there. Weak tags never match (RFC 9110, 13.1.1)."""
    said = request.headers.get("If-Match")
    if said is None:
        message = "This changes something: read it first, and send its ETag as If-Match."
        raise Refusal(428, "precondition_required", message, param="If-Match")
    if said.strip() == "*":
        return None
    if not ETAGS.fullmatch(said):
        raise Refusal(400, "invalid_header", 'If-Match must be an ETag such as "7".', param="If-Match")
    return frozenset(int(version) for version in STRONG.findall(said))


def makes_anew(request: web.Request) -> bool:
    """Whether a PUT says `If-None-Match: *`: it makes what is not there yet."""
    said = request.headers.get("If-None-Match")
    if said is None:
        return False
    if said.strip() != "*" or "If-Match" in request.headers:
        message = "Send either If-Match with an ETag, or If-None-Match: * to make something new."
        raise Refusal(400, "invalid_header", message, param="If-None-Match")
    return True


def cursor_of(list_name: str, *position: str | int) -> str:
    """Where a list goes on; opaque to clients, good for this list only."""
    return base64.urlsafe_b64encode(msgspec.json.encode([list_name, *position])).rstrip(b"=").decode()


def moment_in(text: str) -> datetime:
    """A moment of a cursor, in UTC. ValueError: it is none, has no zone, or no calendar has it."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError("a moment needs a time zone")
    try:
        return moment.astimezone(UTC)
    except OverflowError as error:
        raise ValueError(str(error)) from error


def not_of_this_list() -> Refusal:
    """The answer to a cursor that no page of this list gave."""
    return Refusal(400, "invalid_cursor", "The cursor is not of this list; begin without one.", param="cursor")


def position(list_name: str, cursor: str | None) -> list[str | int] | None:
    """What `cursor_of` was given; None: from the beginning."""
    if cursor is None:
        return None
    try:
        padded = cursor.encode() + b"=" * (-len(cursor) % 4)
        parts = msgspec.json.decode(base64.b64decode(padded, altchars=b"-_", validate=True), type=list[str | int])
    except (ValueError, binascii.Error, msgspec.DecodeError):
        parts = []
    if len(parts) < 2 or parts[0] != list_name:
        raise not_of_this_list()
    return parts[1:]
