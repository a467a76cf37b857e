"""A parsed call: which model, how much it may cost, and the body to send on.

vLLM coerces types, lets the last of doubled keys win and decodes what it likes, so a body passed on unread would not be
the body that was checked. Here the top level is read in one pass, each value left as the bytes it came in; the fields that
decide about cost are checked strictly; and the body is written anew from the same members. What becomes of each field that
reaches far is said in docs/callers.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from engine_adapter import prompts
from engine_adapter.body import (
    FALSE,
    NULL,
    TRUE,
    BadRequest,
    Members,
    flag,
    given,
    object_of,
    read_object,
    text,
    whole,
    write_object,
)
from engine_adapter.prompts import PromptParts

__all__ = ["ENDPOINTS", "BadRequest", "Call", "Endpoint", "Kind", "Live", "PromptParts", "parse", "write_object"]

Endpoint = Literal["chat", "completions", "embeddings", "responses", "messages", "rerank", "score"]
Kind = Literal["vllm", "openai"]
Live = Literal["token_ids", "usage", "none", "nothing"]
"""What figures a chat or completions stream is asked for beside the usage at its end: `return_token_ids`,
`continuous_usage_stats`, none; or nothing at all, of an engine that knows no `stream_options`."""

ENDPOINTS: Final[dict[str, Endpoint]] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/rerank": "rerank",
    "/v1/score": "score",
}

LIMITS: Final[dict[Endpoint, tuple[str, ...]]] = {
    "chat": ("max_tokens", "max_completion_tokens"),
    "completions": ("max_tokens", "max_completion_tokens"),
    "responses": ("max_output_tokens",),
    "messages": ("max_tokens",),
}
"""Names of the output limit, that first which is written where none was sent. Other endpoints generate nothing."""

SEVERAL: Final = ("chat", "completions")
"""Endpoints that make several answers (n, best_of), and whose streams have no figures unless asked."""

# ---- what becomes of a field -----------------------------------------------------------------------------------------

DROPPED: Final = ("priority", "request_id", "session_id", "stream_interval", "service_tier")
"""Members that reach past the caller's own request: another's turn in the scheduler, the engine's names, how many tokens
come in one event, what the provider charges. They are left out of what is sent on."""

_TO_OTHER_ENGINES: Final = "it would send the engine to another machine: leave {} out"
_OF_PICTURES: Final = "the size of pictures and sounds cannot be known with {0}: leave {0} out"
REFUSED: Final = {
    "use_beam_search": "beam search makes more tokens than it reports, so it is not offered: leave use_beam_search out",
    "prompt_embeds": "the size of prompt_embeds cannot be known: send the prompt as text or token ids",
    "chat_template": "the size of a prompt written by the request's own template cannot be known: leave chat_template out",
    "previous_response_id": "the size of an earlier response cannot be known: send its messages instead",
    "conversation": "the size of an earlier conversation cannot be known: send its messages instead",
    "background": "it would run on after this request has ended: leave background out",
    "mcp_servers": "the engine's own tool calls cannot be metered: call the tools yourself, as functions",
    "web_search_options": "the engine's own searches cannot be metered: leave web_search_options out",
    "mm_processor_kwargs": _OF_PICTURES.format("mm_processor_kwargs"),
    "media_io_kwargs": _OF_PICTURES.format("media_io_kwargs"),
    "kv_transfer_params": _TO_OTHER_ENGINES.format("kv_transfer_params"),
    "ec_transfer_params": _TO_OTHER_ENGINES.format("ec_transfer_params"),
}
"""Members that cannot be metered, or that outlive the request or leave it, and what to do."""

REFUSED_PROMPT: Final = "the size of a stored prompt cannot be known: send its text as instructions and input"
"""`prompt` is a prompt's text on completions, and the name of a stored one on responses."""

FLAGS: Final = (
    "add_generation_prompt",
    "add_special_tokens",
    "continue_final_message",
    "echo",
    "ignore_eos",
    "include_reasoning",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "store",
    "stream",
)
"""True or false and nothing else: vLLM would take "yes" and 1 for true."""

