"""Our streams as readers take them that know the standard, not us: browsers, LibreChat, SDKs.

Traffic is recorded from the server and cut at every byte; the reader below is written to the
standard of server-sent events (fields, comments, joined data lines, any end of line, a byte order
mark), and what comes out must not depend on the cuts. The shapes are compared with what OpenAI and
Anthropic send.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import httpx
import pytest

from tests.server.fake_engine import FakeEngine, saying
from tetrad.server.text.tokenizer import Tokenizer

CALL = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
ANSWER = f"use it</think>Well, é 🙂.\r\n\n{CALL}"
MESSAGES = [{"role": "user", "content": "3+5"}]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": MESSAGES,
        "tools": [{"type": "function", "function": FUNCTION}],
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {"prompt": "3+5"},
    "/generate": {"text": "3+5"},
    "/v1/responses": {"input": "3+5", "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {
        "messages": MESSAGES,
        "max_tokens": 200,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    },
}


class Event(NamedTuple):
    kind: str
    data: str


class Reader:
    """Server-sent events by the standard's section on interpreting a stream."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._decode = codecs.getincrementaldecoder("utf-8")("strict").decode
        self._rest = ""
        self._has_begun = False
        self._kind, self._data = "", list[str]()

    def feed(self, piece: bytes) -> None:
        text = self._rest + self._decode(piece)
        if text and not self._has_begun:
            self._has_begun = True
            text = text.removeprefix("\ufeff")
        # A lone CR at the end may be the first half of CRLF.
        held = "\r" if text.endswith("\r") else ""
        lines = text.removesuffix(held).replace("\r\n", "\n").replace("\r", "\n").split("\n")
        self._rest = lines.pop() + held
        for line in lines:
            self._line(line)

    def _line(self, line: str) -> None:
        if not line:
            if self._data:
                self.events.append(Event(self._kind or "message", "\n".join(self._data)))
            self._kind, self._data = "", []
            return
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            self._kind = value
        elif field == "data":
            self._data.append(value)
        else:
            assert field == "", f"a field that readers ignore: {line}"


def read(pieces: Iterable[bytes]) -> list[Event]:
    reader = Reader()
    for piece in pieces:
        reader.feed(piece)
    return reader.events


async def recorded(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, route: str
) -> bytes:
    engine.info["context_length"] = 1000
    engine.script = saying(tokenizer.encode(ANSWER, add_special_tokens=False))
    body = {"model": "abacus", "stream": True, **STREAMS[route]}
    if route == "/generate":
        del body["model"]
    response = await client.post(route, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    return response.content


@pytest.mark.parametrize("route", STREAMS)
async def test_events_do_not_depend_on_how_bytes_are_cut(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, route: str
):
    raw = await recorded(client, engine, tokenizer, route)
    whole = read([raw])
    assert len(whole) > 10
    assert read(raw[i : i + 1] for i in range(len(raw))) == whole
    # Between two events a reader is as at the start.
    pieces = [piece + b"\n\n" for piece in raw.removesuffix(b"\n\n").split(b"\n\n")]
    assert [event for piece in pieces for event in read([piece])] == whole
    for piece in pieces:
        for cut in range(1, len(piece)):
            assert read([piece[:cut], piece[cut:]]) == read([piece])
    if route in ("/v1/responses", "/v1/messages"):
        assert [json.loads(event.data)["type"] for event in whole] == [e.kind for e in whole]
        assert b"[DONE]" not in raw
    else:
        assert {event.kind for event in whole} == {"message"}
        assert whole[-1].data == "[DONE]"
        assert all(isinstance(json.loads(event.data), dict) for event in whole[:-1])


ANTHROPIC_SHAPES: dict[str, Any] = {
    "message_start": {
        "type": 0,
        "message": {
            "id": 0,
            "type": 0,
            "role": 0,
            "content": 0,
            "model": 0,
            "stop_reason": 0,
            "stop_sequence": 0,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        },
    },
    "ping": {"type": 0},
    "content_block_start": {"type": 0, "index": 0, "content_block": {"type": 0}},
    "content_block_delta": {"type": 0, "index": 0, "delta": {"type": 0}},
    "content_block_stop": {"type": 0, "index": 0},
    "message_delta": {
        "type": 0,
        "delta": {"stop_reason": 0, "stop_sequence": 0},
        "usage": {"output_tokens": 0},
    },
    "message_stop": {"type": 0},
}
"""What Anthropic's documentation shows of each event; a server may say more."""
OPENAI_SHAPES: dict[str, Any] = {
    "response.created": {"response": {"id": 0, "object": 0, "status": 0, "output": 0}},
    "response.in_progress": {"response": {"id": 0}},
    "response.output_item.added": {"output_index": 0, "item": {"id": 0, "type": 0, "status": 0}},
    "response.content_part.added": {
        "item_id": 0,
        "output_index": 0,
        "content_index": 0,
        "part": {"type": 0, "text": 0},
    },
    "response.reasoning_text.delta": {
        "item_id": 0,
        "output_index": 0,
        "content_index": 0,
        "delta": 0,
    },
    "response.reasoning_text.done": {"item_id": 0, "content_index": 0, "text": 0},
    "response.output_text.delta": {
        "item_id": 0,
        "output_index": 0,
        "content_index": 0,
        "delta": 0,
        "logprobs": 0,
    },
    "response.output_text.done": {"item_id": 0, "content_index": 0, "text": 0, "logprobs": 0},
    "response.content_part.done": {"item_id": 0, "part": {"type": 0, "text": 0}},
    "response.function_call_arguments.delta": {"item_id": 0, "output_index": 0, "delta": 0},
    "response.function_call_arguments.done": {"item_id": 0, "name": 0, "arguments": 0},
    "response.output_item.done": {"output_index": 0, "item": {"id": 0, "status": 0}},
    "response.completed": {"response": {"status": 0, "usage": {"input_tokens": 0}}},
}
"""The fields that OpenAI's reference lists for each event, besides type and sequence_number."""


def check_shape(value: Any, shape: Any) -> None:
    if isinstance(shape, dict):
        assert shape.keys() <= value.keys(), (shape.keys() - value.keys(), value)
        for key, inner in shape.items():
            check_shape(value[key], inner)


@pytest.mark.parametrize(
    ("route", "shapes"), [("/v1/messages", ANTHROPIC_SHAPES), ("/v1/responses", OPENAI_SHAPES)]
)
async def test_events_have_the_shapes_that_were_published(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    tokenizer: Tokenizer,
    route: str,
    shapes: dict[str, Any],
):
    events = read([await recorded(client, engine, tokenizer, route)])
    assert {event.kind for event in events} == set(shapes)
    for event in events:
        check_shape(json.loads(event.data), shapes[event.kind])


def test_the_reader_reads_as_the_standard_says():
    """Comments, several data lines, a field without a colon, a byte order mark, and CR, LF and
    CRLF."""
    raw = "\ufeff: ping\r\nevent: a\r\ndata: 1\ndata:2\n\ndata\n\ndata:  é\r\rdata: lost".encode()
    expected = [Event("a", "1\n2"), Event("message", ""), Event("message", " é")]
    assert read([raw]) == read(raw[i : i + 1] for i in range(len(raw))) == expected
    for cut in range(1, len(raw)):
        assert read([raw[:cut], raw[cut:]]) == expected
