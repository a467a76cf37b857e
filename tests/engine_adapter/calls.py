"""Calls as tests write them down."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from engine_adapter.request import Call, parse


def call(endpoint: Any = "chat", **members: Any) -> Call:
    return parse(endpoint, json.dumps({"model": "m", **members}).encode())


def said(content: Any, **more: Any) -> Call:
    return call(messages=[{"role": "user", "content": content}], **more)


def picture(size: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * size}}


prompts = st.builds(
    lambda texts, tools: (
        call(messages=[{"role": "user", "content": text} for text in texts], **({"tools": [1]} if tools else {})).prompt
    ),
    st.lists(st.text(max_size=50), min_size=1, max_size=4),
    st.booleans(),
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
