"""What was asked of the simulated worker: bodies into calls, and vLLM's words for what it refuses. Pure.

Messages and shapes are those vLLM 0.32.0 gives; of pydantic's coercions only the usual ones are there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from engine_adapter.simulator import tokens

MAX_CHOICES = 16_384
DEFAULT_MAX_TOKENS = 128

_TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError", 503: "Service Unavailable"}
BUSY = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
INCOMPATIBLE = (
    "continue_final_message and add_generation_prompt are not compatible. Use continue_final_message when you want the "
    "model to continue the final message, and add_generation_prompt when you want to add a header that will prompt it to "
    "start a new assistant message instead."
)


class Refused(Exception):
    """An answer of 4xx or 5xx; `body` is its JSON."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.body = body


def error(status: int, message: str, param: str | None = None, kind: str | None = None) -> Refused:
    fields = {"message": message, "type": kind or _TYPES.get(status, "Error"), "param": param, "code": status}
    return Refused(status, dumps({"error": fields}))


def in_messages(refused: Refused) -> Refused:
    """As /v1/messages says what is not a mistake in the body's form."""
    said = json.loads(refused.body).get("error")
    if not isinstance(said, dict) or said.get("type") == "Bad Request":
        return refused
    wrong = {"type": "error", "error": {"type": said["type"], "message": said["message"]}}
    return Refused(refused.status, dumps(wrong))


def scripted(status: int) -> Refused:
    """What the fault `status:CODE` answers: vLLM's own body where there is one."""
    if status == 401:
        return Refused(401, b'{"error":"Unauthorized"}')
    return error(status, BUSY if status == 503 else f"Simulated error {status}.")


