"""A real vLLM on the CPU as a child process, and what it counted."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from tests.vllm.process import Process, fetch, free_port

ROOT = Path(__file__).parents[2]
VENV = Path(os.environ.get("VLLM_VENV") or ROOT / ".venv-vllm")
MODEL = "tiny"
END_TOKEN = 2
CONTEXT_TOKENS = 4096

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, the smallest
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else the worker is pinned to core 0, whoever else works there
    "OMP_NUM_THREADS": "1",
    # The worker lives in the engine's process. Two processes would talk by spinning on sched_yield, which kept
    # everybody else off the cores for over a second (Linux 6.18, 2 cores).
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "PYTHONPATH": str(ROOT),
}
# No compiler (enforce-eager), and 128 MiB of the KV cache: 1,024 blocks of 128 tokens, so nothing is ever preempted.
FLAGS = (
    "--dtype float32 --enforce-eager --max-num-seqs 64 --num-gpu-blocks-override 1024 "
    "--enable-prompt-tokens-details --logits-processors tests.vllm.pace:Pace"
)


@dataclass(frozen=True, slots=True)
class Counters:
    """Tokens since the engine started, those of aborted requests too; requests it has now.

    Names: https://docs.vllm.ai/en/latest/usage/metrics.html
    """

    prompt: int
    generation: int
    unfinished: int

    def since(self, before: Counters) -> Counters:
        return Counters(self.prompt - before.prompt, self.generation - before.generation, self.unfinished)


class Vllm:
    """Serves `MODEL` on a free port of 127.0.0.1 until `stop`."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = directory / "vllm.log"

    def __enter__(self) -> Self:
        subprocess.run([ROOT / "tests" / "vllm" / "setup.sh"], env={**os.environ, "VLLM_VENV": str(VENV)}, check=True)
        serve = f"serve {VENV}/tiny-model --served-model-name {MODEL} --host 127.0.0.1 --port {self.port}"
        command = [str(VENV / "bin" / "vllm"), *serve.split(), *FLAGS.split(), "--max-model-len", str(CONTEXT_TOKENS)]
        self._process = Process(command, self._log, ENVIRONMENT)
        self._process.wait_for(f"{self.url}/health", seconds=240)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop()

    @property
    def version(self) -> str:
        return str(fetch(f"{self.url}/version").json()["version"])

    def counters(self) -> Counters:
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(fetch(f"{self.url}/metrics").text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0) + sample.value
        return Counters(
            prompt=int(sums["vllm:prompt_tokens_total"]),
            generation=int(sums["vllm:generation_tokens_total"]),
            unfinished=int(sums["vllm:num_requests_running"] + sums["vllm:num_requests_waiting"]),
        )

    def idle(self, seconds: float) -> Counters | None:
        """The counters as soon as the engine has nothing to do; None when it still works after `seconds`.

        Two equal readings in a row: its last step is counted a moment after the last answer is out.
        """
        deadline = time.monotonic() + seconds
        before = self.counters()
        while time.monotonic() < deadline:
            time.sleep(0.02)
            now = self.counters()
            if now == before and not now.unfinished:
                return now
            before = now
        return None
