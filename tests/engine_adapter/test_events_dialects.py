"""What holds for the scanners of all dialects, whatever the bytes and however they are cut. Streams are recorded of vLLM
0.32, those mutated, and made up of events of any types."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.events import Scanner
from tests.engine_adapter.streams import DONE, WIRE, data, recorded, scanner, typed

untimed = settings(deadline=None)
"""What a property takes depends on the machine: the run's own time limit is enough."""

RECORDED = sorted(path.stem for path in WIRE.glob("*.sse"))
ASKED = {"wants_usage": True, "wants_live_usage": True, "wants_token_ids": True}


def endpoint_of(name: str) -> Any:
    return name.partition("_")[0]


def outcome(endpoint: Any, chunks: list[bytes], changed: dict[str, Any]) -> tuple[Any, ...]:
    """All that a scanner makes of a stream: what is shown and everything that is known at its end."""
    scan = scanner(endpoint, **changed)
    out = b"".join([*map(scan.feed, chunks), scan.end()])
    known = (scan.usage(), scan.events, scan.content_seen, scan.done, scan.finish_reason, scan.aborted, scan.error)
    return out, *known, scan.live_prompt, scan.live_completion, scan.live_most, scan.ids_seen


# ---- streams ---------------------------------------------------------------------------------------------------------

forms = st.sampled_from(
    [
        lambda stream: stream,
        lambda stream: stream.replace(b"\n", b"\r\n"),
        lambda stream: stream.replace(b"\n", b"\r"),
        lambda stream: stream.replace(b"data: ", b"data:"),
        lambda stream: stream.replace(b"data: ", b": comment\nid: 7\ndata: "),
        lambda stream: b"\xef\xbb\xbf" + stream.replace(b"\n\n", b"\nretry: 3\n\n"),
        lambda stream: stream.replace(b',"', b',\ndata: "'),
        lambda stream: stream.rstrip(b"\n"),
    ]
)
recordings = st.tuples(st.sampled_from(RECORDED), forms).map(
    lambda drawn: (endpoint_of(drawn[0]), drawn[1](recorded(drawn[0])))
)

junk = st.sampled_from([b"", b"\n", b"\r", b"\n\n", b"data:", b"data: ", b"event: x\n", b'"', b"\\", b"{", b"}", b"null", b"[", b"\xff", b"-1", b'"x"'])  # fmt: skip


@st.composite
def mutations(draw: st.DrawFn) -> tuple[Any, bytes]:
    name = draw(st.sampled_from(RECORDED))
    stream = recorded(name)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(stream)))
        stream = stream[:at] + draw(junk | st.binary(max_size=4)) + stream[at + draw(st.integers(0, 40)) :]
    return endpoint_of(name), stream


NAMES = [
    "model", "usage", "delta", "text", "content", "type", "index", "error", "finish_reason", "stop_reason", "response", "message",
    "item", "part", "status", "choices", "token_ids", "prompt_token_ids", "logprobs", "output_index", "content_index",
    "sequence_number", "content_block", "input_tokens", "output_tokens", "prompt_tokens", "completion_tokens", "output", "partial_json",
]  # fmt: skip
KINDS: dict[Any, list[str]] = {
    "chat": ["chat.completion.chunk"],
    "completions": ["text_completion"],
    "messages": ["message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop", "ping", "error"],
    "responses": [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.function_call_arguments.delta", "response.content_part.done",
        "response.output_item.done", "response.completed", "response.incomplete", "response.failed", "error",
    ],
}  # fmt: skip
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.floats(0, 3)
    | st.sampled_from(
        ["", "w", "北京 😀", "served", "length", "abort", "cancelled", "output_text", "function_call", "message"]
    )
)
odd = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def inventions(draw: st.DrawFn) -> tuple[Any, bytes]:
    """Events of a dialect's own types, in any order, with members of any type."""
    endpoint = draw(st.sampled_from(sorted(KINDS)))
    events = []
    for _ in range(draw(st.integers(0, 6))):
        members = draw(st.dictionaries(st.sampled_from(NAMES), odd, max_size=6))
        kind = draw(st.sampled_from(KINDS[endpoint]))
        events.append(typed(kind, **{**members, "type": kind}) if draw(st.booleans()) else data(members))
    return endpoint, b"".join(events)


streams = recordings | mutations() | inventions()
clients = st.fixed_dictionaries(
    {
        "wants_usage": st.booleans(),
        "wants_live_usage": st.booleans(),
        "wants_token_ids": st.booleans(),
        "choices": st.integers(1, 3),
        "rename": st.sampled_from([None, ("tiny", "mine")]),
    }
)


def asked_for_all(endpoint: Any) -> Scanner:
    return scanner(endpoint, wants_usage=True, wants_live_usage=True, wants_token_ids=True)


# ---- properties ------------------------------------------------------------------------------------------------------


