"""What an engine's answer says: the shapes of chat, completions and embeddings, and the reading of a plain answer.

Whole answers and pieces of a stream share their shapes. Each is read in one typed pass; an answer of odd types (a number
as a string, content as a list) falls back to a slower reading that takes what it can and believes nothing else.
Standard: https://platform.openai.com/docs/api-reference/chat, and what vLLM adds to it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from engine_adapter.json_size import BLANKS, strings, structure
from engine_adapter.request import Endpoint, write_object
from engine_adapter.usage import Usage, UsageSource

BYTES_PER_TOKEN: Final = 4
"""Where there is nothing but text: about four characters of English make a token
(https://help.openai.com/en/articles/4936856-what-are-tokens-and-how-to-count-them)."""

LARGEST: Final = 10**15
"""More tokens in one answer are not believed: no engine makes them, and sums of what is believed must stay exact in a
double, as every JSON reader has them (below 2**53: RFC 8259, section 6)."""


MOST_VALUES: Final = 100_000
"""Choices, and values in choices of odd types, that are read one by one. Of more, the size of their JSON is weighed: a
worker's answer must not hold everybody else up."""

LARGE: Final = 64 * 1024
"""Bytes of an error or of figures beyond which they are not read: real ones have some hundreds."""


class NotAnAnswer(ValueError):
    """A 200 whose body is not a JSON object."""


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """An answer that came in one piece. `body` is the same object where no name had to be changed."""

    usage: Usage
    finish_reason: str | None
    """the first choice's; "abort" means that the engine broke off (vLLM on SIGTERM, in a 200)"""
    body: bytes


class Details(msgspec.Struct):
    """Parts of a figure, already counted in it."""

    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class Figures(msgspec.Struct):
    """The `usage` object. Its total is not read: at times it is absent or wrong."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None
    completion_tokens_details: Details | None = None

    def valid(self) -> bool:
        """Both figures are there and can be true."""
        prompt, completion = self.prompt_tokens, self.completion_tokens
        if prompt is None or completion is None or prompt < 0 or completion < 0:
            return False
        return prompt + completion <= LARGEST

    def usage(self, source: UsageSource = "engine") -> Usage:
        """Valid figures as Usage. A part that cannot be true (negative, more than its whole) counts as 0."""
        prompt, completion = self.prompt_tokens or 0, self.completion_tokens or 0
        cached = reasoning = 0
        if (details := self.prompt_tokens_details) is not None:
            cached = _part(details.cached_tokens, prompt)
        if (details := self.completion_tokens_details) is not None:
            reasoning = _part(details.reasoning_tokens, completion)
        return Usage(prompt, cached, completion, reasoning, source)


NULL: Final = msgspec.Raw(b"null")


class Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct, gc=False):
    function: Function | None = None


class Message(msgspec.Struct, gc=False):
    """What a model says, whole (`message`) or a piece of it (`delta`): all of it was made of output tokens."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """the older name of `reasoning`; some engines send both, with the same text"""
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: Function | None = None

    def text_bytes(self) -> int:
        texts = [self.content, self.reasoning or self.reasoning_content, self.refusal]
        functions = [call.function for call in self.tool_calls or ()]
        for function in (*functions, self.function_call):
            if function is not None:
                texts += (function.name, function.arguments)
        return sum(_bytes_of(text) for text in texts if text)


class Choice(msgspec.Struct, gc=False):
    """One answer or a piece of it, of chat (`message`, `delta`) or completions (`text`)."""

    index: int = 0
    finish_reason: str | None = None
    delta: Message | None = None
    message: Message | None = None
    text: str | None = None

    def text_bytes(self) -> int:
        said = self.delta if self.delta is not None else self.message
        return said.text_bytes() if said is not None else _bytes_of(self.text or "")


class Answer(msgspec.Struct):
    """The members of an answer, or of one event of a stream, that metering needs."""

    choices: list[Choice] | None = None
    usage: Figures | None = None
    model: str | None = None
    error: msgspec.Raw = NULL
    """to be read with `read_small`"""


def read(text: bytes) -> Answer | None:
    """One JSON object; None if it is JSON of another kind. Raises NotAnAnswer if it is not JSON."""
    try:
        try:
            return _read_oddly(text) if _has_many_objects(text) else _READ.decode(text)
        except msgspec.ValidationError:
            return _read_oddly(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise NotAnAnswer(f"The worker's answer is not JSON: {error}.") from None


def read_small(value: msgspec.Raw) -> Any:
    """A value of any type; None if it is LARGE."""
    return msgspec.json.decode(value) if len(value) <= LARGE else None


def read_answer(
    endpoint: Endpoint, body: bytes, *, prompt_estimate: int, rename: tuple[str, str] | None
) -> PlainAnswer:
    """Reads a whole answer: its usage (`estimate` without good figures), why it ended, and the body for the client.

    `rename`: the name the engine serves, and the caller's name for it, which takes its place. Raises NotAnAnswer.
    """
    answer = read(body)
    if answer is None:
        raise NotAnAnswer("The worker's answer is not a JSON object.")
    choices = answer.choices or []
    return PlainAnswer(
        usage=_usage(endpoint, answer, prompt_estimate),
        finish_reason=choices[0].finish_reason if choices else None,
        body=rename_model(body, answer.model, rename[1]) if rename else body,
    )


def tokens_of_text(size: int) -> int:
    """Tokens in `size` bytes of text, rounded up."""
    return -(-size // BYTES_PER_TOKEN)


def rename_model(text: bytes, model: str | None, name: str) -> bytes:
    """`text`, a JSON object whose top-level `model` is `model`, with `name` there instead.

    If `"model"` stands in it only once, that is the member (within a JSON string its quotes would be escaped), and only
    its value is replaced. Otherwise the object is written anew from its members.
    """
    if model is None or model == name:
        return text
    at = _only(text, b'"model"')
    if at >= 0:
        compact = b'"model":' + msgspec.json.encode(model)
        if text.startswith(compact, at):
            return b"".join((text[: at + 8], msgspec.json.encode(name), text[at + len(compact) :]))
        if member := _MODEL_MEMBER.match(text, at):
            return b"".join((text[: member.start(1)], msgspec.json.encode(name), text[member.end() :]))
    return write_object(_READ_MEMBERS.decode(text) | {"model": msgspec.json.encode(name)})


def without_usage(text: bytes) -> bytes:
    """`text`, a JSON object, without its top-level `usage`: cut out where it stands, or else written anew without."""
    at = _only(text, b'"usage"')
    if at > 0 and text[at - 1] == _COMMA and (end := _usage_end(text, at)) > 0:
        return text[: at - 1] + text[end:]
    members = _READ_MEMBERS.decode(text)
    members.pop("usage", None)
    return write_object(members)


def _only(text: bytes, quoted: bytes) -> int:
    """Where it stands if it stands there once, else -1."""
    at = text.find(quoted)
    return at if at >= 0 and text.find(quoted, at + len(quoted)) < 0 else -1


def _usage_end(text: bytes, at: int) -> int:
    """Where the member's object ends; -1 if it is deeper than figures and their details."""
    end = text.find(b"}", at) + 1
    flat = text.startswith(b'"usage":{', at) and text.count(b"{", at, end) == 1
    if flat and text.count(b'"', at, end) % 2 == 0 and text.find(b"\\", at, end) < 0:  # so the brace is in no string
        return end
    member = _USAGE_MEMBER.match(text, at)
    return member.end() if member else -1


_READ = msgspec.json.Decoder(Answer)
_READ_CHOICES = msgspec.json.Decoder(list[Choice] | None)
_READ_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])

