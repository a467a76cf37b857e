"""The event streams of chat and completions, closed by `[DONE]`.

Standard: https://platform.openai.com/docs/api-reference/chat-streaming, and what vLLM adds to it for who may be left in the
middle: the ids of the tokens (`return_token_ids`), or running figures (`continuous_usage_stats`). Ids are the better of the
two. They come with every token, those too that a tool or reasoning parser swallows, while running figures wait for the next
event that shows something (of two recorded tool calls, 63 tokens in 66 events against 73 in 19). What it takes to read an
event and to take out what was not asked for, on one core of 2026:

    an event with a word of text      nothing asked for   222 bytes   3.6 µs
                                      token ids           223 bytes   4.4 µs
                                      running figures     327 bytes   4.8 µs
    an event for a swallowed token    token ids           200 bytes   3.8 µs
    the first event, with the ids of a prompt of 1,000 / 8,000 / 100,000 tokens: 14 / 80 / 1,700 µs, once for each choice

Two answers have to do with running figures: with `echo` vLLM leaves the prompt's text out where it gives ids, and with
`include_reasoning: false` it hides them.
"""

from __future__ import annotations

from typing import Final

import msgspec

from engine_adapter.body import NULL, write_object
from engine_adapter.choices import Answer, Choice, NotAnAnswer, count_ids, read, read_small
from engine_adapter.figures import Figures
from engine_adapter.request import Endpoint
from engine_adapter.scanner import DONE, Scanner
from engine_adapter.splice import nulled, nulled_in_choices, only, read_members, rename_model, without_usage
from engine_adapter.usage import Usage


