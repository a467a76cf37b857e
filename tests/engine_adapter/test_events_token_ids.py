"""What `return_token_ids` tells the scanner: every token that was made, those too of which a parser shows nothing."""

from __future__ import annotations

from typing import Any

import pytest

from engine_adapter.usage import Usage
from tests.engine_adapter.streams import DONE, data, recorded, run, scanner, values

HEAD = {"id": "c-1", "object": "chat.completion.chunk", "created": 7, "model": "served"}


def opening(ids: Any, index: int = 0) -> bytes:
    choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    return data({**HEAD, "choices": [choice], "prompt_token_ids": ids, "prompt_text": None})


def piece(delta: Any, ids: Any, index: int = 0, finish: str | None = None, logprobs: Any = None, **more: Any) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish, "token_ids": ids}
    return data({**HEAD, "choices": [choice], **more})


def text(content: str, ids: Any, **more: Any) -> bytes:
    return piece({"content": content}, ids, **more)


def figures(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": 0}


def swallowed(*ids: int, **more: Any) -> bytes:
    return piece({}, list(ids), **more)


def use(prompt: int, completion: int) -> bytes:
    return data({**HEAD, "choices": [], "usage": figures(prompt, completion)})


def test_ids_are_counted_and_the_client_sees_what_it_would_have_seen_without() -> None:
    out, scan = run(opening([1, 2, 3]) + text("a", [7]) + text("bc", [8, 9]) + swallowed(2, finish="stop") + DONE)
    assert out == opening(None) + text("a", None) + text("bc", None) + piece({}, None, finish="stop") + DONE
    assert (scan.usage(), scan.ids_seen) == (Usage(3, 0, 4, 0, "engine"), True)


def test_who_asked_for_ids_gets_the_very_bytes() -> None:
    stream = opening([1, 2, 3]) + swallowed(5) + text("a", [7]) + DONE
    scan = scanner(wants_token_ids=True)
    assert scan.feed(stream) is stream
    assert scan.usage() == Usage(3, 0, 2, 0, "counted")


def test_tokens_that_a_parser_swallowed_are_counted_and_their_events_dropped() -> None:
    scan = scanner()
    assert scan.feed(opening([1])) == opening(None)
    assert [scan.feed(swallowed(5)), scan.feed(swallowed(6, 7))] == [b"", b""]
    assert (scan.usage(), scan.live_prompt, scan.live_completion) == (Usage(1, 0, 3, 0, "counted"), 1, 3)


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        (swallowed(5, finish="length"), piece({}, None, finish="length")),
        (swallowed(5, logprobs={"content": []}), piece({}, None, logprobs={"content": []})),
        (piece({"content": ""}, [5]), piece({"content": ""}, None)),
        (piece({"audio": {"id": "x"}}, [5]), piece({"audio": {"id": "x"}}, None)),
        (piece({"role": "assistant", "content": ""}, []), piece({"role": "assistant", "content": ""}, None)),
        (piece({}, None), piece({}, None)),
        (data({**HEAD, "choices": []}), data({**HEAD, "choices": []})),
    ],
)
def test_events_that_would_have_come_without_ids_are_kept(event: bytes, shown: bytes) -> None:
    scan = scanner()
    scan.feed(opening([1]))
    assert scan.feed(event) == shown


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices": [{"index": 0, "delta": {"content": "a"}, "token_ids" : [7, 8]}], "prompt_token_ids" : [ 1 ]}\n\n',
        data({"choices": [{"index": 0, "delta": {"content": '"token_ids":[7,8]'}, "token_ids": [7, 8]}]}),
        data({"choices": [{"index": 0, "x": {"token_ids": [7, 8]}, "delta": {"content": "a"}, "token_ids": [7, 8]}]}),
        data({"choices": [{'"token_ids': [7, 8], "delta": {"content": "a"}, "token_ids": [7, 8]}]}),
        data({"choices": [{"delta": {"content": "a"}, "token_ids": [7]}, {"index": 1, "delta": {}, "token_ids": [7]}]}),
        data({"choices": [{"delta": {"content": ["a"]}, "token_ids": [7, 8]}, 5]}),
        b'data: {"choices":[{"x\\"token_ids":[7,8],"token\\u005fids":[7,8],"delta":{"content":"a"}}]}\n\n',
    ],
)
def test_ids_are_taken_out_wherever_they_stand(event: bytes) -> None:
    """… and nothing else is: names within texts, members of the same name elsewhere."""
    out, scan = run(event)
    expected = values(event)
    for each in (*expected, *expected[0]["choices"]):
        if isinstance(each, dict):
            each |= {name: None for name in ("token_ids", "prompt_token_ids") if name in each}
    assert values(out) == expected
    assert scan.usage().completion == 2


def test_the_engines_own_sum_wins_over_its_ids() -> None:
    out, scan = run(opening([1, 2, 3]) + text("a", [7]) + swallowed(2, finish="stop") + use(4, 9) + DONE)
    assert (scan.usage(), b"usage" in out) == (Usage(4, 0, 9, 0, "engine"), False)