NUMBERS: Final = {
    "min_tokens": 0,
    "truncate_prompt_tokens": -1,
    "max_tokens_per_query": 0,
    "max_tokens_per_doc": 0,
    "thinking_token_budget": -1,
}
"""Whole numbers beside limits and choices, and the least of each."""

TOOLS: Final[dict[Endpoint, tuple[str, ...]]] = {
    "responses": ("function", "custom", "namespace"),
    "messages": ("custom",),
}
"""Types of tools that the caller itself runs. With others the engine would go on by itself, for as long as it likes."""

TRANSFERS: Final = frozenset({"kv_transfer_params", "ec_transfer_params"})

LEAST_THINKING: Final = 1024
"""The smallest thinking budget of the Messages API; it has to be below max_tokens."""


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
    """of rerank and score: pairs"""
    choices: int
    """answers per prompt the engine may work on: the larger of n and best_of"""
    asked_output: int | None
    """tokens per answer: the larger of the limits sent (vLLM obeys one of them), None without"""
    prompt: PromptParts
    members: Members

    @property
    def generates(self) -> bool:
        """False where a prompt is only read: embeddings, rerank, score."""
        return self.endpoint in LIMITS

    @property
    def answers(self) -> int:
        """Answers per prompt that come back. So often vLLM works a prompt: it passes best_of over."""
        return (whole(self.members, "n") or 1) if self.endpoint in SEVERAL else 1

    def body(
        self, *, model: str, output_limit: int | None, kind: Kind, live: Live = "usage", salt: str | None = None
    ) -> bytes:
        """The body for a backend: this model's name there, at most `output_limit` tokens per answer, usage asked for.

        Changed are only `model`, the limits and what must not exceed them, on streams what makes the backend count,
        `store` and `cache_salt`; DROPPED members are left out. Every other value is sent as it came, in its place.
        `live` and `salt` (up to 128 characters without @, / and \\) are for vLLM alone.
        """
        changed: dict[str, bytes] = {"model": msgspec.json.encode(model)}
        if output_limit is not None:
            changed |= self._limits(output_limit)
        if self.stream and self.endpoint in SEVERAL:
            changed |= self._counting(kind, live)
        if kind == "vllm":
            changed |= self._ours(salt)
        members = {name: value for name, value in self.members.items() if name not in DROPPED} | changed
        return write_object(members)

    def _limits(self, limit: int) -> dict[str, bytes]:
        names = LIMITS.get(self.endpoint, ())
        sent = [name for name in names if given(self.members, name)]
        if not sent or self.endpoint == "completions":
            # completions knows no max_completion_tokens: alone, it would be passed over
            sent.extend(names[:1])
        return dict.fromkeys(sent, b"%d" % limit) | self._below(limit)

    def _below(self, limit: int) -> dict[str, bytes]:
        """What the engine refuses above its limit, lowered where the limit was."""
        lowered: dict[str, bytes] = {}
        if self.asked_output is not None and limit >= self.asked_output:
            return lowered
        if (whole(self.members, "min_tokens", 0) or 0) > limit:
            lowered["min_tokens"] = b"%d" % limit
        if self.endpoint == "messages" and (_thinking_budget(self.members) or 0) >= limit:
            lowered["thinking"] = (
                write_object({**object_of(self.members, "thinking"), "budget_tokens": b"%d" % (limit - 1)})
                if limit > LEAST_THINKING
                else b'{"type":"adaptive"}'
            )
        return lowered

    def _counting(self, kind: Kind, live: Live) -> dict[str, bytes]:
        changed: dict[str, bytes] = {}
        if live == "nothing":
            return changed
        if kind == "vllm" and live == "token_ids" and not self.wants_token_ids:
            changed["return_token_ids"] = b"true"
        options = object_of(self.members, "stream_options")
        running = kind == "vllm" and live == "usage"
        asked = ("include_usage", "continuous_usage_stats") if running else ("include_usage",)
        if not all(options.get(name) == TRUE for name in asked):
            changed["stream_options"] = write_object({**options, **dict.fromkeys(asked, b"true")})
        return changed

    def _ours(self, salt: str | None) -> dict[str, bytes]:
        """What vLLM is told by us: nothing is kept there, and whose prefix cache is used."""
        ours: dict[str, bytes] = {}
        if self.endpoint == "responses":
            ours["store"] = b"false"
        if salt is not None:
            if given(self.members, "cache_salt"):
                # a salt of the client's own only divides its tenant's cache further
                salt = hashlib.sha256(f"{salt}/{text(self.members, 'cache_salt', _SALT)}".encode()).hexdigest()
            ours["cache_salt"] = msgspec.json.encode(salt)
        return ours