_COMMA: Final = ord(",")
_STRING: Final = rb'"(?:[^"\\]|\\.)*+"'
_MODEL_MEMBER = re.compile(rb'"model"\s*:\s*(' + _STRING + rb")")
_DETAILS: Final = rb'\{(?:[^{}"]++|' + _STRING + rb")*+\}"
_USAGE_MEMBER = re.compile(rb'"usage"\s*:\s*\{(?:[^{}"]++|' + _STRING + rb"|" + _DETAILS + rb")*+\}")
"""A usage object with figures and, one level down, their details."""

_NOT_SAID: Final = frozenset({"id", "type", "role", "index", "finish_reason", "stop_reason", "logprobs"})
"""Members of a choice whose strings are not the model's words."""


def _usage(endpoint: Endpoint, answer: Answer, prompt_estimate: int) -> Usage:
    figures = answer.usage or Figures()
    if endpoint == "embeddings" and figures.completion_tokens is None:
        figures.completion_tokens = 0
    if figures.valid():
        return figures.usage()
    if answer.choices is None and endpoint != "embeddings":
        return Usage()
    figures.completion_tokens = tokens_of_text(sum(choice.text_bytes() for choice in answer.choices or ()))
    if not figures.valid():
        figures.prompt_tokens = prompt_estimate
    return figures.usage("estimated")


