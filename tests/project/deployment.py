"""How the deployment files are read: compose's variables filled in, URLs taken apart."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from tests.project.product import ROOT, WEIR_NAME, read_yaml

_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def filled(text: str) -> str:
    """Compose's `${NAME:-default}` by its default, `${NAME:?why}` by a stand-in."""
    return _VARIABLE.sub(lambda found: found[3] if found[2] == "-" else "secret", text)


def compose() -> dict[str, Any]:
    """The services of docker-compose.yml, anchors merged and variables filled in."""
    services: dict[str, Any] = _filled(read_yaml("docker-compose.yml")["services"])
    return services


def _filled(node: Any) -> Any:
    if isinstance(node, str):
        return filled(node)
    if isinstance(node, Mapping):
        return {name: _filled(part) for name, part in node.items()}
    return [_filled(part) for part in node] if isinstance(node, list) else node


def flags(words: list[str]) -> dict[str, str]:
    """`--name=value` words as a table."""
    return dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--") and "=" in word)


def urls(text: str) -> Iterator[tuple[str, int, str]]:
    """(host, port, path) of every http URL with a port."""
    for found in re.findall(r"https?://[\w.-]+:\d+[\w/.{}-]*", text):
        parts = urlsplit(found)
        assert parts.hostname
        assert parts.port
        yield parts.hostname, parts.port, parts.path


def weir_names(path: str) -> set[str]:
    """Every WEIR_… name that a file mentions, but for the patterns that stand for all of them."""
    return set(WEIR_NAME.findall((ROOT / path).read_text(encoding="utf-8"))) - {"WEIR_SECTION__NAME"}
