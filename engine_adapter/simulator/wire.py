"""The simulated worker's answers, byte for byte as vLLM 0.32.0 writes them: key order, nulls, no blanks. Pure.

An event of a stream is one chunk of the chunked coding. What is the same in every event of an answer is put together once.
"""

from __future__ import annotations

import base64
import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from zlib import crc32

from engine_adapter.simulator.calls import Call, Prompt, dumps
from engine_adapter.simulator.tokens import WORDS, Vocabulary, word_id

VERSION = "0.32.0"
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
KEEP_ALIVE = b"e\r\n: keep-alive\n\n\r\n"
GARBAGE = b"\x16\x03\x01 this is not HTTP at all\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
INVALID = b"Invalid HTTP request received."
DIMENSIONS = 16

_TEXTS = [dumps(" " + word) for word in WORDS]
_NO_DETAILS = b',"prompt_tokens_details":null,"completion_tokens_details":null'


def fingerprint(model: str) -> bytes:
    return b"vllm-%b-%08x" % (VERSION.encode(), crc32(model.encode()))


def head(status: int, size: int | None, content_type: bytes | None, *, closing: bool, extra: bytes = b"") -> bytes:
    """`size` None: a chunked body follows."""
    lines = [
        b"HTTP/1.1 %d %b" % (status, _phrase(status)),
        b"date: " + formatdate(usegmt=True).encode(),
        b"server: uvicorn",
    ]
    lines += [extra] if extra else []
    lines += [b"content-length: %d" % size] if size is not None else []
    lines += [b"content-type: " + content_type] if content_type else []
    lines.append(b"vary: Origin")
    lines += [b"connection: close"] if closing else []
    lines += [b"transfer-encoding: chunked"] if size is None else []
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _phrase(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""


def event(data: bytes) -> bytes:
    return b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data)


def engine_dead(message: str) -> bytes:
    """The error inside a 200. This one object vLLM writes with blanks."""
    return json.dumps(
        {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}
    ).encode()


def counted(prompt: int, completion: int, details: bytes = b"") -> bytes:
    """A usage object."""
    sums = prompt, prompt + completion, completion
    return b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d%b}' % (*sums, details)


def named_event(name: bytes, data: bytes) -> bytes:
    return b"%x\r\nevent: %b\ndata: %b\n\n\r\n" % (len(name) + len(data) + 16, name, data)


