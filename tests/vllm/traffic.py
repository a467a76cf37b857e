"""Two hundred mixed requests as the official `openai` client sends them, and what each one got."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

from openai import OpenAI

from tests.vllm.engine import END_TOKEN

ID_HEADER = "x-weir-request-id"
FINISHED, HUNG_UP = 160, 40
PARALLEL = 8
STEP_MS = 60

USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
LIVE: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
AT_ONCE: dict[str, Any] = {"logit_bias": {str(END_TOKEN): 100}}
ON: dict[str, Any] = {"extra_body": {"ignore_eos": True}}

WORDS = "A class definition binds a name to a namespace of functions."
TOPICS = [WORDS, "Generators yield.", "The with statement wraps a block in methods of a context manager."]
IDS = [55, 265, 433, 372]
LONG = WORDS * 40  # several blocks of the engine's prefix cache: seen again, it is cached


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: which call of the client and with which arguments, `streamed` or plain."""

    kind: str
    endpoint: str
    arguments: dict[str, Any]
    streamed: bool

    @property
    def choices(self) -> int:
        """Answers that are made at the same time, one for each of `n` and each prompt."""
        prompt = self.arguments.get("prompt", "")
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        return int(self.arguments.get("n", 1)) * (len(prompt) if several else 1)

    @property
    def wants_usage(self) -> bool:
        return not self.streamed or "stream_options" in self.arguments


@dataclass(frozen=True, slots=True)
class Seen:
    """What the client saw: the request's id, the last usage it was told, and how many events it read."""

    ask: Ask
    request_id: str
    usage: tuple[int, int, int] | None
    events: int = 0


def chat(kind: str, streamed: bool = False, content: str = WORDS, **arguments: Any) -> Ask:
    return Ask(kind, "chat", {"messages": [{"role": "user", "content": content}], **arguments}, streamed)


def completion(kind: str, streamed: bool = False, prompt: Any = WORDS, **arguments: Any) -> Ask:
    return Ask(kind, "completions", {"prompt": prompt, **arguments}, streamed)


def _dialogue(size: int) -> list[dict[str, str]]:
    turns = [("system", "Be brief."), ("user", TOPICS[0]), ("assistant", "Good."), ("user", TOPICS[1] * size)]
    return [{"role": role, "content": content} for role, content in turns]


def _finishing(size: int) -> list[Ask]:
    """One of each shape; `size` (1, 2 …) makes the rounds differ in length."""
    limit: dict[str, Any] = {"max_tokens": 12 * size}
    return [
        chat("chat", **limit),
        chat("chat, n=2", n=2, **limit, **ON),
        chat("chat, ends at once", **limit, **AT_ONCE),
        chat("chat, one token", max_tokens=1),
        chat("chat, no limit", **AT_ONCE),
        chat("chat, stop string", stop=["e", "\n"], max_tokens=64),
        chat("chat, long prompt again", content=LONG, **limit),
        chat("chat, letters of the world", content="naïve 日本語 🙂 Ωμέγα " * size, **limit),
        Ask("chat, dialogue", "chat", {"messages": _dialogue(size), "max_completion_tokens": 9 * size}, streamed=False),
        chat("chat, streamed", streamed=True, **limit, **ON),
        chat("chat, streamed, usage", streamed=True, **limit, **ON, **USAGE),
        chat("chat, streamed, live usage", streamed=True, **limit, **LIVE),
        chat("chat, streamed, ends at once", streamed=True, **limit, **AT_ONCE),
        chat("chat, streamed, n=2", streamed=True, n=2, **limit, **ON),
        chat("chat, streamed, n=3, usage", streamed=True, n=3, **limit, **USAGE),
        chat("chat, streamed, long prompt", streamed=True, content=LONG, **limit, **USAGE),
        completion("text", **limit),
        completion("text, n=2", n=2, **limit, **ON),
        completion("text, three prompts", prompt=TOPICS, **limit),
        completion("text, token ids", prompt=IDS * size, **limit),
        completion("text, lists of token ids", prompt=[IDS, IDS[:2]], n=2, **limit),
        completion("text, streamed", streamed=True, **limit),
        completion("text, streamed, usage", streamed=True, **limit, **ON, **USAGE),
        completion("text, streamed, prompts", streamed=True, prompt=TOPICS, **limit),
        completion("text, streamed, prompts, n=2, usage", streamed=True, prompt=TOPICS, n=2, **limit, **ON, **USAGE),
        completion("text, streamed, token ids", streamed=True, prompt=IDS, **limit, **LIVE),
        completion("text, streamed, stop string", streamed=True, stop="e", max_tokens=64),
    ]


