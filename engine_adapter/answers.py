"""What an engine's whole answer says, of every endpoint: what it cost, why it ended, and the body for the client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from engine_adapter.body import NULL
from engine_adapter.choices import NotAnAnswer, read
from engine_adapter.estimate import bytes_said, tokens_of_text
from engine_adapter.figures import Figures, InputFigures, ReadingFigures
from engine_adapter.lenient import NOT_JSON, read_object
from engine_adapter.request import Endpoint
from engine_adapter.response import Response
from engine_adapter.splice import rename_model
from engine_adapter.usage import Usage

__all__ = ["NotAnAnswer", "PlainAnswer", "read_answer"]


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """An answer that came in one piece. `body` is the same object where no name had to be changed."""

    usage: Usage
    finish_reason: str | None
    """in the engine's words, the first choice's; "abort" means that the engine broke off (vLLM on SIGTERM, in a 200)"""
    body: bytes


@dataclass(frozen=True, slots=True)
class _Said:
    """What any answer says. `text` is what was said in bytes, asked for only where figures are missing."""

    figures: Figures
    model: str | None
    finish_reason: str | None
    text: Callable[[], int | None]
    """None: nothing was produced at all"""


def read_answer(
    endpoint: Endpoint, body: bytes, *, prompt_estimate: int, rename: tuple[str, str] | None
) -> PlainAnswer:
    """Reads a whole answer: its usage (`estimated` without good figures), why it ended, and the body for the client.

    `rename`: the name the engine serves, and the caller's name for it, which takes its place. Raises NotAnAnswer.
    """
    said = _READERS[endpoint](body)
    return PlainAnswer(
        usage=_usage(said, prompt_estimate),
        finish_reason=said.finish_reason,
        body=rename_model(body, said.model, rename[1]) if rename else body,
    )


def _usage(said: _Said, prompt_estimate: int) -> Usage:
    figures = said.figures
    if figures.valid():
        return figures.usage()
    size = said.text()
    if size is None:
        return Usage()
    figures.completion_tokens = tokens_of_text(size)
    if not figures.valid():
        figures.prompt_tokens = prompt_estimate
    return figures.usage("estimated")


# ---- chat and completions --------------------------------------------------------------------------------------------


def _of_choices(body: bytes) -> _Said:
    answer = read(body)
    if answer is None:
        raise NotAnAnswer(_NO_OBJECT)
    choices = answer.choices
    return _Said(
        answer.usage or Figures(),
        answer.model,
        choices[0].finish_reason if choices else None,
        lambda: None if choices is None else sum(choice.text_bytes() for choice in choices),
    )


# ---- embeddings, score, rerank ---------------------------------------------------------------------------------------


class _Reading(msgspec.Struct):
    usage: ReadingFigures | None = None
    model: str | None = None


def _of_reading(body: bytes) -> _Said:
    answer = _read(_Reading, body)
    return _Said((answer.usage or ReadingFigures()).figures(), answer.model, None, lambda: 0)


# ---- responses -------------------------------------------------------------------------------------------------------


def _of_response(body: bytes) -> _Said:
    response = _read(Response, body)
    return _Said(response.figures(), response.model, response.finish_reason(), lambda: _said(response.output))


# ---- messages --------------------------------------------------------------------------------------------------------


class _Message(msgspec.Struct):
    model: str | None = None
    type: str | None = None
    stop_reason: str | None = None
    usage: InputFigures | None = None
    content: msgspec.Raw = NULL

    def finish_reason(self) -> str | None:
        """vLLM has no stop reason for what it gave up; where nothing was made, the turn seems to be over."""
        made = self.usage.output_tokens if self.usage is not None else None
        void = made == 0 and bytes(self.content) in (b"[]", b"null")
        return "abort" if self.type == "message" and (void or self.stop_reason is None) else self.stop_reason


def _of_message(body: bytes) -> _Said:
    message = _read(_Message, body)
    figures = (message.usage or InputFigures()).figures()
    return _Said(figures, message.model, message.finish_reason(), lambda: _said(message.content))


# ---- all of them -----------------------------------------------------------------------------------------------------

Shape = TypeVar("Shape", bound=msgspec.Struct)


def _read(shape: type[Shape], body: bytes) -> Shape:
    try:
        answer, _ = read_object(shape, body)
    except NOT_JSON as error:
        raise NotAnAnswer(f"The worker's answer is not JSON: {error}.") from None
    if answer is None:
        raise NotAnAnswer(_NO_OBJECT)
    return answer


def _said(content: msgspec.Raw) -> int | None:
    return None if content == NULL else bytes_said(bytes(content))


_NO_OBJECT: Final = "The worker's answer is not a JSON object."
_READERS: Final[dict[Endpoint, Callable[[bytes], _Said]]] = {
    "chat": _of_choices,
    "completions": _of_choices,
    "embeddings": _of_reading,
    "score": _of_reading,
    "rerank": _of_reading,
    "responses": _of_response,
    "messages": _of_message,
}