@untimed
@given(streams, clients, st.data())
def test_any_cutting_gives_the_same_bytes_and_the_same_usage(
    drawn: tuple[Any, bytes], changed: dict[str, Any], choice: st.DataObject
) -> None:
    endpoint, stream = drawn
    whole = outcome(endpoint, [stream], changed)
    cuts = sorted(choice.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert outcome(endpoint, pieces, changed) == whole
    size = choice.draw(st.integers(1, 5))
    assert outcome(endpoint, [stream[at : at + size] for at in range(0, len(stream), size)], changed) == whole


@untimed
@given(streams)
def test_who_asked_for_everything_gets_every_byte(drawn: tuple[Any, bytes]) -> None:
    endpoint, stream = drawn
    scan = asked_for_all(endpoint)
    out = scan.feed(stream) + scan.end()
    assert out == stream or (scan.error is not None and stream.startswith(out))


@untimed
@given(st.sampled_from(sorted(KINDS)), st.binary(max_size=200), clients)
def test_no_bytes_are_too_odd(endpoint: Any, stream: bytes, changed: dict[str, Any]) -> None:
    out, usage, *_ = outcome(endpoint, [stream], changed)
    assert stream.startswith(out)
    assert usage.prompt in (0, 11)


@untimed
@given(streams, clients)
def test_nothing_but_the_name_changes_where_nothing_is_hidden(
    drawn: tuple[Any, bytes], changed: dict[str, Any]
) -> None:
    endpoint, stream = drawn
    scan = scanner(endpoint, **{**changed, **ASKED, "rename": ("tiny", "mine")})
    plain = asked_for_all(endpoint)
    renamed, as_it_came = scan.feed(stream) + scan.end(), plain.feed(stream) + plain.end()
    if renamed != as_it_came:
        assert b'"mine"' in renamed
        assert scan.usage() == scanner_usage(endpoint, stream, changed)


def scanner_usage(endpoint: Any, stream: bytes, changed: dict[str, Any]) -> Any:
    scan = scanner(endpoint, **{**changed, **ASKED, "rename": None})
    scan.feed(stream)
    scan.end()
    return scan.usage()


@untimed
@given(streams, clients, st.data())
def test_what_counts_as_surely_used_never_falls(
    drawn: tuple[Any, bytes], changed: dict[str, Any], choice: st.DataObject
) -> None:
    endpoint, stream = drawn
    scan, before = scanner(endpoint, **changed), (0, 0, 0)
    step = choice.draw(st.integers(1, 60))
    for at in range(0, len(stream), step):
        scan.feed(stream[at : at + step])
        now = (scan.live_prompt, scan.live_completion, scan.live_most)
        assert all(new >= old for new, old in zip(now, before, strict=True))
        before = now


@untimed
@given(streams, clients, st.data())
def test_a_cut_at_any_place_ends_the_answer_properly(
    drawn: tuple[Any, bytes], changed: dict[str, Any], choice: st.DataObject
) -> None:
    endpoint, stream = drawn
    scan = scanner(endpoint, **changed)
    scan.feed(stream[: choice.draw(st.integers(0, len(stream)))])
    over = scan.error is not None or scan.done
    ending = scan.cut()
    assert (ending == b"") == over
    if not over:
        assert (scan.done, scan.finish_reason is not None) == (True, True)
        assert ending.endswith(DONE) or b"message_stop" in ending or b"response.incomplete" in ending
        for line in ending.split(b"\n"):
            if line.startswith(b"data: {"):
                json.loads(line[6:])


BROKEN: list[tuple[Any, bytes]] = [
    ("chat", b'data: {"model":"tiny","\xff":1,"choices":[{"delta":{"content":"a"}}]}\n\n'),
    ("completions", b'data: {"choices":[{"text":"a","logprobs":{"\xff":1}}],"usage":{}}\n\n'),
    ("messages", b'data: {"type":"error","error":{"message":"\xff"}}\n\n'),
    ("messages", b'data: {"type":"message_start","message":{"model":"tiny","\xff":1,"x":{"model":1}}}\n\n'),
    ("responses", b'data: {"type":"response.created","response":{"model":"tiny","\xff":1}}\n\n'),
    ("responses", b'data: {"type":"response.output_item.added","item":{"id":"\xff","type":"message"}}\n\n'),
]


@pytest.mark.parametrize(("endpoint", "event"), BROKEN)
def test_an_event_of_broken_utf8_is_passed_on_and_nothing_of_it_is_believed(endpoint: Any, event: bytes) -> None:
    scan = scanner(endpoint, rename=("tiny", "mine"))
    assert scan.feed(event) == event
    assert (scan.error, scan.content_seen) == (None, False)
    scan.cut().decode()


@pytest.mark.parametrize("name", RECORDED)
def test_bytes_that_need_no_change_are_the_very_object(name: str) -> None:
    stream = recorded(name)
    scan = asked_for_all(endpoint_of(name))
    assert scan.feed(stream) is stream or scan.error is not None


@pytest.mark.parametrize("name", RECORDED)
def test_of_every_recorded_stream_the_engines_name_is_replaced_everywhere(name: str) -> None:
    scan = scanner(endpoint_of(name), choices=4, prompts=2, rename=("tiny", "mine"))
    shown = scan.feed(recorded(name))
    assert b'"model":"tiny"' not in shown
    assert b'"model":"mine"' in shown or scan.error is not None


@pytest.mark.parametrize("endpoint", sorted(KINDS))
def test_a_very_long_line_goes_through(endpoint: Any) -> None:
    """T021."""
    stream = {
        "chat": data({"choices": [{"delta": {"content": "x" * 1_000_000}}]}),
        "completions": data({"choices": [{"text": "x" * 1_000_000}]}),
        "messages": typed("content_block_delta", delta={"type": "text_delta", "text": "x" * 1_000_000}, index=0),
        "responses": typed("response.output_text.delta", delta="x" * 1_000_000, output_index=0, content_index=0),
    }[endpoint]
    scan = scanner(endpoint, rename=("tiny", "mine"))
    assert b"".join(scan.feed(stream[at : at + 1_000]) for at in range(0, len(stream), 1_000)) == stream
    assert scan.usage().completion == 250_000