_SALT: Final = "a string, not an empty one"


def parse(endpoint: Endpoint, raw: bytes) -> Call:
    """Reads and checks one body. Raises BadRequest, whatever the bytes; costs time linear in their number."""
    members = read_object(raw)
    _refuse(endpoint, members)
    _check_types(members)
    stream = flag(members, "stream")
    if stream and endpoint not in LIMITS:
        raise BadRequest(f"stream must be false or left out: {endpoint} is not streamed.", "stream")
    limits = [limit for name in LIMITS.get(endpoint, ()) if (limit := whole(members, name)) is not None]
    if endpoint == "messages":
        _check_thinking(members, limits)
    options = object_of(members, "stream_options") if endpoint in SEVERAL else {}
    wants_usage = flag(options, "include_usage", "stream_options.")
    live = flag(options, "continuous_usage_stats", "stream_options.")
    many, parts = MEASURES[endpoint](members)
    return Call(
        endpoint=endpoint,
        model=text(members, "model", "the name of a model, as a string"),
        stream=stream,
        wants_usage=stream and wants_usage,
        wants_live_usage=stream and wants_usage and live,
        wants_token_ids=flag(members, "return_token_ids"),
        prompts=many,
        choices=_choices(members) if endpoint in SEVERAL else 1,
        asked_output=max(limits, default=None),
        prompt=parts,
        members=members,
    )


MEASURES: Final[dict[Endpoint, Callable[[Members], tuple[int, PromptParts]]]] = {
    "chat": prompts.of_chat,
    "completions": prompts.of_completions,
    "embeddings": prompts.of_embeddings,
    "responses": prompts.of_responses,
    "messages": prompts.of_messages,
    "rerank": prompts.of_rerank,
    "score": prompts.of_score,
}


def _choices(members: Members) -> int:
    return max(whole(members, "n") or 1, whole(members, "best_of") or 1)


def _refuse(endpoint: Endpoint, members: Members) -> None:
    reasons = {**REFUSED, "prompt": REFUSED_PROMPT} if endpoint == "responses" else REFUSED
    for name in reasons.keys() & members.keys():
        if members[name] not in (FALSE, NULL):
            raise BadRequest(f"This cannot be metered: {reasons[name]}.", name)
    if members.get("padding", NULL) not in (NULL, _NOT_PADDED):
        raise BadRequest("This cannot be metered: padding fills the prompt up: leave padding out.", "padding")
    if TRANSFERS & object_of(members, "vllm_xargs").keys():
        raise BadRequest("This cannot be metered: it would send the engine to another machine.", "vllm_xargs")
    if endpoint in TOOLS:
        _refuse_tools(members, TOOLS[endpoint])


_NOT_PADDED: Final = msgspec.Raw(b'"do_not_pad"')


def _refuse_tools(members: Members, offered: tuple[str, ...]) -> None:
    for kind in prompts.kinds(members, "tools"):
        if kind is not None and kind not in offered:
            raise BadRequest(
                f"Tools of the type {kind[:100]} cannot be metered, the engine runs them by itself: use function tools.",
                "tools",
            )


def _check_types(members: Members) -> None:
    for name in FLAGS:
        flag(members, name)
    for name, least in NUMBERS.items():
        whole(members, name, least)
    if given(members, "cache_salt"):
        text(members, "cache_salt", _SALT)


def _check_thinking(members: Members, limits: list[int]) -> None:
    if not limits:
        raise BadRequest("max_tokens must be a whole number, at least 1.", "max_tokens")
    _thinking_budget(members)


def _thinking_budget(members: Members) -> int | None:
    return whole(object_of(members, "thinking"), "budget_tokens", 1, "thinking.")