def _slow(choices: int) -> dict[str, Any]:
    """A stream of minutes; its choices share a step and its STEP_MS (pace.py)."""
    pace = {"step_ms": STEP_MS // choices}
    return {"max_tokens": 900, "extra_body": {"ignore_eos": True, "vllm_xargs": pace}}


def _endless(_size: int) -> list[Ask]:
    return [
        chat("chat", streamed=True, **_slow(1)),
        chat("chat, usage", streamed=True, **_slow(1), **USAGE),
        chat("chat, n=2", streamed=True, n=2, **_slow(2)),
        chat("chat, n=4, usage", streamed=True, n=4, **_slow(4), **USAGE),
        completion("text", streamed=True, **_slow(1)),
        completion("text, live usage", streamed=True, **_slow(1), **LIVE),
        completion("text, token ids", streamed=True, prompt=IDS, **_slow(1)),
        completion("text, three prompts", streamed=True, prompt=TOPICS, **_slow(3)),
    ]


def _rounds(one_round: Any) -> Iterator[Ask]:
    size = 0
    while True:
        size += 1
        yield from one_round(size)


def finishing() -> list[Ask]:
    return list(islice(_rounds(_finishing), FINISHED))


def endless() -> list[tuple[Ask, int]]:
    """Streams far longer than anybody will read, and after how many events the client leaves.

    Always after every choice has begun: what the engine has prefilled by then is known.
    """
    patience = (1, 2, 3, 5, 8, 13, 21)  # coprime with the number of shapes
    asks = islice(_rounds(_endless), HUNG_UP)
    return [(ask, _begun(ask) + patience[i % len(patience)]) for i, ask in enumerate(asks)]


def _begun(ask: Ask) -> int:
    """Events after which each of several choices has shown two tokens (chat: after its role)."""
    return 0 if ask.choices == 1 else 3 * ask.choices


class Caller:
    """The official client, told to try everything only once."""

    def __init__(self, base_url: str, key: str, model: str) -> None:
        self._client = OpenAI(base_url=f"{base_url}/v1", api_key=key, max_retries=0, timeout=60)
        self._model = model

    def send_all(self, asks: list[Ask]) -> list[Seen]:
        with ThreadPoolExecutor(PARALLEL) as pool:
            return list(pool.map(self.send, asks))

    def send(self, ask: Ask) -> Seen:
        """Reads the answer to its end."""
        answer = self._open(ask)
        if not ask.streamed:
            return Seen(ask, _id(answer), _numbers(answer.parse().usage))
        usages, events = [], 0
        for event in answer.parse():
            events += 1
            usages.append(_numbers(event.usage))
        return Seen(ask, _id(answer), next((u for u in reversed(usages) if u), None), events)

    def hang_up(self, ask: Ask, events: int) -> Seen:
        """Reads `events` events of a stream and closes the connection."""
        answer = self._open(ask)
        stream = answer.parse()
        read = [_numbers(event.usage) for event in islice(stream, events)]
        stream.close()
        return Seen(ask, _id(answer), read[-1], len(read))

    def _open(self, ask: Ask) -> Any:
        resource = self._client.chat.completions if ask.endpoint == "chat" else self._client.completions
        create: Any = resource.with_raw_response.create
        return create(model=self._model, stream=ask.streamed, **ask.arguments)

    def close(self) -> None:
        self._client.close()


def _id(answer: Any) -> str:
    return str(answer.headers.get(ID_HEADER, ""))


def _numbers(usage: Any) -> tuple[int, int, int] | None:
    return (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) if usage else None
