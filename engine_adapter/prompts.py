"""What enters the prompt, dialect by dialect: every text, and the sizes of what is none.

The walkers below yield each text of a request once and count the rest into `PromptParts`: what is JSON, such as tools, by
its bytes; pictures, sounds and films by their number, never by their base64. What has no size here, such as a file that
only the engine can read, is refused. Shapes: https://platform.openai.com/docs/api-reference,
https://docs.anthropic.com/en/api/messages, https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from engine_adapter import json_size, text_size
from engine_adapter.body import NULL, BadRequest, Members, first, given, write_object

MOST_OBJECTS: Final = 50_000
"""Messages, and parts of them: each is an object in this process, see `body.MOST_STRINGS`."""

MOST_VALUES: Final = 200_000
"""Brackets and commas of all JSON that enters the prompt; a tool's schema has some hundreds."""

JSON_FIELDS: Final = (
    "tools",
    "functions",
    "response_format",
    "documents",
    "chat_template_kwargs",
    "suffix",
    "reasoning_effort",
    "text",
    "reasoning",
    "thinking",
    "output_config",
    "previous_input_messages",
)
"""Members that enter the prompt, or may, beside those that the walkers read. Counted as JSON."""

IN_EVERY_PAIR: Final = ("instruction", "chat_template_kwargs")
"""Members that rerank and score write into the prompt of each pair."""

MEDIA: Final = {
    "image_url": "images",
    "input_image": "images",
    "image": "images",
    "input_audio": "audios",
    "audio_url": "audios",
    "video_url": "videos",
}
"""Types of content parts that are a picture, sound or film."""

MEDIA_MEMBERS: Final = frozenset({"image_url", "input_audio", "audio_url", "video_url"})
"""Members that hold one, whatever type the part says it has: never text, however many bytes of base64."""

UNSIZED: Final = frozenset(
    {
        "file",
        "input_file",
        "document",
        "container_upload",
        "item_reference",
        "image_generation_call",
        "prompt_embeds",
        "image_embeds",
        "audio_embeds",
        "video_embeds",
        "image_pil",
    }
)
"""Types of parts and items whose tokens nobody knows before the engine has read them."""

UNSIZED_MEMBERS: Final = UNSIZED & {
    "file",
    "prompt_embeds",
    "image_embeds",
    "audio_embeds",
    "video_embeds",
    "image_pil",
}
"""Members of a part that make it one, whatever its type."""

UNREAD: Final = {"image": ("source",), "thinking": ("signature",), "redacted_thinking": ("data",)}
"""Members by a part's type that are no text: a picture's bytes, and what proves where a thought comes from."""

Walker = Callable[["Members", "PromptParts"], Iterator[tuple[str, int]]]
"""Yields every text with the number of times that the prompts have it, and counts the rest."""


class PromptParts(msgspec.Struct):
    """What enters the prompt, in sizes. `token_ids` are exact tokens; the rest is for `prompt_size` to judge."""

    text_bytes: int = 0
    """UTF-8 bytes of all text, names and ids in messages or prompts, and `json_bytes`"""
    text_growth: int = 0
    """bytes by which normalization makes the texts longer at most"""
    json_bytes: int = 0
    """bytes of tools, schemas, tool calls and the like, as they came"""
    json_growth: int = 0
    """… and what they grow by at most where a template writes them anew"""
    json_marks: int = 0
    """brackets and commas of them"""
    messages: int = 0
    parts: int = 0
    """parts of their contents: a line end may stand between two"""
    results: int = 0
    """messages that are a tool's result"""
    texts: int = 0
    """prompts without a chat template; of rerank and score: pairs"""
    token_ids: int = 0
    tools: int = 0
    images: int = 0
    audios: int = 0
    videos: int = 0
    only_text: bool = True
    """no content has a part of any other kind"""
    walker: Walker | None = None
    source: Members = {}

    @property
    def media(self) -> int:
        """Pictures, sounds and films."""
        return self.images + self.audios + self.videos

    def read(self) -> Iterator[tuple[str, int]]:
        """The texts again, each with the number of times it is there, for a tokenizer; not what is JSON."""
        return self.walker(self.source, PromptParts()) if self.walker else iter(())


# ---- one walk for each kind of request -------------------------------------------------------------------------------


def of_chat(members: Members) -> tuple[int, PromptParts]:
    """Chat: messages. All of these give the number of prompts and what is in them; all raise BadRequest."""
    return 1, _measured(members, _chat)


def of_completions(members: Members) -> tuple[int, PromptParts]:
    return _of_prompts(members, "prompt")


