"""A parsed call: which model, how much it may cost, and the body to send on.

vLLM coerces types, lets the last of doubled keys win and decodes what it likes, so a body passed on unread would not be
the body that was checked. Here the top level is read in one pass, each value left as the bytes it came in; the few fields
that decide about cost are checked strictly; and the body is written anew from the same members. Standard: RFC 8259.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from engine_adapter.json_size import BLANKS, strings, structure

Endpoint = Literal["chat", "completions", "embeddings", "responses", "messages", "rerank", "score"]
Kind = Literal["vllm", "openai"]
Live = Literal["token_ids", "usage", "none"]
"""What running figures a chat or completions stream is asked for: `return_token_ids`, `continuous_usage_stats`, none. The
usage at its end is asked for in any case."""
Members = dict[str, msgspec.Raw]

ENDPOINTS: Final[dict[str, Endpoint]] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/rerank": "rerank",
    "/v1/score": "score",
}

LARGEST: Final = 2**53
"""Whole numbers above this are not exact in every JSON reader (RFC 8259, section 6)."""

MOST_STRINGS: Final = 100_000
"""Names and texts in one body. Each is an object in this process, so a body of millions of empty ones would hold everybody
else up for seconds; real bodies have some thousands."""

MOST_OBJECTS: Final = 50_000
"""Messages, and parts of them, for the same reason."""

READING: Final = ("embeddings", "rerank", "score")
"""Endpoints that generate nothing."""

COUNTED: Final = ("chat", "completions")
"""Endpoints whose streams have no figures unless asked; those of the others always have."""

LIMIT_FIELDS: Final = ("max_tokens", "max_completion_tokens")

DROPPED: Final = ("priority", "request_id")
"""Members that reach past the caller's own request: another's turn in the scheduler, the engine's name of the request.
They are left out of what is sent on."""

COST_UNKNOWN: Final = {
    "use_beam_search": "beam search makes more tokens than it reports, so it is not offered: leave use_beam_search out",
    "prompt_embeds": "the size of prompt_embeds cannot be known: send the prompt as text or token ids",
    "chat_template": "the size of a prompt written by the request's own template cannot be known: leave chat_template out",
    "previous_response_id": "the size of an earlier response cannot be known: send its messages instead",
}

PROMPT_FIELDS: Final = (
    "tools",
    "functions",
    "response_format",
    "documents",
    "chat_template_kwargs",
    "suffix",
    "reasoning_effort",
)
"""Members besides messages and prompt that enter the prompt, or may."""

MEDIA_FIELDS: Final = {"image_url": "images", "input_audio": "audios", "audio_url": "audios", "video_url": "videos"}
"""Members of a content part that hold a picture, sound or film: never text, however many bytes of base64. A part's type
may name one that is not there: vLLM then takes it from its cache, by the part's uuid."""


