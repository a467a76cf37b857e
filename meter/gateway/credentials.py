"""What a caller's head and body say before anything is believed: credentials, tags, the body within its limits."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

from aiohttp import web
from multidict import CIMultiDictProxy

from meter.callers.caller import UnknownKey
from meter.gateway import replies

BODY_SECONDS = 30.0
"""A body must be complete this long after its head; 8 MB then need 2.2 Mbit/s."""

MAX_TAGS, MAX_TAG_LENGTH = 8, 64
_BEARER = re.compile(r"bearer +(\S+) *", re.IGNORECASE)
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def presented(headers: CIMultiDictProxy[str]) -> str:
    """The one key that was sent, wherever it was; two different ones are refused, so that none is used by accident."""
    found: set[str] = {*headers.getall("x-api-key", ()), *headers.getall("api-key", ())}
    for value in headers.getall("authorization", ()):
        match = _BEARER.fullmatch(value)
        found.add(match[1] if match else "")
    if not found or found == {""}:
        raise UnknownKey("missing")
    if len(found) > 1:
        raise UnknownKey("ambiguous")
    return found.pop()


def client_request_id(headers: CIMultiDictProxy[str]) -> str | None:
    """The caller's own id, echoed and recorded; None when it is not short and printable."""
    value = headers.get("x-request-id")
    return value if value is not None and _REQUEST_ID.fullmatch(value) else None


def tags(headers: CIMultiDictProxy[str], of_key: Mapping[str, str]) -> dict[str, str]:
    """`x-weir-tags: team=a,feature=b` over the key's own tags."""
    value = headers.get("x-weir-tags")
    if value is None:
        return dict(of_key)
    pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
    said = {name.strip(): text.strip() for name, _, text in pairs}
    wrong = any(not sign or not name.strip() for name, sign, _ in pairs) or len(said) > MAX_TAGS or not _is_text(value)
    if wrong or any(len(text) > MAX_TAG_LENGTH for pair in said.items() for text in pair):
        raise replies.bad_request(
            f"x-weir-tags must be up to {MAX_TAGS} pairs name=value, separated by commas, each at most"
            f" {MAX_TAG_LENGTH} characters.",
            "x-weir-tags",
        )
    return {**of_key, **said}


def _is_text(value: str) -> bool:
    """Bytes that are no UTF-8 come as lone surrogates."""
    return value.isprintable()


def refuses_overage(headers: CIMultiDictProxy[str]) -> bool:
    """`x-weir-on-overage: reject`; the header may only be stricter than the policy."""
    value = headers.get("x-weir-on-overage")
    if value is None:
        return False
    if value.lower() not in {"reject", "overflow"}:
        raise replies.bad_request("x-weir-on-overage must be reject or overflow.", "x-weir-on-overage")
    return value.lower() == "reject"


async def read_body(http: web.BaseRequest, limit: int) -> bytes:
    """The whole body, at most `limit` bytes, within `BODY_SECONDS`."""
    if http.headers.get("content-encoding", "identity").lower() != "identity":
        raise replies.bad_request(
            "A compressed body is not taken: send it plain, without Content-Encoding.", status=415
        )
    if (http.content_length or 0) > limit:
        raise replies.too_large(limit)
    if http.headers.get("expect", "").lower() == "100-continue" and http.transport is not None:
        http.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    pieces, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while piece := await http.content.readany():
                pieces.append(piece)
                size += len(piece)
                if size > limit:
                    raise replies.too_large(limit)
    except TimeoutError:
        raise replies.too_slow() from None
    except web.RequestPayloadError as broken:
        raise replies.bad_request(f"The body's framing is broken: {broken}.") from None
    return b"".join(pieces)