def of_embeddings(members: Members) -> tuple[int, PromptParts]:
    """Prompts under `input`, or chat messages."""
    if not given(members, "messages"):
        return _of_prompts(members, "input")
    if given(members, "input"):
        raise BadRequest("Send either input or messages, not both.", "input")
    return of_chat(members)


def of_responses(members: Members) -> tuple[int, PromptParts]:
    return 1, _measured(members, _responses)


def of_messages(members: Members) -> tuple[int, PromptParts]:
    return 1, _measured(members, _messages)


def of_rerank(members: Members) -> tuple[int, PromptParts]:
    """One pair for each document: documents × query + Σ documents."""
    return _of_pairs(members, _rerank)


def of_score(members: Members) -> tuple[int, PromptParts]:
    return _of_pairs(members, _score)


def _measured(members: Members, walker: Walker) -> PromptParts:
    parts = PromptParts(walker=walker, source=members)
    _count_texts(members, parts)
    _count_fields(members, JSON_FIELDS, parts)
    parts.tools = sum(len(list(kinds(members, name))) for name in ("tools", "functions"))
    parts.text_bytes += parts.json_bytes
    return parts


def _of_pairs(members: Members, walker: Walker) -> tuple[int, PromptParts]:
    parts = PromptParts(walker=walker, source=members)
    _count_texts(members, parts)
    shared = PromptParts()
    _count_fields(members, IN_EVERY_PAIR, shared)
    parts.json_bytes += shared.json_bytes * parts.texts
    parts.json_growth += shared.json_growth * parts.texts
    parts.text_bytes += parts.json_bytes
    return parts.texts, parts


# ---- messages and items ----------------------------------------------------------------------------------------------


def _chat(members: Members, parts: PromptParts) -> Iterator[tuple[str, int]]:
    for message in _objects(members, "messages", parts):
        parts.results += message.get("role") in _RESULTS
        yield from _texts_of(message, ("content",), "messages", parts)


def _messages(members: Members, parts: PromptParts) -> Iterator[tuple[str, int]]:
    if given(members, "system"):
        parts.messages += 1
        yield from _texts_of({"role": _SYSTEM, "content": members["system"]}, ("content",), "system", parts)
    for message in _objects(members, "messages", parts):
        before = parts.results
        yield from _texts_of(message, ("content",), "messages", parts)
        if parts.results != before and message.get("role") != _USER:
            # elsewhere the engine would write it out as text, pictures and all
            raise BadRequest("A tool_result can only be in a message whose role is user.", "messages")


def _responses(members: Members, parts: PromptParts) -> Iterator[tuple[str, int]]:
    for name, role in (("instructions", "system"), ("input", "user")):
        value = members.get(name, NULL)
        if first(value) == b'"':
            parts.messages += 1
            yield role, 1
            yield _READ_STRING.decode(value), 1
        elif name == "input":
            for item in _objects(members, name, parts):
                yield from _texts_of_item(item, parts)
        elif value != NULL:
            raise BadRequest("instructions must be a string.", name)


def _texts_of_item(item: Members, parts: PromptParts) -> Iterator[tuple[str, int]]:
    kind = _kind(item, "message")
    _refuse_unsized(kind, item, "input")
    if kind.endswith("_call"):
        # its arguments are JSON in a string, which the engine reads and a template writes anew
        _count_json(msgspec.Raw(write_object(item)), parts)
    else:
        parts.results += kind.endswith("_output")
        yield from _texts_of(item, ("content", "output", "summary"), "input", parts)


def _texts_of(
    item: Members, lists: tuple[str, ...], field: str, parts: PromptParts, *, deeper: bool = True
) -> Iterator[tuple[str, int]]:
    """Every text, name and id of a message, item or part; `lists`: its members that may be lists of parts."""
    for name, value in item.items():
        if name in lists and first(value) in (b"[", b"{"):
            yield from _texts_of_parts(value, field, parts, deeper=deeper)
        else:
            yield _text(value, parts), 1


def _texts_of_parts(value: msgspec.Raw, field: str, parts: PromptParts, *, deeper: bool) -> Iterator[tuple[str, int]]:
    for part in _list(value, "content must be a string or a list of parts, each an object or a string", field):
        parts.parts += 1
        if isinstance(part, str):
            yield part, 1
        else:
            yield from _texts_of_part(part, field, parts, deeper=deeper)