class BadRequest(Exception):
    """The body is not what the endpoint takes (400 `invalid_request_error`). `param` names the field, if it is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class PromptParts(msgspec.Struct):
    """What enters the prompt, in sizes. `token_ids` are exact tokens; the rest is for `prompt_size` to judge."""

    text_bytes: int = 0
    """UTF-8 bytes of all text, names and ids in messages or prompts, and `json_bytes`"""
    json_bytes: int = 0
    """bytes of tools, schemas, tool calls and the like, as JSON: a template may write them with other blanks"""
    messages: int = 0
    texts: int = 0
    """prompts given as text, without a chat template"""
    token_ids: int = 0
    tools: bool = False
    images: int = 0
    audios: int = 0
    videos: int = 0
    only_text: bool = True
    """no content has a part of any other kind"""
    source: msgspec.Raw = msgspec.Raw()
    """the messages or prompts themselves"""

    def read(self) -> Iterator[str]:
        """The texts again, piece by piece, for a tokenizer; not what is JSON."""
        if self.messages:
            yield from _texts_of(_READ_OBJECTS.decode(self.source), PromptParts())
        elif self.texts:
            yield from _prompts(self.source, "prompt")


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request for tokens, checked. `members` are the body's own top-level values, byte for byte, in their order."""

    endpoint: Endpoint
    model: str
    stream: bool
    wants_usage: bool
    """the client asked for a stream's usage"""
    wants_live_usage: bool
    """… and for running figures in every event (vLLM gives these only together)"""
    wants_token_ids: bool
    """… and for the ids of the prompt's and the answer's tokens"""
    prompts: int
    choices: int
    """answers per prompt the engine may work on: the larger of n and best_of"""
    asked_output: int | None
    """tokens per answer: the larger of the limits sent (vLLM obeys one of them), None without"""
    prompt: PromptParts
    members: Members

    @property
    def generates(self) -> bool:
        """False where a prompt is only read: embeddings, rerank, score."""
        return self.endpoint not in READING

    def body(
        self, *, model: str, output_limit: int | None, kind: Kind, live: Live = "usage", salt: str | None = None
    ) -> bytes:
        """The body for a backend: this model's name there, at most `output_limit` tokens per answer, usage asked for.

        Changed are only `model`, the limits, on streams what makes the backend count, and `cache_salt`; DROPPED members
        are left out. Every other value is sent as it came, in its place. `live` and `salt` are for vLLM alone.
        """
        changed: dict[str, bytes] = {"model": msgspec.json.encode(model)}
        if output_limit is not None:
            changed.update(self._limits(output_limit))
        if self.stream and self.endpoint in COUNTED:
            changed.update(self._counting(kind, live))
        if salt is not None and kind == "vllm":
            changed["cache_salt"] = self._salt(salt)
        members = {name: value for name, value in self.members.items() if name not in DROPPED} | changed
        return write_object(members)

    def _limits(self, limit: int) -> dict[str, bytes]:
        sent = [name for name in LIMIT_FIELDS if _given(self.members, name)]
        if not sent or self.endpoint == "completions":
            # completions knows no max_completion_tokens: alone, it would be passed over
            sent.append("max_tokens")
        return dict.fromkeys(sent, b"%d" % limit)

    def _counting(self, kind: Kind, live: Live) -> dict[str, bytes]:
        changed: dict[str, bytes] = {}
        if kind == "vllm" and live == "token_ids" and not self.wants_token_ids:
            changed["return_token_ids"] = b"true"
        options = _stream_options(self.members)
        asked = (
            ("include_usage", "continuous_usage_stats") if kind == "vllm" and live == "usage" else ("include_usage",)
        )
        if not all(options.get(name) == _TRUE for name in asked):
            changed["stream_options"] = write_object({**options, **dict.fromkeys(asked, b"true")})
        return changed

    def _salt(self, salt: str) -> bytes:
        """The tenant's; a salt of the client's own only divides the tenant's cache further."""
        own = self.members.get("cache_salt", _NULL)
        if own != _NULL:
            salt = hashlib.sha256(salt.encode() + b"\0" + own).hexdigest()
        return msgspec.json.encode(salt)


def parse(endpoint: Endpoint, raw: bytes) -> Call:
    """Reads and checks one body. Raises BadRequest, whatever the bytes; costs time linear in their number."""
    if endpoint not in ("chat", "completions", "embeddings"):
        raise BadRequest(f"{endpoint} is not metered yet.")
    members = _members(raw)
    for name in COST_UNKNOWN.keys() & members.keys():
        if members[name] not in (_FALSE, _NULL):
            raise BadRequest(f"This cannot be metered: {COST_UNKNOWN[name]}.", name)
    stream = _flag(members, "stream")
    if stream and endpoint == "embeddings":
        raise BadRequest("stream must be false or left out: embeddings are not streamed.", "stream")
    options = _stream_options(members)
    wants_usage = _flag(options, "include_usage", "stream_options.")
    live = _flag(options, "continuous_usage_stats", "stream_options.")
    limits = [limit for name in LIMIT_FIELDS if (limit := _count(members, name)) is not None]
    prompts, parts = _prompt(endpoint, members)
    return Call(
        endpoint=endpoint,
        model=_model(members),
        stream=stream,
        wants_usage=stream and wants_usage,
        wants_live_usage=stream and wants_usage and live,
        wants_token_ids=_flag(members, "return_token_ids"),
        prompts=prompts,
        choices=1 if endpoint == "embeddings" else max(_count(members, "n") or 1, _count(members, "best_of") or 1),
        asked_output=None if endpoint == "embeddings" else max(limits, default=None),
        prompt=parts,
        members=members,
    )