class Words(ABC):
    """An answer of words, whatever its shape; `ids` gives token ids, asked for only when they are shown."""

    end = DONE
    """what comes after a stream's last event"""

    def __init__(
        self, call: Call, name: bytes, created: int, model: str, ids: Callable[[list[str]], list[int]], usage: bool
    ) -> None:
        self.call = call
        self._name = name.decode("latin-1")
        self._created = created
        self._model = model
        self._ids = ids
        self._usage = usage

    @abstractmethod
    def opening(self, choice: int) -> bytes:
        """What comes before the first token of a choice, in the same moment."""

    @abstractmethod
    def token(self, choice: int, made: int, finish: str | None) -> bytes:
        """The event of the `made`-th token (from 1) of a choice."""

    @abstractmethod
    def closing(self, made: int, finish: str) -> bytes:
        """What comes after the last token of all choices, of `made` tokens each (0: not even the opening came)."""

    @abstractmethod
    def whole(self, made: int, finish: str) -> bytes:
        """The answer in one piece, choices of `made` tokens each."""

    def broken(self, message: str) -> bytes:
        """The engine died within the stream: how it ends."""
        return event(engine_dead(message)) + self.end

    def _word(self, choice: int, made: int) -> int:
        prompt = self._prompt(choice)
        return (prompt.place + 7 * (choice % self.call.n) + made - 1) % len(WORDS)

    def _prompt(self, choice: int) -> Prompt:
        return self.call.prompts[choice // self.call.n]

    def _text(self, choice: int, made: int) -> str:
        return "".join(" " + WORDS[self._word(choice, number)] for number in range(1, made + 1))


class ChunkWire(Words):
    """What chat and completions have in common."""

    kind: bytes
    whole_kind: bytes
    live_details: bytes

    def __init__(
        self, call: Call, name: bytes, created: int, model: str, ids: Callable[[list[str]], list[int]], usage: bool
    ) -> None:
        super().__init__(call, name, created, model, ids, usage)
        self._print = fingerprint(model)
        self._start = b'{"id":%b,"object":"%b","created":%d,"model":%b,"choices":['
        self._fields = dumps(self._name), created, dumps(model)
        self._event_start = self._open(self.kind)

    def _open(self, kind: bytes) -> bytes:
        name, created, model = self._fields
        return self._start % (name, kind, created, model)

    # streamed

    def closing(self, made: int, finish: str) -> bytes:
        """The last event with the usage, if it was asked for."""
        if not (made and self.call.include_usage and self._usage):
            return b""
        usage = counted(self.call.prompt_tokens, made * self.call.choices)
        return event(b'%b],"usage":%b,"system_fingerprint":"%b"}' % (self._event_start, usage, self._print))

    def _event(self, body: bytes, prompt: Prompt, made: int, tail: bytes = b"") -> bytes:
        usage = b""
        if self.call.continuous_usage and self._usage:
            usage = b',"usage":' + counted(prompt.size, made, self.live_details)
        return event(b"%b%b]%b%b}" % (self._event_start, body, usage, tail))

    def _finish(self, finish: str | None) -> tuple[bytes, bytes]:
        """The finish_reason of a chunk, and what its event has at its end."""
        if finish is None:
            return b"null", b""
        tail = b"" if self.call.include_usage and self._usage else b',"system_fingerprint":"%b"' % self._print
        return b'"%b"' % finish.encode(), tail

    def _token_ids(self, choice: int, made: int) -> bytes:
        return b"[%d]" % word_id(self._word(choice, made)) if self.call.return_ids else b"null"

    def _prompt_ids(self, prompt: Prompt) -> bytes:
        return dumps(prompt.ids if prompt.ids is not None else self._ids(prompt.tokens))

    # in one piece

    def whole(self, made: int, finish: str) -> bytes:
        choices = b",".join(self._whole_choice(choice, made, finish) for choice in range(self.call.choices))
        usage = counted(self.call.prompt_tokens, made * self.call.choices, _NO_DETAILS) if self._usage else b"null"
        middle = b'],"service_tier":null,"system_fingerprint":"%b","usage":%b' % (self._print, usage)
        return self._open(self.whole_kind) + choices + middle + self._whole_tail()

    @abstractmethod
    def _whole_choice(self, choice: int, made: int, finish: str) -> bytes: ...

    @abstractmethod
    def _whole_tail(self) -> bytes: ...

    def _all_ids(self, choice: int, made: int) -> bytes:
        if not self.call.return_ids:
            return b"null"
        return dumps([word_id(self._word(choice, number)) for number in range(1, made + 1)])


class ChatWire(ChunkWire):
    kind = b"chat.completion.chunk"
    whole_kind = b"chat.completion"
    live_details = b',"completion_tokens_details":null'

    def opening(self, choice: int) -> bytes:
        body = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % choice
        prompt = self._prompt(choice)
        ids = self._prompt_ids(prompt) if self.call.return_ids else b"null"
        return self._event(body, prompt, 0, b',"prompt_token_ids":%b,"prompt_text":null' % ids)

    def token(self, choice: int, made: int, finish: str | None) -> bytes:
        reason, tail = self._finish(finish)
        stop = b"" if finish is None else b',"stop_reason":null'
        text, ids = _TEXTS[self._word(choice, made)], self._token_ids(choice, made)
        body = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":%b%b,"token_ids":%b}' % (
            (choice, text, reason, stop, ids)
        )
        return self._event(body, self._prompt(choice), made, tail)

    def _whole_choice(self, choice: int, made: int, finish: str) -> bytes:
        return (
            b'{"index":%d,"message":{"role":"assistant","content":%b,"refusal":null,"annotations":null,"audio":null,'
            b'"function_call":null,"reasoning":null},"logprobs":null,"finish_reason":"%b","stop_reason":null,"token_ids":%b,'
            b'"routed_experts":null}'
        ) % (choice, dumps(self._text(choice, made)), finish.encode(), self._all_ids(choice, made))

    def _whole_tail(self) -> bytes:
        ids = self._prompt_ids(self.call.prompts[0]) if self.call.return_ids else b"null"
        return (
            b',"prompt_logprobs":null,"prompt_token_ids":%b,"prompt_text":null,"kv_transfer_params":null,'
            b'"ec_transfer_params":null,"metrics":null}'
        ) % ids


