"""One answer's bytes into its head, its body and its end, however they are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.http1 import _Inbox

untimed = settings(deadline=None)

OK = b"HTTP/1.1 200 OK\r\n"
PLAIN = OK + b"Content-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    OK
    + b"Transfer-Encoding: chunked\r\n\r\n3;note=x\r\nhel\r\n2 \r\nlo\r\n0\r\nX-Trailer: late\r\nTe: trailers\r\n\r\n"
).replace(b"2 \r\n", b"2\r\n")
UNTIL_CLOSE = OK + b"Content-Type: text/plain\r\n\r\nhello"
HOPS = (
    OK + b"Connection: keep-alive, X-Foo\r\nX-Foo: 1\r\nKeep-Alive: timeout=5\r\nProxy-Authenticate: Basic\r\nTE: x\r\n"
    b"Trailer: X-T\r\nUpgrade: h2c\r\nX-Custom: a\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nContent-Length: 0\r\n\r\n"
)


def fed(*pieces: bytes, method: bytes = b"POST", closed: bool = False, limit: int = 65_536) -> _Inbox:
    inbox = _Inbox(method, limit)
    for piece in pieces:
        if inbox.failure is None and not inbox.complete:
            inbox.feed(piece)
    if closed:
        inbox.end("cut", clean=True)
    return inbox


@pytest.mark.parametrize(
    ("data", "method", "closed", "status", "headers", "length", "body", "reusable"),
    [
        (PLAIN, b"POST", False, 200, [(b"content-type", b"text/plain")], 5, b"hello", True),
        (CHUNKED, b"POST", False, 200, [], None, b"hello", True),
        (UNTIL_CLOSE, b"POST", True, 200, [(b"content-type", b"text/plain")], None, b"hello", False),
        (
            HOPS,
            b"POST",
            False,
            200,
            [(b"x-custom", b"a"), (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2")],
            0,
            b"",
            True,
        ),
        (b"HTTP/1.1 204 No Content\r\nX-A: b\r\n\r\n", b"POST", False, 204, [(b"x-a", b"b")], None, b"", True),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", b"GET", False, 304, [], 9, b"", True),
        (OK + b"Content-Length: 5\r\n\r\n", b"HEAD", False, 200, [], 5, b"", False),
        (OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi", b"POST", False, 200, [], 2, b"hi", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi", b"POST", False, 200, [], 2, b"hi", False),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n" + PLAIN, b"POST", False, 200,
         [(b"content-type", b"text/plain")], 5, b"hello", True),
        (b"HTTP/1.1 307 Go\r\nLocation: http://a/\r\nContent-Length: 0\r\n\r\n", b"GET", False, 307,
         [(b"location", b"http://a/")], 0, b"", True),
        (PLAIN + b"HTTP/1.1 200", b"POST", False, 200, [(b"content-type", b"text/plain")], 5, b"hello", False),
        (PLAIN + b"garbage", b"POST", False, 200, [(b"content-type", b"text/plain")], 5, b"hello", False),
    ],
)  # fmt: skip
def test_answers(
    data: bytes,
    method: bytes,
    closed: bool,
    status: int,
    headers: list[tuple[bytes, bytes]],
    length: int | None,
    body: bytes,
    reusable: bool,
) -> None:
    inbox = fed(data, method=method, closed=closed)
    assert inbox.complete
    assert inbox.failure is None
    assert (inbox.status, inbox.headers, inbox.length) == (status, headers, length)
    assert (inbox.take(), inbox.reusable) == (body, reusable)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", "can't be present"),
        (OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", "Content-Length"),
        (OK + b"Content-Length: five\r\n\r\nhello", "Content-Length"),
        (OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "transfer coding is not chunked"),
        (OK + b"Transfer-Encoding: gzip\r\n\r\nhello", "transfer coding is not chunked"),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n", "switch protocols"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "not valid HTTP"),
        (b"\x16\x03\x01\x02", "not valid HTTP"),
        (OK + b"X-Long: " + b"x" * 200_000 + b"\r\n\r\n", "larger than 65536 bytes"),
        (OK + b"X-Long: " + b"x" * 200_000, "larger than 65536 bytes"),
        (OK + b"X-A: b\r\n" * 20_000 + b"\r\n", "larger than 65536 bytes"),
    ],
)
def test_what_is_no_answer_is_refused_before_its_head(data: bytes, said: str) -> None:
    inbox = fed(data)
    assert not inbox.headed
    assert inbox.failure is not None
    assert said in inbox.failure.message
    assert inbox.failure.phase == "protocol"


def test_a_large_head_within_the_limit_passes() -> None:
    head = OK + b"X-Long: " + b"x" * 7_000 + b"\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(90)) + b"\r\n"
    assert len(fed(head).headers) == 91


def test_a_broken_chunk_after_the_head_keeps_what_came_before() -> None:
    inbox = fed(OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nzz\r\n")
    assert inbox.headed and not inbox.complete
    assert inbox.take() == b"hello"
    assert inbox.failure is not None and inbox.failure.phase == "protocol"


ANSWERS = st.sampled_from([PLAIN, CHUNKED, HOPS, b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED, PLAIN + b"more"])


@untimed
@given(ANSWERS, st.data())
def test_any_cutting_gives_the_same_answer(answer: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=len(answer))))
    whole = fed(answer)
    inbox = fed(
        *(answer[start:end] for start, end in zip([0, *cuts], [*cuts, len(answer)], strict=True) if start < end)
    )
    assert inbox.complete
    assert (inbox.status, inbox.headers, inbox.length) == (whole.status, whole.headers, whole.length)
    assert inbox.take() == whole.take()


@untimed
@given(st.sampled_from([PLAIN, CHUNKED]), st.data())
def test_an_answer_that_ends_early_is_never_taken_for_whole(answer: bytes, data: st.DataObject) -> None:
    inbox = fed(answer[: data.draw(st.integers(0, len(answer) - 1))], closed=True)
    assert not inbox.complete
    assert inbox.failure is not None
    assert b"hello".startswith(inbox.take())


@untimed
@given(st.binary(max_size=400), st.booleans())
def test_no_bytes_are_too_odd(data: bytes, after_a_head: bool) -> None:
    inbox = fed((OK + b"Transfer-Encoding: chunked\r\n\r\n" if after_a_head else b"") + data, closed=True)
    assert inbox.ended


def test_a_body_without_a_length_is_whole_only_if_the_worker_closed_in_order() -> None:
    inbox = fed(UNTIL_CLOSE)
    inbox.end("cut", clean=False)
    assert not inbox.complete
    assert inbox.failure is not None and inbox.failure.phase == "cut"