def write_object(members: dict[str, msgspec.Raw] | dict[str, bytes] | dict[str, msgspec.Raw | bytes]) -> bytes:
    """A JSON object of these members, each value as it is."""
    pieces: list[bytes | msgspec.Raw] = []
    for name, value in members.items():
        pieces += (b"," if pieces else b"{", msgspec.json.encode(name), b":", value)
    return b"".join((*pieces, b"}" if pieces else b"{}"))


_READ_MEMBERS = msgspec.json.Decoder(Members)
_READ_OBJECTS = msgspec.json.Decoder(list[Members])
_READ_CONTENT = msgspec.json.Decoder(list[Members | str])
_READ_STRING = msgspec.json.Decoder(str)
_READ_STRINGS = msgspec.json.Decoder(list[str])
_TRUE, _FALSE, _NULL = msgspec.Raw(b"true"), msgspec.Raw(b"false"), msgspec.Raw(b"null")
_TEXT = msgspec.Raw(b'"text"')

_OF_IDS = b"0123456789,[]"


def _members(raw: bytes) -> Members:
    """The top level. msgspec checks the grammar all the way down (no NaN, no trailing bytes); UTF-8 is checked here."""
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


def _given(members: Members, name: str) -> bool:
    """Present and not null: null means "not set" to every engine."""
    return members.get(name, _NULL) != _NULL


def _flag(members: Members, name: str, path: str = "") -> bool:
    value = members.get(name, _NULL)
    if value == _TRUE:
        return True
    if value in (_FALSE, _NULL):
        return False
    raise BadRequest(f"{path}{name} must be true or false.", path + name)


def _count(members: Members, name: str) -> int | None:
    """A whole number of at least 1, written as one. `max_tokens: 0` is refused even with `echo`: vLLM makes and counts
    one token for it."""
    if not _given(members, name):
        return None
    digits = bytes(members[name])
    if digits.isdigit() and len(digits) <= 16 and 1 <= (number := int(digits)) <= LARGEST:
        return number
    raise BadRequest(f"{name} must be a whole number, at least 1.", name)


def _model(members: Members) -> str:
    try:
        model = _READ_STRING.decode(members["model"])
    except (KeyError, msgspec.ValidationError):
        model = ""
    if not model:
        raise BadRequest("model must be the name of a model, as a string.", "model")
    return model


def _stream_options(members: Members) -> Members:
    if not _given(members, "stream_options"):
        return {}
    try:
        return _READ_MEMBERS.decode(members["stream_options"])
    except msgspec.ValidationError:
        raise BadRequest("stream_options must be an object.", "stream_options") from None


def _prompt(endpoint: Endpoint, members: Members) -> tuple[int, PromptParts]:
    """How many prompts, and what is in them."""
    json_bytes = sum(len(members[name]) for name in PROMPT_FIELDS if _given(members, name))
    parts = PromptParts(json_bytes=json_bytes)
    if endpoint == "chat" or (endpoint == "embeddings" and _given(members, "messages")):
        if endpoint == "embeddings" and _given(members, "input"):
            raise BadRequest("Send either input or messages, not both.", "input")
        parts.tools = _given(members, "tools") or _given(members, "functions")
        _measure_messages(members, parts)
        return 1, parts
    name = "prompt" if endpoint == "completions" else "input"
    return _measure_prompts(members.get(name, _NULL), name, parts), parts


