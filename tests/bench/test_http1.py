"""Answers come out whole, wherever the network cut them; what is no answer is refused."""

from __future__ import annotations

import pytest

from tetrad.bench.load.http1 import (
    BadAnswerError,
    Chunks,
    address,
    read_head,
    request_head,
    with_body,
)
from tetrad.bench.load.wire import Trace
from tetrad.core.errors import ConfigError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: Text/Event-Stream; charset=utf-8\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def test_a_head_says_how_its_body_ends():
    head = read_head(CHUNKED + b"5\r\nhello")
    assert head is not None
    assert (head.status, head.content_type) == (200, "text/event-stream")
    assert (head.is_chunked, head.length, head.is_kept) == (True, None, True)
    assert head.num_bytes == len(CHUNKED)
    assert read_head(CHUNKED[:-1]) is None
    sized = read_head(b"HTTP/1.1 500 Oh\r\ncontent-length: 3\r\nConnection: close\r\n\r\nabc")
    assert sized is not None
    assert (sized.status, sized.length, sized.is_kept) == (500, 3, False)
    old = read_head(b"HTTP/1.0 200 OK\r\n\r\nabc")
    assert old is not None
    assert (old.length, old.is_chunked, old.is_kept) == (None, False, False)
    empty = read_head(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert empty is not None
    assert (empty.length, empty.is_kept) == (0, True)


def test_interim_answers_are_passed_over():
    head = read_head(b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED)
    assert head is not None
    assert head.status == 200


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"x" * 200_000,
    ],
)
def test_what_is_no_answer_is_refused(answer: bytes):
    with pytest.raises(BadAnswerError):
        read_head(answer)


def traced(*reads: bytes) -> Trace:
    trace = Trace(0, origin=100.0)
    for place, read in enumerate(reads):
        trace.reads.append(read)
        trace.stamps.append(101.0 + place)
    trace.head = read_head(b"".join(reads))
    return trace


def test_every_cut_gives_the_same_body():
    payload = b"hello\r\n0\r\n\r" + b" on"
    body = b"5\r\nhello\r\n6;x=1\r\n\r\n0\r\n\r\r\n3\r\n on\r\n"
    whole = CHUNKED + body + b"0\r\nX-Trailer: 1\r\n\r\n"
    for cut in range(1, len(whole)):
        assert traced(whole[:cut], whole[cut:]).body() == payload, f"cut at byte {cut}"
    assert traced(*(bytes([byte]) for byte in whole)).body() == payload


def test_parts_carry_the_time_of_their_read():
    trace = traced(CHUNKED, b"5\r\nhello\r\n", b"2\r\nyo\r\n0\r\n\r\n")
    assert list(trace.parts()) == [(2.0, b"hello"), (3.0, b"yo")]


def test_chunks_that_are_none_are_refused():
    for wrong in (b"z\r\n", b"\r\n", b"-5\r\n", b"2\r\nabc\r\n", b"1" * 10_000):
        with pytest.raises(BadAnswerError):
            Chunks().feed(wrong)
    with pytest.raises(BadAnswerError, match="have no end"):
        traced(CHUNKED, b"5\r\nhel").body()


def test_a_request_is_written_once():
    parts = address("https://me:secret@example.com:8443/v1x")
    head = request_head(parts, "/generate", {"X-Run": "7"})
    assert with_body(head, b"{}") == (
        b"POST /v1x/generate HTTP/1.1\r\nHost: example.com:8443\r\nAccept: */*\r\n"
        b"User-Agent: tetrad\r\nContent-Type: application/json\r\nX-Run: 7\r\n"
        b"Content-Length: 2\r\n\r\n{}"
    )
    with pytest.raises(ConfigError, match="must not hold the end of a line"):
        request_head(parts, "/", {"X": "a\r\nEvil: 1"})
    for wrong in ("ftp://x", "http://", "http://x:99999"):
        with pytest.raises(ConfigError, match="is no address"):
            address(wrong)
