from __future__ import annotations

import os

import pytest

pytest.register_assert_rewrite("tests.clients.site")

ELSEWHERE = ("OPENAI_", "ANTHROPIC_", "LANGCHAIN_", "LANGSMITH_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@pytest.fixture(autouse=True)
def _asks_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients look into the environment for other addresses, keys, and places to report to."""
    for name in os.environ:
        if name.upper().startswith(ELSEWHERE):
            monkeypatch.delenv(name)