def _measure_messages(members: Members, parts: PromptParts) -> None:
    parts.source = members.get("messages", _NULL)
    text = bytes(parts.source)
    if text.translate(None, BLANKS).count(b",{") > MOST_OBJECTS and structure(text).count(b",{") > MOST_OBJECTS:
        raise BadRequest(f"messages has more than {MOST_OBJECTS} objects: send fewer messages and parts.", "messages")
    try:
        messages = _READ_OBJECTS.decode(text)
    except msgspec.ValidationError:
        messages = []
    if not messages:
        raise BadRequest("messages must be a list of at least one message object.", "messages")
    parts.messages = len(messages)
    parts.text_bytes = sum(map(_bytes_of, _texts_of(messages, parts))) + parts.json_bytes


def _texts_of(messages: list[Members], parts: PromptParts) -> Iterator[str]:
    """Every text, name and id in the messages. Media and JSON are counted into `parts`, and not read."""
    for message in messages:
        for name, value in message.items():
            if name != "content" or _first(value) != b"[":
                yield _text(value, parts)
                continue
            for part in _content(value):
                if isinstance(part, str):
                    yield part
                else:
                    yield from _texts_of_part(part, parts)


def _content(value: msgspec.Raw) -> list[Members | str]:
    try:
        return _READ_CONTENT.decode(value)
    except msgspec.ValidationError:
        raise BadRequest(
            "content must be a string or a list of parts, each an object or a string.", "messages"
        ) from None


def _texts_of_part(part: Members, parts: PromptParts) -> Iterator[str]:
    kind = _kind(part)
    media = MEDIA_FIELDS.keys() & part.keys() or MEDIA_FIELDS.keys() & {kind}
    for name in media:
        medium = MEDIA_FIELDS[name]
        setattr(parts, medium, getattr(parts, medium) + 1)
    parts.only_text &= kind == "text" and part.keys() <= {"type", "text"}
    for name, value in part.items():
        if name != "type" and name not in MEDIA_FIELDS:
            yield _text(value, parts)


def _kind(part: Members) -> str:
    """A content part's type."""
    kind = part.get("type", _TEXT)
    return _READ_STRING.decode(kind) if _first(kind) == b'"' else ""


def _measure_prompts(value: msgspec.Raw, name: str, parts: PromptParts) -> int:
    """A string, a list of strings, a list of token ids, or a list of such lists: how many prompts."""
    parts.source = value
    parts.text_bytes = parts.json_bytes
    if _first(value) == b"[" and (ids := _token_ids(value)):
        parts.token_ids, prompts = ids
        return prompts
    texts = _prompts(value, name)
    parts.text_bytes += sum(map(_bytes_of, texts))
    parts.texts = len(texts)
    return len(texts)


def _prompts(value: msgspec.Raw, name: str) -> list[str]:
    if _first(value) == b'"':
        return [_READ_STRING.decode(value)]
    try:
        texts = _READ_STRINGS.decode(value)
    except msgspec.ValidationError:
        texts = []
    if not texts:
        raise BadRequest(f"{name} must be a string, a list of strings, or a list (or lists) of token ids.", name)
    return texts


def _token_ids(value: msgspec.Raw) -> tuple[int, int] | None:
    """Token ids and lists of them, counted without making a list of a million numbers; None if it is not ids."""
    compact = bytes(value).translate(None, BLANKS)
    if compact.translate(None, _OF_IDS) or b"[]" in compact:
        return None
    ids, lists = compact.count(b",") + 1, compact.count(b"[") - 1
    if not lists:
        return ids, 1
    # lists of numbers only, side by side: each but the first begins where another ends
    flat = compact.startswith(b"[[") and compact.endswith(b"]]") and compact.count(b"],[") == lists - 1
    return (ids, lists) if flat else None


def _first(value: msgspec.Raw) -> bytes:
    return bytes(memoryview(value)[:1])


def _text(value: msgspec.Raw, parts: PromptParts) -> str:
    """A string's text. Anything else, such as tool calls, is counted as JSON."""
    if _first(value) == b'"':
        return _READ_STRING.decode(value)
    if value != _NULL:
        parts.json_bytes += len(value)
    return ""


def _bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