class ChatScanner(Scanner):
    """One answer's event stream.

    What is hidden: events that only carry usage, from a client that did not ask for it; the `usage` of other events, from
    one that did not ask for running figures; from one that did not ask for token ids their lists, for which null is
    written as vLLM does then, and the events with an empty delta that came for them alone.

    `choices` counts the answers of all `prompts` together.
    """

    cut_reason = "length"

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        wants_usage: bool,
        wants_live_usage: bool,
        wants_token_ids: bool,
        choices: int,
        prompt_estimate: int,
        rename: tuple[str, str] | None,
        prompts: int,
    ) -> None:
        super().__init__(prompt_estimate=prompt_estimate, rename=rename)
        self._endpoint = endpoint
        self._wants_usage = wants_usage
        self._wants_live_usage = wants_live_usage
        self._wants_token_ids = wants_token_ids
        self._choices = choices
        self._choices_per_prompt = max(1, choices // max(1, prompts))
        self._opening = b""
        self._finished: set[int] = set()
        self._usage_taken = False

    def end(self) -> bytes:
        shown = super().end()
        owed = b"" if self._framing.over or self.done else self._usage_owed()
        return shown + b"\n\n" + owed if shown and owed else shown or owed

    def _complete(self) -> bool:
        return len(self._finished) >= self._choices

    def _read(self, data: bytes) -> bytes:
        if len(data) < 16 and data.strip() == DONE:
            return self._read_done(data)
        try:
            answer = read(data)
        except NotAnAnswer:
            return data
        if answer is None:
            return data
        if answer.error != NULL:
            return self._fail(read_small(answer.error), data)
        self._count(answer, data)
        return self._shown(answer, data)

    def _read_done(self, data: bytes) -> bytes:
        self.done = True
        owed = self._usage_owed()
        return owed.removeprefix(b"data: ") + b"data: " + data if owed else data  # an event before this one

    # What of it is shown

    def _shown(self, answer: Answer, data: bytes) -> bytes:
        if answer.usage is not None:
            if not answer.choices and not self._wants_usage:
                return b""
            if answer.choices and not self._wants_live_usage:
                self._usage_taken = True
                data = without_usage(data)
        if self.ids_seen and not self._wants_token_ids:
            if _only_ids(answer, data):
                return b""
            data = _without_ids(answer, data)
        return data if self._name is None else rename_model(data, answer.model, self._name)

    # What it cost

    def _count(self, answer: Answer, data: bytes) -> None:
        figures = answer.usage if answer.usage is not None and answer.usage.valid() else None
        if answer.choices:
            if not self.content_seen:
                self.content_seen, self._opening = True, data
            self._count_choices(answer.choices, figures)
        elif figures is not None:
            self._tally.whole(figures, summed=True)
        if answer.prompt_token_ids is not NULL:
            self._count_prompt(answer.prompt_token_ids, 0)
        if self.content_seen or figures is not None:
            self._advance()

    def _count_choices(self, choices: list[Choice], figures: Figures | None) -> None:
        for choice in choices:
            if choice.finish_reason is not None:
                self._finish(choice)
            if choice.prompt_token_ids is not NULL:
                self._count_prompt(choice.prompt_token_ids, choice.index // self._choices_per_prompt)
            self._count_choice(choice, figured=figures is not None)
        if figures is None:
            return
        if self._choices == 1 or len(choices) > 1:
            self._tally.whole(figures, summed=False)
        else:
            index = choices[0].index
            self._tally.part(figures, index, index // self._choices_per_prompt)

    def _count_choice(self, choice: Choice, *, figured: bool) -> None:
        """A piece: by its ids, or else by its text, unless figures came with it."""
        if choice.token_ids is not NULL and (count := count_ids(choice.token_ids)) is not None:
            self.ids_seen = True
            if not figured:
                self._tally.ids(count)
        elif not figured and (size := choice.text_bytes()):
            self._tally.text(size)

    def _count_prompt(self, ids: msgspec.Raw, prompt: int) -> None:
        if (count := count_ids(ids)) is not None:
            self.ids_seen = True
            self._tally.prompt_ids(count, prompt)

    def _finish(self, choice: Choice) -> None:
        self._finished.add(choice.index)
        if choice.index == 0 or self.finish_reason is None:
            self.finish_reason = choice.finish_reason
        self.aborted |= choice.finish_reason == "abort"

    # Events of our own

    def _ending(self) -> bytes:
        """Each unfinished choice with "length", and usage if it was asked for."""
        unfinished = [index for index in range(self._choices) if index not in self._finished]
        if 0 in unfinished or self.finish_reason is None:
            self.finish_reason = self.cut_reason
        pieces = [self._event([self._last_piece(index)]) for index in unfinished]
        if self._wants_usage and not self._tally.summed:
            pieces.append(self._event([], self.usage()))
        return b"".join((*pieces, b"data: ", DONE, b"\n\n"))

    def _usage_owed(self) -> bytes:
        """The usage event of a client that asked for one, when the engine said its figures only in events with choices."""
        if not self._wants_usage or not self._usage_taken or self._tally.summed:
            return b""
        return self._event([], self.usage())

    def _event(self, choices: list[bytes], usage: Usage | None = None) -> bytes:
        members = self._identity() | {"choices": b"[" + b",".join(choices) + b"]"}
        if usage is not None:
            figures = {
                "prompt_tokens": usage.prompt,
                "total_tokens": usage.total,
                "completion_tokens": usage.completion,
            }
            members["usage"] = msgspec.json.encode(figures)
        return b"data: " + write_object(members) + b"\n\n"

    def _last_piece(self, index: int) -> bytes:
        said = b'"text":""' if self._endpoint == "completions" else b'"delta":{}'
        return b'{"index":%d,%b,"logprobs":null,"finish_reason":"length"}' % (index, said)

    def _identity(self) -> dict[str, msgspec.Raw | bytes]:
        """What all events of the stream have in common, as the first one said it."""
        opening = read_members(self._opening) if self._opening else {}
        members: dict[str, msgspec.Raw | bytes] = {
            name: opening[name] for name in ("id", "object", "created", "model") if name in opening
        }
        if self._name is not None:
            members["model"] = msgspec.json.encode(self._name)
        return members


_IDS: Final = ("prompt_token_ids", "token_ids")


def _only_ids(answer: Answer, data: bytes) -> bool:
    """An event that without token ids would not have come: one choice that says nothing and does not end."""
    if answer.choices is None or len(answer.choices) != 1:
        return False
    choice = answer.choices[0]
    if choice.delta is None or choice.delta.content or choice.delta.reasoning or choice.finish_reason is not None:
        return False
    if choice.token_ids == NULL or choice.logprobs != NULL:
        return False
    return data.startswith(b'"delta":{}', only(data, b'"delta"'))


def _without_ids(answer: Answer, data: bytes) -> bytes:
    """The lists' places taken by null: where they stand, or else with their objects written anew."""
    changed: bytes | None = data
    if answer.prompt_token_ids != NULL:
        changed = nulled(data, b'"prompt_token_ids"', answer.prompt_token_ids)
    for choice in answer.choices or ():
        if changed is not None and choice.prompt_token_ids != NULL:
            changed = nulled(changed, b'"prompt_token_ids"', choice.prompt_token_ids)
        if changed is not None and choice.token_ids != NULL:
            changed = nulled(changed, b'"token_ids"', choice.token_ids)
    return nulled_in_choices(data, _IDS) if changed is None else changed
