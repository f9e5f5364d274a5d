"""Events come out whole, wherever the network cut them."""

from __future__ import annotations

import pytest

from tetrad.bench.load.sse import EventParser

STREAMS = {
    "line feeds": (b"data: one\n\ndata: two\n\ndata: [DONE]\n\n", [b"one", b"two", b"[DONE]"]),
    "carriage returns and line feeds": (b"data: one\r\n\r\ndata: two\r\n\r\n", [b"one", b"two"]),
    "carriage returns": (b"data: one\r\rdata: two\r\r", [b"one", b"two"]),
    "comments": (b": ping\n\ndata: one\n: ping\n\n:\n\ndata: two\n\n", [b"one", b"two"]),
    "several lines": (b"data: one\ndata: two\n\n", [b"one\ntwo"]),
    "several lines with both": (b"data: one\r\ndata: two\r\n\r\n", [b"one\ntwo"]),
    "other fields": (b"event: delta\nid: 7\nretry: 10\ndata: one\n\n", [b"one"]),
    "no space": (b"data:one\n\ndata:  two\n\n", [b"one", b" two"]),
    "byte order mark": (b"\xef\xbb\xbfdata: one\n\n", [b"one"]),
    "characters of many bytes": (
        "data: 3 · 5 → 十五 🧮\n\n".encode(),
        ["3 · 5 → 十五 🧮".encode()],
    ),
    "blank lines between": (b"\n\n\ndata: one\n\n\n\ndata: two\n\n", [b"one", b"two"]),
    "no last empty line": (b"data: one\n\ndata: [DONE]\n", [b"one", b"[DONE]"]),
    "no last line end": (b"data: one\n\ndata: [DONE]", [b"one", b"[DONE]"]),
}


def parsed(*reads: bytes) -> list[bytes]:
    parser = EventParser()
    events = [event for read in reads for event in parser.feed(read)]
    return events + parser.close()


@pytest.mark.parametrize("name", STREAMS)
def test_every_split_into_two_reads_gives_the_same_events(name: str):
    stream, events = STREAMS[name]
    for cut in range(len(stream) + 1):
        assert parsed(stream[:cut], stream[cut:]) == events, f"cut at byte {cut}"


@pytest.mark.parametrize("name", STREAMS)
def test_one_byte_a_read_gives_the_same_events(name: str):
    stream, events = STREAMS[name]
    assert parsed(*(bytes([byte]) for byte in stream)) == events


def test_an_event_comes_with_the_read_that_completes_it():
    """Its time stamp is that read's, not an earlier or a later one's."""
    parser = EventParser()
    assert parser.feed(b"data: one\n") == []
    assert parser.feed(b"\ndata: two") == [b"one"]
    assert parser.feed(b"\n\n") == [b"two"]
    assert parser.close() == []