def _texts_of_part(part: Members, field: str, parts: PromptParts, *, deeper: bool) -> Iterator[tuple[str, int]]:
    kind = _kind(part, "text")
    _refuse_unsized(kind, part, field)
    media = MEDIA_MEMBERS & part.keys() or MEDIA.keys() & {kind}
    for medium in media:
        setattr(parts, MEDIA[medium], getattr(parts, MEDIA[medium]) + 1)
    parts.only_text &= not media and kind in _TEXT_KINDS and part.keys() <= {"type", "text"}
    unread = {"type", *MEDIA_MEMBERS, *UNREAD.get(kind, ())}
    shown = {name: value for name, value in part.items() if name not in unread}
    if kind == "tool_use":
        _count_json(msgspec.Raw(write_object(part)), parts)
    elif kind == "tool_result" and deeper:
        parts.results += 1
        parts.messages += 2  # the engine makes a message of it, and of its pictures another
        yield from (("tool", 1), ("user", 1))
        yield from _texts_of(shown, ("content",), field, parts, deeper=False)
    else:
        yield from _texts_of(shown, (), field, parts)


_TEXT_KINDS: Final = frozenset({"text", "input_text", "output_text"})


def _refuse_unsized(kind: str, part: Members, field: str) -> None:
    if unsized := UNSIZED & {kind} or UNSIZED_MEMBERS & part.keys():
        raise BadRequest(f"The size of {min(unsized)} cannot be known: send its content as text or pictures.", field)
    if "uuid" in part:
        raise BadRequest(
            "A uuid names what is in the engine's cache, perhaps another caller's: send the picture itself.", field
        )


def _kind(part: Members, otherwise: str) -> str:
    """A part's or an item's type."""
    kind = part.get("type", NULL)
    if kind == NULL:
        return otherwise
    return _READ_STRING.decode(kind) if first(kind) == b'"' else ""


def _objects(members: Members, name: str, parts: PromptParts) -> list[Members]:
    """The messages or items, counted."""
    text = bytes(members.get(name, NULL))
    _check_number(text, name)
    try:
        objects = _READ_OBJECTS.decode(text)
    except msgspec.ValidationError:
        objects = []
    if not objects:
        raise BadRequest(f"{name} must be {_MUST_BE[name]}.", name)
    parts.messages += len(objects)
    return objects


_MUST_BE: Final = {
    "messages": "a list of at least one message object",
    "input": "a string or a list of at least one item object",
}


def _list(value: msgspec.Raw, must_be: str, field: str) -> list[Members | str]:
    """Objects and strings: a list of them, or one."""
    text = bytes(value) if first(value) == b"[" else b"[%b]" % value
    _check_number(text, field)
    try:
        return _READ_LIST.decode(text)
    except msgspec.ValidationError:
        raise BadRequest(f"{must_be}.", field) from None


def _check_number(text: bytes, name: str) -> None:
    if (
        text.translate(None, json_size.BLANKS).count(b",{") > MOST_OBJECTS
        and json_size.structure(text).count(b",{") > MOST_OBJECTS
    ):
        raise BadRequest(f"{name} has more than {MOST_OBJECTS} objects: send fewer messages and parts.", name)


# ---- prompts without a template --------------------------------------------------------------------------------------


def _of_prompts(members: Members, name: str) -> tuple[int, PromptParts]:
    """A string, a list of strings, a list of token ids, or a list of such lists."""
    value = members.get(name, NULL)
    if first(value) == b"[" and (ids := _token_ids(value)):
        parts = _measured(members, _no_text)
        parts.token_ids, prompts = ids
        return prompts, parts
    parts = _measured(members, _prompt if name == "prompt" else _input)
    return parts.texts, parts


def _no_text(members: Members, parts: PromptParts) -> Iterator[tuple[str, int]]:
    return iter(())


def _prompt(members: Members, parts: PromptParts) -> Iterator[tuple[str, int]]:
    return _strings(members, "prompt", parts)


def _input(members: Members, parts: PromptParts) -> Iterator[tuple[str, int]]:
    return _strings(members, "input", parts)


def _strings(members: Members, name: str, parts: PromptParts) -> Iterator[tuple[str, int]]:
    value = members.get(name, NULL)
    try:
        texts = [_READ_STRING.decode(value)] if first(value) == b'"' else _READ_STRINGS.decode(value)
    except msgspec.ValidationError:
        texts = []
    if not texts:
        raise BadRequest(f"{name} must be a string, a list of strings, or a list (or lists) of token ids.", name)
    parts.texts = len(texts)
    return ((text, 1) for text in texts)


_OF_IDS: Final = b"0123456789,[]"


def _token_ids(value: msgspec.Raw) -> tuple[int, int] | None:
    """Token ids and lists of them, counted without making a list of a million numbers; None if it is not ids."""
    compact = bytes(value).translate(None, json_size.BLANKS)
    if compact.translate(None, _OF_IDS) or b"[]" in compact:
        return None
    ids, lists = compact.count(b",") + 1, compact.count(b"[") - 1
    if not lists:
        return ids, 1
    # lists of numbers only, side by side: each but the first begins where another ends
    flat = compact.startswith(b"[[") and compact.endswith(b"]]") and compact.count(b"],[") == lists - 1
    return (ids, lists) if flat else None


