"""What chat and completions say: the shapes that whole answers and the events of a stream share.

Each is read in one typed pass; one of odd types (a number as a string, content as a list) falls back to a slower reading
that takes what it can and believes nothing else. Standard: https://platform.openai.com/docs/api-reference/chat, and what
vLLM adds to it (`reasoning`, `token_ids`).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from engine_adapter.body import NULL
from engine_adapter.estimate import MOST_VALUES, bytes_of, has_many_values, words
from engine_adapter.figures import Figures
from engine_adapter.json_size import BLANKS, strings, structure
from engine_adapter.lenient import NOT_JSON, check_utf8, read_parts

LARGE: Final = 64 * 1024
"""Bytes of an error or of figures beyond which they are not read: real ones have some hundreds."""


class NotAnAnswer(ValueError):
    """A 200 whose body is not a JSON object."""


class Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    """of a custom tool"""

    def texts(self) -> tuple[str | None, ...]:
        return (self.name, self.arguments, self.input)


class ToolCall(msgspec.Struct, gc=False):
    function: Function | None = None
    custom: Function | None = None


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
        for call in self.tool_calls or ():
            if (function := call.function or call.custom) is not None:
                texts += function.texts()
        if self.function_call is not None:
            texts += self.function_call.texts()
        return sum(bytes_of(text) for text in texts if text)


class Choice(msgspec.Struct, gc=False):
    """One answer or a piece of it, of chat (`message`, `delta`) or completions (`text`)."""

    index: int = 0
    finish_reason: str | None = None
    delta: Message | None = None
    message: Message | None = None
    text: str | None = None
    logprobs: msgspec.Raw = NULL
    token_ids: msgspec.Raw = NULL
    """the tokens it was made of: counted, not looked at, as they may be many"""
    prompt_token_ids: msgspec.Raw = NULL
    """completions: of its prompt, in its first event"""

    def text_bytes(self) -> int:
        said = self.delta if self.delta is not None else self.message
        return said.text_bytes() if said is not None else bytes_of(self.text or "")


class Answer(msgspec.Struct):
    """The members of an answer, or of one event of a stream, that metering needs."""

    choices: list[Choice] | None = None
    usage: Figures | None = None
    model: str | None = None
    error: msgspec.Raw = NULL
    """to be read with `read_small`"""
    prompt_token_ids: msgspec.Raw = NULL
    """chat: in the first event of each choice"""


def read(text: bytes) -> Answer | None:
    """One JSON object; None if it is JSON of another kind. Raises NotAnAnswer if it is not JSON."""
    try:
        check_utf8(text)
        try:
            return _read_oddly(text) if _has_many_objects(text) else _READ.decode(text)
        except msgspec.ValidationError:
            return _read_oddly(text)
    except NOT_JSON as error:
        raise NotAnAnswer(f"The worker's answer is not JSON: {error}.") from None


def read_small(value: msgspec.Raw) -> Any:
    """A value of any type; None if it is LARGE."""
    return msgspec.json.decode(value) if len(value) <= LARGE else None


def count_ids(ids: msgspec.Raw) -> int | None:
    """How many token ids a list has; None if there is no list. Of lists of anything else, their commas and one."""
    text = bytes(ids)
    if not text.startswith(b"["):
        return None
    commas = text.count(b",")
    return commas + 1 if commas or text[1:-1].strip() else 0


_READ = msgspec.json.Decoder(Answer)
_READ_CHOICES = msgspec.json.Decoder(list[Choice] | None)
_READ_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


class _Members(msgspec.Struct):
    choices: msgspec.Raw = NULL
    usage: msgspec.Raw = NULL
    model: str | None = None
    error: msgspec.Raw = NULL
    prompt_token_ids: msgspec.Raw = NULL


def _read_oddly(text: bytes) -> Answer | None:
    """The members that have the right type, of any JSON object."""
    members = read_parts(_Members, text)
    if members is None:
        return None
    usage = None if members.usage == NULL else read_parts(Figures, members.usage) or Figures()
    return Answer(_read_choices(members.choices), usage, members.model, members.error, members.prompt_token_ids)


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
    if has_many_values(text):
        return [_weighed(text)]
    try:
        items = _READ_ITEMS.decode(text)
    except msgspec.ValidationError:
        return None
    return [choice for each in items if (choice := _read_choice(each)) is not None]


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


class _OddChoice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None
    logprobs: msgspec.Raw = NULL
    token_ids: msgspec.Raw = NULL
    prompt_token_ids: msgspec.Raw = NULL


def _read_choice(text: msgspec.Raw) -> Choice | None:
    odd = read_parts(_OddChoice, text)
    if odd is None:
        return None
    said = "".join(words(msgspec.json.decode(text)))
    return Choice(text=said, **msgspec.structs.asdict(odd))