class CompletionWire(ChunkWire):
    kind = whole_kind = b"text_completion"
    live_details = b""

    def opening(self, choice: int) -> bytes:
        return b""

    def token(self, choice: int, made: int, finish: str | None) -> bytes:
        reason, tail = self._finish(finish)
        prompt, first = self._prompt(choice), made == 1
        text = " " + WORDS[self._word(choice, made)] if self.call.shown else ""
        if first and self.call.echo and not self.call.return_ids:
            text = prompt.text + text
        shows_prompt = first and (self.call.echo or self.call.return_ids)
        body = (
            b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b,"stop_reason":null,"prompt_token_ids":%b,"token_ids":%b}'
            % (
                choice,
                dumps(text),
                reason,
                self._prompt_ids(prompt) if shows_prompt else b"null",
                self._token_ids(choice, made),
            )
        )
        return self._event(body, prompt, made, tail)

    def _whole_choice(self, choice: int, made: int, finish: str) -> bytes:
        prompt = self._prompt(choice)
        text = self._text(choice, made) if self.call.shown else ""
        return (
            b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":"%b","stop_reason":null,"token_ids":%b,'
            b'"prompt_logprobs":null,"prompt_token_ids":%b,"routed_experts":null}'
        ) % (
            choice,
            dumps(prompt.text + text if self.call.echo else text),
            finish.encode(),
            self._all_ids(choice, made),
            self._prompt_ids(prompt) if self.call.return_ids else b"null",
        )

    def _whole_tail(self) -> bytes:
        return b',"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}'


def embeddings(prompts: list[Prompt], name: str, created: int, model: str, *, as_base64: bool, usage: bool) -> bytes:
    """A vector of 16 numbers for each prompt, the same for the same text."""
    data = b",".join(
        b'{"index":%d,"object":"embedding","embedding":%b}' % (index, _vector(prompt, as_base64=as_base64))
        for index, prompt in enumerate(prompts)
    )
    total = counted(sum(prompt.size for prompt in prompts), 0, _NO_DETAILS) if usage else b"null"
    return b'{"id":%b,"object":"list","created":%d,"model":%b,"data":[%b],"usage":%b}' % (
        dumps(name),
        created,
        dumps(model),
        data,
        total,
    )


def _vector(prompt: Prompt, *, as_base64: bool) -> bytes:
    seed = repr(prompt.ids).encode() if prompt.ids is not None else prompt.text.encode("utf-8", "surrogatepass")
    numbers = [crc32(seed, place) / 2**31 - 1 for place in range(DIMENSIONS)]
    if as_base64:
        return dumps(base64.b64encode(struct.pack(f"<{DIMENSIONS}f", *numbers)).decode())
    return dumps(numbers)


def models(model: str, created: int, context: int) -> bytes:
    permission = {"id": f"modelperm-{crc32(model.encode()):016x}", "object": "model_permission", "created": created}
    permission |= {"allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True}
    permission |= {"allow_search_indices": False, "allow_view": True, "allow_fine_tuning": False}
    permission |= {"organization": "*", "group": None, "is_blocking": False}
    card = {"id": model, "object": "model", "created": created, "owned_by": "vllm", "root": model, "parent": None}
    return dumps({"object": "list", "data": [card | {"max_model_len": context, "permission": [permission]}]})


def tokenized(shown: list[str], vocabulary: Vocabulary, context: int, *, with_texts: bool) -> bytes:
    texts = shown if with_texts else None
    return dumps({"count": len(shown), "max_model_len": context, "tokens": vocabulary.ids(shown), "token_strs": texts})


# name: (type, help)
_METRICS = {
    "vllm:num_requests_running": ("gauge", "Number of requests in model execution batches."),
    "vllm:num_requests_waiting": ("gauge", "Number of requests waiting to be processed."),
    "vllm:kv_cache_usage_perc": ("gauge", "KV-cache usage. 1 means 100 percent usage."),
    "vllm:prompt_tokens_total": ("counter", "Number of prefill tokens processed."),
    "vllm:prompt_tokens_cached_total": ("counter", "Number of cached prompt tokens (local + external)."),
    "vllm:generation_tokens_total": ("counter", "Number of generation tokens processed."),
}


def metrics(model: str, values: Mapping[str, int], finished: Mapping[str, int]) -> bytes:
    """The text of /metrics: those of vLLM's names that say something of a simulated engine."""
    lines = []
    for name, (kind, words) in _METRICS.items():
        lines += [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
        lines.append(f'{name}{{engine="0",model_name="{model}"}} {float(values.get(name, 0))}')
    lines += ["# HELP vllm:request_success_total Count of successfully processed requests."]
    lines += ["# TYPE vllm:request_success_total counter"]
    for reason in ("stop", "length", "abort", "error", "repetition"):
        labels = f'engine="0",finished_reason="{reason}",model_name="{model}"'
        lines.append(f"vllm:request_success_total{{{labels}}} {float(finished.get(reason, 0))}")
    return ("\n".join(lines) + "\n").encode()