class _Members(msgspec.Struct):
    choices: msgspec.Raw = NULL
    usage: msgspec.Raw = NULL
    model: msgspec.Raw = NULL
    error: msgspec.Raw = NULL


_READ_ODDLY = msgspec.json.Decoder(_Members)


def _read_oddly(text: bytes) -> Answer | None:
    """The members that have the right type, of any JSON object."""
    try:
        members = _READ_ODDLY.decode(text)
    except msgspec.ValidationError:
        return None
    model = read_small(members.model)
    return Answer(
        _read_choices(members.choices),
        None if members.usage == NULL else _read_figures(read_small(members.usage)),
        model if isinstance(model, str) else None,
        members.error,
    )


class _Ending(msgspec.Struct, frozen=True):
    finish_reason: str | None = None


class _First(msgspec.Struct, array_like=True):
    """A list of which only the first is read."""

    choice: _Ending = _Ending()


_READ_FIRST = msgspec.json.Decoder(_First)


def _read_choices(value: msgspec.Raw) -> list[Choice] | None:
    text = bytes(value)
    if _has_many_objects(text):
        return [_weighed(text)]
    try:
        return _READ_CHOICES.decode(text)
    except msgspec.ValidationError:
        pass
    if strings(text) > MOST_VALUES or structure(text).count(b",") > MOST_VALUES:
        return [_weighed(text)]
    choices = msgspec.json.decode(text)
    return [_read_choice(each) for each in choices if isinstance(each, dict)] if isinstance(choices, list) else None


def _has_many_objects(text: bytes) -> bool:
    if len(text) <= LARGE or text.translate(None, BLANKS).count(b",{") <= MOST_VALUES:
        return False
    return strings(text) > MOST_VALUES or structure(text).count(b",{") > MOST_VALUES


def _weighed(choices: bytes) -> Choice:
    """All of them in one, their JSON taken for what was said."""
    try:
        finish = _READ_FIRST.decode(choices).choice.finish_reason
    except msgspec.ValidationError:
        finish = None
    return Choice(finish_reason=finish, text=choices.decode("utf-8", "replace"))


def _read_figures(value: Any) -> Figures:
    if not isinstance(value, dict):
        return Figures()
    return Figures(
        _whole(value, "prompt_tokens"),
        _whole(value, "completion_tokens"),
        _read_details(value.get("prompt_tokens_details")),
        _read_details(value.get("completion_tokens_details")),
    )


def _read_details(value: Any) -> Details | None:
    if not isinstance(value, dict):
        return None
    return Details(_whole(value, "cached_tokens"), _whole(value, "reasoning_tokens"))


def _read_choice(value: dict[str, Any]) -> Choice:
    finish = value.get("finish_reason")
    return Choice(
        _whole(value, "index") or 0,
        finish if isinstance(finish, str) else None,
        text="".join(_strings(value)),
    )


def _strings(value: Any) -> list[str]:
    """All strings in it that may be the model's words. A list of what is left, no recursion: the depth is the sender's."""
    found: list[str] = []
    left: list[Any] = [value]
    while left:
        match left.pop():
            case str() as text:
                found.append(text)
            case dict() as members:
                left += [member for name, member in members.items() if name not in _NOT_SAID]
            case list() as items:
                left += items
            case _:
                pass
    return found


def _whole(members: dict[str, Any], name: str) -> int | None:
    value = members.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _part(part: int | None, whole: int) -> int:
    return part if part is not None and 0 <= part <= whole else 0


def _bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
