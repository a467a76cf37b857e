"""Loaded by vLLM (`--logits-processors`): a request with `"vllm_xargs": {"step_ms": 50}` is waited with at every step.

The tiny model needs less than 2 ms for a step, a real one tens of them. Whether a meter is exact to one step when a
client hangs up can only be seen where a step takes longer than noticing it, on a busy machine too.
https://docs.vllm.ai/en/latest/features/custom_logitsprocs/
"""

from __future__ import annotations

import time

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor


class Pace(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False  # those that are get left out of greedy batches

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        seconds = (params.extra_args or {}).get("step_ms", 0) / 1000
        if not seconds:
            return None

        def wait(_output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            time.sleep(seconds)
            return logits

        return wait