def test_ids_beside_figures_are_not_counted_twice() -> None:
    stream = opening([1, 2], index=0) + text("a", [7], usage=figures(2, 1)) + text("b", [8, 9], usage=figures(2, 3))
    assert run(stream)[1].usage() == Usage(2, 0, 3, 0, "counted")
    assert run(stream + swallowed(4))[1].usage() == Usage(2, 0, 4, 0, "counted")
    assert run(stream + swallowed(4, finish="stop"))[1].usage() == Usage(2, 0, 4, 0, "engine")


def test_ids_beside_figures_of_each_choice_are_not_counted_twice() -> None:
    scan = scanner(choices=2)
    for index, completion in ((0, 1), (1, 1), (0, 2), (1, 2)):
        scan.feed(text("w", [7], index=index, usage=figures(16, completion)))
    assert scan.usage() == Usage(16, 0, 4, 0, "counted")


def test_ids_after_the_engines_sum_are_added_to_it() -> None:
    scan = scanner()
    scan.feed(opening([1, 2]) + text("a", [7]) + use(2, 1) + text("", []))
    assert scan.usage() == Usage(2, 0, 1, 0, "engine")
    scan.feed(text("b", [8]))
    assert scan.usage() == Usage(2, 0, 2, 0, "counted")


def test_what_came_without_ids_is_weighed_beside_them() -> None:
    stream = opening([1, 2]) + text("a", [7]) + text("eight by", None)
    assert run(stream + piece({}, [2], finish="stop"))[1].usage() == Usage(2, 0, 4, 0, "counted")


def test_without_the_prompts_ids_it_is_estimated() -> None:
    assert run(opening(None) + text("a", [7, 8]))[1].usage() == Usage(11, 0, 2, 0, "counted")


def test_each_choice_counts_and_the_prompt_once() -> None:
    stream = opening([1, 2, 3], 0) + opening([1, 2, 3], 1) + text("a", [7, 8], index=0) + text("b", [9], index=1)
    scan = scanner(choices=2)
    scan.feed(stream)
    assert (scan.usage(), scan.live_most) == (Usage(3, 0, 3, 0, "counted"), 6)
    scan.feed(piece({}, [2], index=0, finish="stop"))
    assert scan.usage().source == "counted"
    scan.feed(piece({}, [2], index=1, finish="stop"))
    assert scan.usage() == Usage(3, 0, 5, 0, "engine")


def test_each_prompt_counts_once_however_many_answers_it_has() -> None:
    scan = scanner("completions", choices=4, prompts=2)
    for index, prompt in ((0, [1, 2]), (1, [1, 2]), (2, [1, 2, 3]), (3, [1, 2, 3])):
        choice = {"index": index, "text": "w", "prompt_token_ids": prompt, "token_ids": [7, 8]}
        shown = values(scan.feed(data({"choices": [choice]})))
        assert shown == [{"choices": [{**choice, "prompt_token_ids": None, "token_ids": None}]}]
    assert scan.usage() == Usage(5, 0, 8, 0, "counted")


@pytest.mark.parametrize(("ids", "count"), [([], 0), (None, 1), ("7", 1), ({}, 1), (5, 1)])
def test_what_is_no_list_of_ids_is_none(ids: Any, count: int) -> None:
    assert run(text("a", ids))[1].usage().completion == count


def test_a_long_prompts_ids_are_taken_out_of_the_first_event() -> None:
    out, scan = run(opening(list(range(200_000))) + text("a", [7]))
    assert out == opening(None) + text("a", None)
    assert scan.usage().prompt == 200_000


RECORDED: dict[str, tuple[dict[str, Any], Usage]] = {
    "chat_token_ids": ({}, Usage(16, 0, 4, 0, "engine")),
    "chat_tools_token_ids": ({}, Usage(16, 0, 63, 0, "engine")),
    "chat_reasoning_token_ids_running_usage": ({}, Usage(25, 0, 12, 5, "engine")),
    "chat_two_choices_token_ids": ({"choices": 2}, Usage(16, 0, 6, 0, "engine")),
    "completions_two_prompts_token_ids": (
        {"endpoint": "completions", "choices": 4, "prompts": 2},
        Usage(4, 0, 8, 0, "engine"),
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_stream_left_after_any_event_costs_the_tokens_that_were_made(name: str) -> None:
    changed, usage = RECORDED[name]
    scan, made = scanner(**changed), 0
    for event in values(recorded(name)):
        scan.feed(data(event))
        made += sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
        assert (scan.usage().completion, scan.live_completion) == (made, made)
    assert scan.usage() == usage


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_stream_without_its_last_figures_costs_the_same(name: str) -> None:
    changed, usage = RECORDED[name]
    kept = [event for event in values(recorded(name)) if event["choices"]]
    without = b"".join(data({key: value for key, value in event.items() if key != "usage"}) for event in kept)
    bare = run(without + DONE, **changed)[1].usage()
    assert bare == Usage(usage.prompt, 0, usage.completion, 0, "engine")


@pytest.mark.parametrize("name", RECORDED)
def test_of_a_recorded_stream_no_id_is_shown_and_nothing_else_is_missing(name: str) -> None:
    shown = values(run(recorded(name), **RECORDED[name][0])[0])
    expected = []
    for event in values(recorded(name)):
        event.pop("usage", None)
        for each in (event, *event["choices"]):
            each |= {key: None for key in ("token_ids", "prompt_token_ids") if key in each}
        expected += [event for choice in event["choices"] if choice.get("delta") != {} or choice["finish_reason"]]
    assert shown == expected