def dumps(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its size in tokens, where the reply to it begins, and its text in segments, or its ids."""

    size: int
    place: int
    segments: list[str]
    ids: list[int] | None = None

    @property
    def text(self) -> str:
        return "".join(self.segments)

    @property
    def tokens(self) -> list[str]:
        return [token for segment in self.segments for token in tokens.split(segment)]


@dataclass(frozen=True, slots=True)
class Call:
    """A request to generate. `limit` tokens are made for each of `n` choices of each prompt."""

    chat: bool
    prompts: list[Prompt]
    n: int
    limit: int
    shown: bool
    """False: max_tokens 0 with echo; the one token that is made is not shown"""
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_ids: bool
    echo: bool
    request_id: str | None
    asked: dict[str, Any]
    """the body"""

    @property
    def prompt_tokens(self) -> int:
        """As the usage says it: every prompt once."""
        return sum(prompt.size for prompt in self.prompts)

    @property
    def choices(self) -> int:
        return self.n * len(self.prompts)


def read_body(content_type: bytes, body: bytes) -> dict[str, Any]:
    """The body as JSON. Raises Refused."""
    if content_type.partition(b";")[0].strip().lower() != b"application/json":
        raise _invalid("Unsupported Media Type: Only 'application/json' is allowed", None)
    if not body:
        raise _validation("missing", "body", "Field required", "None")
    try:
        value = json.loads(body)
    except json.JSONDecodeError as problem:
        detail = f"{{'type': 'json_invalid', 'loc': 'body.{problem.pos}', 'msg': 'JSON decode error', "
        detail += f"'input': '<dict of 0 items>', 'ctx': {{'error': '{problem.msg}'}}}}"
        raise _invalid(detail, f"body.{problem.pos}") from None
    except (UnicodeDecodeError, RecursionError):
        raise Refused(400, b'{"detail":"There was an error parsing the body"}') from None
    if value is None:
        raise _validation("missing", "body", "Field required", "None")
    if not isinstance(value, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise _validation("model_attributes_type", "body", message, _shown(value))
    return value


def read_model(body: dict[str, Any], served: str) -> None:
    """vLLM takes a missing, null or empty model for its own."""
    model = body.get("model")
    if model and model != served:
        raise error(404, f"The model `{model}` does not exist. Valid aliases: {served}.", "model")


def read_chat(body: dict[str, Any], context: int) -> Call:
    if "messages" not in body:
        raise _validation("missing", "body.messages", "Field required", _shown(body))
    prompt = chat_prompt(body)
    asked = _whole(body, "max_completion_tokens")
    if asked is None:
        asked = _whole(body, "max_tokens")
    return _call(body, [prompt], asked, context, chat=True, echo=False)


def read_completion(body: dict[str, Any], context: int) -> Call:
    echo = _flag(body, "echo")
    return _call(body, read_prompts(body.get("prompt")), _whole(body, "max_tokens"), context, chat=False, echo=echo)


def read_response(body: dict[str, Any], context: int) -> Call:
    if body.get("input") is None:
        raise _validation("missing", "body.input", "Field required", _shown(body))
    prompt = chat_prompt({"messages": response_messages(body), "tools": body.get("tools")})
    return _call(body, [prompt], _whole(body, "max_output_tokens"), context, chat=True, echo=False)


def response_messages(body: dict[str, Any]) -> list[Any]:
    """What Responses calls instructions and input, as messages."""
    said = body["input"]
    items = [{"role": "user", "content": said}] if isinstance(said, str) else said
    if not isinstance(items, list):
        raise _validation("list_type", "body.input", "Input should be a valid list", _shown(said))
    instructions = body.get("instructions")
    start = [{"role": "system", "content": instructions}] if isinstance(instructions, str) else []
    return [*start, *map(_response_item, items)]


def _response_item(item: Any) -> Any:
    """A message; a tool's output is one of the tool's, a call of it one of the assistant's."""
    match item:
        case {"type": "function_call_output", "output": output}:
            return {"role": "tool", "content": output if isinstance(output, str) else json.dumps(output)}
        case {"type": "function_call", "name": name, "arguments": arguments}:
            return {"role": "assistant", "content": f"{name} {arguments}"}
        case {"content": list(parts)}:
            texts = [{"type": "text", "text": part["text"]} if "text" in part else part for part in parts]
            return {**item, "content": texts}
        case _:
            return item


def read_message(body: dict[str, Any], context: int) -> Call:
    asked = _whole(body, "max_tokens")
    if asked is None:
        raise _validation("missing", "body.max_tokens", "Field required", _shown(body))
    if asked < 1:
        detail = "{'type': 'value_error', 'loc': 'body.max_tokens', 'msg': 'Value error, max_tokens must be positive', "
        detail += f"'input': '{asked}', 'ctx': {{'error': ValueError('max_tokens must be positive')}}}}"
        raise _invalid(detail, "body.max_tokens")
    return _call(body, [message_prompt(body)], asked, context, chat=True, echo=False)


def message_prompt(body: dict[str, Any]) -> Prompt:
    """Anthropic's messages through the chat template."""
    if not isinstance(body.get("messages"), list):
        raise _validation("missing", "body.messages", "Field required", _shown(body))
    system = body.get("system")
    start = [{"role": "system", "content": system}] if system else []
    messages = [*start, *(_flattened(message) for message in body["messages"])]
    return chat_prompt({"messages": messages, "tools": body.get("tools")})


def _flattened(message: Any) -> Any:
    """A message whose tool calls and their results are text."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    return {**message, "content": [_block(block) for block in message["content"]]}


def _block(block: Any) -> Any:
    match block:
        case {"type": "tool_use", "name": name, "input": given}:
            return {"type": "text", "text": f"{name} {json.dumps(given)}"}
        case {"type": "tool_result"}:
            content = block.get("content", "")
            return {"type": "text", "text": content if isinstance(content, str) else json.dumps(content)}
        case {"type": "thinking", "thinking": thought}:
            return {"type": "text", "text": thought}
        case _:
            return block


def read_pairs(body: dict[str, Any], context: int) -> list[Prompt]:
    """Score: each text beside each other's. The two sides go by several names."""
    first, second = (_side(body, names) for names in (("text_1", "queries"), ("text_2", "documents", "items")))
    if len(first) not in (1, len(second)):
        raise error(400, "Input lengths must be either 1:1, 1:N or N:N")
    pairs = zip(first * len(second) if len(first) == 1 else first, second, strict=True)
    return [_pair(one, other, context) for one, other in pairs]


def read_rerank(body: dict[str, Any], context: int) -> list[Prompt]:
    (query,), documents = _side(body, ("query",)), _side(body, ("documents",))
    return [_pair(query, document, context) for document in documents]


def _side(body: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    said = next((body[name] for name in names if body.get(name) is not None), None)
    texts = [said] if isinstance(said, str) else said
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise _validation("missing", f"body.{names[0]}", "Field required", _shown(body))
    return texts


def _pair(one: str, other: str, context: int) -> Prompt:
    """Both texts, with a token before, between and after them."""
    prompt = Prompt(tokens.count(one) + tokens.count(other) + 3, tokens.place_after(other), [one, "\n", other])
    fits(prompt, context)
    return prompt


def read_embedding(body: dict[str, Any], context: int) -> list[Prompt]:
    if "messages" in body:
        prompts = [chat_prompt(body)]
    elif body.get("input") == "":
        raise error(400, "The decoder prompt cannot be empty")
    else:
        prompts = read_prompts(body.get("input"))
    for prompt in prompts:
        fits(prompt, context)
    return prompts


def read_tokenize(body: dict[str, Any]) -> list[str]:
    """The tokens of a prompt, or of messages through the chat template. Not bounded by the context."""
    if isinstance(body.get("prompt"), str):
        return tokens.split(body["prompt"])
    if "messages" in body:
        return chat_prompt(body).tokens
    raise _validation("missing", "body.prompt", "Field required", _shown(body))


def read_detokenize(body: dict[str, Any]) -> list[int]:
    ids = body.get("tokens")
    if isinstance(ids, list) and _is_ids(ids):
        return ids
    raise _validation("list_type", "body.tokens", "Input should be a valid list", _shown(ids))


def _call(
    body: dict[str, Any], prompts: list[Prompt], asked: int | None, context: int, *, chat: bool, echo: bool
) -> Call:
    stream, (include_usage, continuous) = _flag(body, "stream"), _stream_options(body)
    shown = not (echo and asked == 0)
    limit = _limit(prompts, asked if shown else 1, context)
    request_id = body.get("request_id")
    return Call(
        chat=chat,
        prompts=prompts,
        n=_choices(body),
        limit=limit,
        shown=shown,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and continuous,
        return_ids=_flag(body, "return_token_ids"),
        echo=echo,
        request_id=request_id if isinstance(request_id, str) else None,
        asked=body,
    )


def _limit(prompts: list[Prompt], asked: int | None, context: int) -> int:
    """Asked, cut without a word to what is left of the context; refused only beyond the whole context."""
    for prompt in prompts:
        fits(prompt, context)
    if asked is not None and asked > context:
        message = (
            f"max_tokens={asked} cannot be greater than max_model_len={context}. Please request fewer output tokens."
        )
        raise error(400, f"{message} (parameter=max_tokens, value={asked})", "max_tokens")
    left = context - max(prompt.size for prompt in prompts)
    limit = min(DEFAULT_MAX_TOKENS if asked is None else asked, left)
    if limit < 1:
        raise error(
            400, f"max_tokens must be at least 1, got {limit}. (parameter=max_tokens, value={limit})", "max_tokens"
        )
    return limit


def fits(prompt: Prompt, context: int) -> None:
    """Raises Refused for a prompt beyond the context. Of text vLLM only says that it is too long, not by how much."""
    if prompt.size > context:
        size = context + 1 if prompt.ids is None else prompt.size
        amount = f"at least {size}" if prompt.ids is None else size
        message = (
            f"This model's maximum context length is {context} tokens. However, your prompt contains {amount} input tokens, "
            "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
            f"(parameter=input_tokens, value={size})"
        )
        raise error(400, message, "input_tokens")


def chat_prompt(body: dict[str, Any]) -> Prompt:
    """Messages through the chat template: 5 tokens around each message and 3 before the reply, besides the words."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise _validation("list_type", "body.messages", "Input should be a valid list", _shown(messages))
    if not messages:
        raise error(400, "Cannot apply chat template to an empty conversation. Provide at least one message.")
    segments: list[str] = []
    for role, text in [*_tools(body), *map(_message, messages)]:
        segments += ["<|im_start|>", role, "\n", text, "<|im_end|>", "\n"]
    generate, going_on = body.get("add_generation_prompt", True), bool(body.get("continue_final_message"))
    if generate and going_on:
        raise error(400, INCOMPATIBLE)
    if generate:
        segments += ["<|im_start|>", "assistant", "\n"]
    if going_on:
        segments = segments[:-2]
    return Prompt(sum(map(tokens.count, segments)), _reply_place(messages[-1], going_on), segments)


def _reply_place(message: Any, going_on: bool) -> int:
    text = _message(message)[1]
    return tokens.place_after(text if going_on else f"{text} <|im_end|>")


def _message(message: Any) -> tuple[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _validation("missing", "body.messages.0.role", "Field required", _shown(message))
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_part(part) for part in content)
    if content is None and message["role"] == "assistant":
        content = ""
    if not isinstance(content, str):
        raise _validation("string_type", "body.messages.0.content", "Input should be a valid string", _shown(content))
    return message["role"], content


def _part(part: Any) -> str:
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise error(400, "sim is not a multimodal model")


def _tools(body: dict[str, Any]) -> list[tuple[str, str]]:
    return [("system", json.dumps(body["tools"]))] if body.get("tools") else []


def read_prompts(value: Any) -> list[Prompt]:
    """A string, a list of strings, of token ids, or of lists of token ids."""
    if value is None or value == "":
        raise error(400, "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)", "prompt")
    if value == []:
        raise error(400, "You must pass at least one prompt")
    items = value if isinstance(value, list) and not _is_ids(value) else [value]
    return [_prompt(item) for item in items]


def _prompt(item: Any) -> Prompt:
    if isinstance(item, str):
        return Prompt(tokens.count(item), tokens.place_after(item), [item])
    if _is_ids(item) and item:
        return Prompt(len(item), tokens.place_after_id(item[-1]), [], item)
    raise _validation("string_type", "body.prompt", "Input should be a valid string", _shown(item))


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int for number in value)


def _choices(body: dict[str, Any]) -> int:
    n = _whole(body, "n")
    n = 1 if n is None else n
    if n < 1:
        raise error(400, f"n must be at least 1, got {n}.")
    if n > MAX_CHOICES:
        message = f"n must be at most {MAX_CHOICES}, got {n}."
        raise error(400, f"{message} To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable.")
    if n > 1 and body.get("temperature") == 0:
        raise error(400, f"n must be 1 when using greedy sampling, got {n}.")
    return n


def _stream_options(body: dict[str, Any]) -> tuple[bool, bool]:
    options = body.get("stream_options")
    if options is None:
        return False, False
    if not isinstance(options, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise _validation("model_attributes_type", "body.stream_options", message, _shown(options))
    if not _flag(body, "stream"):
        message = "Stream options can only be defined when `stream=True`. (parameter=stream_options)"
        raise error(400, message, "stream_options")
    return _flag(options, "include_usage"), _flag(options, "continuous_usage_stats")


def _whole(body: dict[str, Any], name: str) -> int | None:
    """An integer the way pydantic reads one."""
    value = body.get(name)
    if value is None or type(value) is int:
        return value
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    if isinstance(value, float):
        message = "Input should be a valid integer, got a number with a fractional part"
        raise _validation("int_from_float", f"body.{name}", message, _shown(value))
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            message = "Input should be a valid integer, unable to parse string as an integer"
            raise _validation("int_parsing", f"body.{name}", message, value) from None
    raise _validation("int_type", f"body.{name}", "Input should be a valid integer", _shown(value))


def _flag(body: dict[str, Any], name: str) -> bool:
    """A boolean the way pydantic reads one; null is false."""
    value = body.get(name)
    if value in (None, False, 0, "false", "no", "off", "0", "f", "n"):
        return False
    if value in (True, 1, "true", "yes", "on", "1", "t", "y"):
        return True
    message = "Input should be a valid boolean, unable to interpret input"
    raise _validation("bool_parsing", f"body.{name}", message, _shown(value))


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)


def _validation(kind: str, loc: str, message: str, shown: str) -> Refused:
    return _invalid(f"{{'type': '{kind}', 'loc': '{loc}', 'msg': '{message}', 'input': '{shown}'}}", loc)


def _invalid(detail: str, param: str | None) -> Refused:
    return error(400, f"1 validation error:\n  {detail}", param, "Bad Request")
