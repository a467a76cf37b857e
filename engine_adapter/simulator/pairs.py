"""Answers of /v1/rerank and /v1/score: a number for each pair of texts, the same for the same pair. Pure.

Shapes: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

from engine_adapter.simulator.calls import Prompt, dumps


def scored(prompts: list[Prompt], name: str, created: int, model: str, *, usage: bool) -> bytes:
    data = [{"index": index, "object": "score", "score": _score(prompt)} for index, prompt in enumerate(prompts)]
    answer = {"id": name, "object": "list", "created": created, "model": model, "data": data}
    return dumps({**answer, "usage": _counted(prompts) | _DETAILS if usage else None})


def reranked(prompts: list[Prompt], asked: dict[str, Any], name: str, model: str, *, usage: bool) -> bytes:
    """The best first, at most `top_n` of them where that is asked."""
    documents = [asked["documents"]] if isinstance(asked["documents"], str) else asked["documents"]
    results = [
        {"index": index, "document": {"text": document, "multi_modal": None}, "relevance_score": _score(prompt)}
        for index, (document, prompt) in enumerate(zip(documents, prompts, strict=True))
    ]
    best = sorted(results, key=lambda result: -float(result["relevance_score"]))  # type: ignore[arg-type]
    top = asked.get("top_n") or len(best)
    return dumps({"id": name, "model": model, "usage": _counted(prompts) if usage else None, "results": best[:top]})


_DETAILS = {"completion_tokens": 0, "prompt_tokens_details": None}


def _counted(prompts: list[Prompt]) -> dict[str, Any]:
    total = sum(prompt.size for prompt in prompts)
    return {"prompt_tokens": total, "total_tokens": total}


def _score(prompt: Prompt) -> float:
    return crc32(prompt.text.encode("utf-8", "surrogatepass")) / 2**32
