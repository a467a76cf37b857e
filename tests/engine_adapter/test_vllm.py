"""What vLLM says in its own way: errors and figures."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.simulator import Simulator
from engine_adapter.vllm import Counters, EngineError, error_of, read_counters, refuses, status_of_lost_error

untimed = settings(deadline=None)


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (
            404,
            b'{"error":{"message":"The model `nope` does not exist.","type":"NotFoundError","param":"model","code":404}}',
            EngineError(404, "NotFoundError", None, "The model `nope` does not exist.", "model"),
        ),
        (
            429,
            b'{"error":{"message":"slow down","type":"requests","param":null,"code":"rate_limit_exceeded"}}',
            EngineError(429, "requests", "rate_limit_exceeded", "slow down"),
        ),
        (401, b'{"error":"Unauthorized"}', EngineError(401, "invalid_request_error", None, "Unauthorized")),
        (404, b'{"detail":"Not Found"}', EngineError(404, "invalid_request_error", None, "Not Found")),
        (
            422,
            b'{"detail":[{"loc":["body"],"msg":"no"}]}',
            EngineError(422, "invalid_request_error", None, '[{"loc":["body"],"msg":"no"}]'),
        ),
        (
            503,
            b'{"type":"error","error":{"type":"overloaded_error","message":"busy"}}',
            EngineError(503, "overloaded_error", None, "busy"),
        ),
        (500, b"Internal Server Error\n", EngineError(500, "server_error", None, "Internal Server Error")),
        (502, b"", EngineError(502, "server_error", None, "The worker answered 502 without a word.")),
        (400, b"[]", EngineError(400, "invalid_request_error", None, "The worker answered 400 without a word.")),
        (500, b'{"error":null}', EngineError(500, "server_error", None, "The worker answered 500 without a word.")),
        (500, b"\xff\xfe", EngineError(500, "server_error", None, "\ufffd\ufffd")),
        (400, b'{"error":{"message":7,"type":8,"code":"400"}}', EngineError(400, "invalid_request_error", None, "7")),
    ],
)
def test_errors_in_every_shape(status: int, body: bytes, expected: EngineError) -> None:
    assert error_of(status, body) == expected


@untimed
@given(st.integers(400, 599), st.binary(max_size=300) | st.just(b"[" * 5_000) | st.just(b"x" * 100_000))
def test_no_body_is_too_odd(status: int, body: bytes) -> None:
    error = error_of(status, body)
    assert error.message
    assert len(error.message) <= 4_000


IDS = "return_token_ids"


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"message":"Unrecognized request argument supplied: return_token_ids","type":"invalid_request_error","param":null,"code":null}}',
        b'{"error":{"message":"no","type":"invalid_request_error","param":"return_token_ids","code":"unknown_parameter"}}',
        b'{"error":{"message":"no","type":"Bad Request","param":"body.return_token_ids","code":400}}',
        b'{"detail":[{"type":"extra_forbidden","loc":["body","return_token_ids"],"msg":"Extra inputs are not permitted","input":true}]}',
        b"{\"object\":\"error\",\"message\":\"[{'type': 'extra_forbidden', 'loc': ('body', 'return_token_ids'), 'msg': 'Extra inputs are not permitted'}]\"}",
        b"{\"error\":{\"message\":\"1 validation error:\\n  {'type': 'extra_forbidden', 'loc': 'body.return_token_ids', 'msg': 'x'}\"}}",
        b"return_token_ids is not supported by this server",
    ],
)
@pytest.mark.parametrize("status", [400, 422])
def test_an_engine_that_does_not_know_a_member_says_so(status: int, body: bytes) -> None:
    assert refuses(IDS, status, body)
    assert not refuses("stream_options", status, body)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b'{"error":{"message":"unknown member return_token_ids","param":"return_token_ids"}}'),
        (500, b'{"error":{"message":"unknown member return_token_ids","param":"return_token_ids"}}'),
        (400, b'{"error":{"message":"max_tokens must be at least 1, got 0.","param":"max_tokens","code":400}}'),
        (400, b'{"error":{"message":"unknown member xreturn_token_ids2","param":"return_token_ids_too"}}'),
        (400, b"{\"error\":{\"message\":\"{'loc': 'body.user', 'msg': 'too long', 'input': 'return_token_ids'}\"}}"),
        (400, b""),
        (400, b"[[["),
    ],
)
def test_other_errors_say_nothing_about_a_member(status: int, body: bytes) -> None:
    assert not refuses(IDS, status, body)


@untimed
@given(
    st.binary(max_size=300)
    | st.text("return_token_ids 'loc:[](,.\n" * 3, max_size=3_000).map(str.encode)
    | st.just(b"return_token_ids " * 9_000)
)
def test_no_body_is_too_odd_to_look_for_a_member(body: bytes) -> None:
    assert refuses(IDS, 400, body) in (True, False)


def test_the_status_of_a_garbled_error_is_found_and_nothing_else_is_taken_for_one() -> None:
    said = "2 validation errors for ChatCompletionStreamResponse\nmodel [input_value={'error': {'message': 'Th...am': None, 'code': 503}}]"
    assert status_of_lost_error(said) == 503
    for other in ("", "x" * 100_000, said.replace("503", "200"), said.replace("Chat", "Other"), "{'code': 503}}"):
        assert status_of_lost_error(other) is None


LOADED = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 37.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 9.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 23700.0
vllm:prompt_tokens_total{engine="1",model_name="odd \\" } name"} 300.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 14612.0
vllm:generation_tokens_total{engine="0",model_name="tiny"} 1.67941e+05
vllm:generation_tokens_created{engine="0",model_name="tiny"} 1.7961424e+09
"""


def test_counters_are_summed_over_engines() -> None:
    assert read_counters(LOADED) == Counters(prompt_tokens=24_000, generation_tokens=167_941, running=37, waiting=2)


def test_counters_of_another_server_are_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="no vllm:generation_tokens_total; is this a vLLM server"):
        read_counters(LOADED.replace("generation_tokens_total", "something_else"))


def test_the_simulators_metrics_are_read() -> None:
    assert read_counters(Simulator().metrics().decode()) == Counters(0, 0, 0, 0)