# ---- pairs -----------------------------------------------------------------------------------------------------------

SCORED: Final = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
"""The names that vLLM takes the two sides of a score by."""


def _rerank(members: Members, parts: PromptParts) -> Iterator[tuple[str, int]]:
    return _pairs(members, "query", "documents", parts)


def _score(members: Members, parts: PromptParts) -> Iterator[tuple[str, int]]:
    sides = [pair for pair in SCORED if all(given(members, name) for name in pair)]
    if len({name for pair in SCORED for name in pair if given(members, name)}) != 2 or not sides:
        raise BadRequest("Send the two sides of the score as text_1 and text_2, or as queries and documents.", "text_1")
    return _pairs(members, *sides[0], parts)


def _pairs(members: Members, left: str, right: str, parts: PromptParts) -> Iterator[tuple[str, int]]:
    """One on the left is paired with each on the right; as many as on the right are paired one by one."""
    must_be = "{} must be a string, an object with content, or a list of them"
    ones, others = (_list(members.get(name, NULL), must_be.format(name), name) for name in (left, right))
    if not others:
        raise BadRequest(f"{right} must have at least one.", right)
    if len(ones) not in (1, len(others)):
        raise BadRequest(f"{left} must be one, or as many as {right}.", left)
    parts.texts = len(others)
    times = len(others) // len(ones)
    media = parts.images, parts.audios, parts.videos
    for one in ones:
        for text, _ in _texts_of_side(one, left, parts):
            yield text, times
    for medium, before in zip(("images", "audios", "videos"), media, strict=True):
        setattr(parts, medium, before + times * (getattr(parts, medium) - before))
    for other in others:
        yield from _texts_of_side(other, right, parts)


def _texts_of_side(side: Members | str, field: str, parts: PromptParts) -> Iterator[tuple[str, int]]:
    if isinstance(side, str):
        yield side, 1
    else:
        yield from _texts_of(side, ("content",), field, parts)


# ---- sizes -----------------------------------------------------------------------------------------------------------

_READ_OBJECTS = msgspec.json.Decoder(list[Members])
_READ_LIST = msgspec.json.Decoder(list[Members | str])
_READ_STRING = msgspec.json.Decoder(str)
_READ_STRINGS = msgspec.json.Decoder(list[str])
_READ_MEMBERS = msgspec.json.Decoder(Members)
_READ_VALUES = msgspec.json.Decoder(list[msgspec.Raw])
_RESULTS: Final = (msgspec.Raw(b'"tool"'), msgspec.Raw(b'"function"'))
_USER, _SYSTEM = msgspec.Raw(b'"user"'), msgspec.Raw(b'"system"')


def _text(value: msgspec.Raw, parts: PromptParts) -> str:
    """A string's text. Anything else, such as tool calls, is counted as JSON."""
    if first(value) == b'"':
        return _READ_STRING.decode(value)
    if value != NULL:
        _count_json(value, parts)
    return ""


def _count_texts(members: Members, parts: PromptParts) -> None:
    for text, times in parts.walker(members, parts) if parts.walker else ():
        parts.text_bytes += times * text_size.utf8(text)
        parts.text_growth += times * text_size.growth(text)


def _count_fields(members: Members, names: tuple[str, ...], parts: PromptParts) -> None:
    for name in names:
        if given(members, name):
            _count_json(members[name], parts)


def _count_json(value: msgspec.Raw, parts: PromptParts) -> None:
    text = bytes(value)
    marked = json_size.marks(text)
    parts.json_marks += len(marked)
    if parts.json_marks > MOST_VALUES:
        raise _too_many_values(None)
    parts.json_bytes += len(text)
    parts.json_growth += json_size.growth(text, marked) + text_size.json_growth(text)


def _too_many_values(name: str | None) -> BadRequest:
    return BadRequest(f"Tools and schemas have more than {MOST_VALUES} values: send fewer or simpler ones.", name)


def kinds(members: Members, name: str) -> Iterator[str | None]:
    """The types of a list's objects, such as tools; None for one without."""
    value = members.get(name, NULL)
    if first(value) != b"[":
        return
    if bytes(value).count(b",") > MOST_VALUES:
        raise _too_many_values(name)
    for each in _READ_VALUES.decode(value):
        yield _kind(_READ_MEMBERS.decode(each), "") or None if first(each) == b"{" else None
