"""Reads one answer and decides whether it counts.

A request succeeds only if its answer ended properly, with a finish reason and with tokens, and with
all of them where end tokens were to be ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from tetrad.bench.load.backends import Protocol, Reading
from tetrad.bench.load.http1 import BadAnswerError
from tetrad.bench.load.sse import EventParser
from tetrad.bench.load.wire import Trace
from tetrad.core.records import Failure

MESSAGE_CAP = 300
END_OF_STREAM = b"[DONE]"
EVENT_STREAM = "text/event-stream"


def read_answer(trace: Trace, protocol: Protocol, *, stream: bool) -> Reading:
    """Parse what `trace` kept; the first thing that went wrong is `Reading.failure`."""
    reading = Reading()
    try:
        if trace.status not in (0, 200):
            message = f"HTTP {trace.status}: {error_message(trace.body())}"
            reading.failure = Failure(kind="http_status", message=message)
            return reading
        if trace.content_type == EVENT_STREAM:
            _read_stream(trace, protocol.read, reading)
        elif body := trace.body():
            _read_event(reading, trace.ended_s, body, protocol.read)
    except BadAnswerError as error:
        reading.failure = Failure(kind="malformed", message=f"not HTTP: {error}")
    reading.failure = reading.failure or trace.failure
    if stream and trace.content_type != EVENT_STREAM and reading.failure is None:
        message = f"asked for {EVENT_STREAM}, got {trace.content_type}"
        reading.failure = Failure(kind="malformed", message=message)
    return reading


def _read_stream(
    trace: Trace, read: Callable[[Reading, float, Any], None], reading: Reading
) -> None:
    for time_s, event in _events(trace):
        if event == END_OF_STREAM:
            return
        _read_event(reading, time_s, event, read)


def _events(trace: Trace) -> Iterator[tuple[float, bytes]]:
    parser = EventParser()
    for time_s, part in trace.parts():
        for event in parser.feed(part):
            yield time_s, event
    for event in parser.close():
        yield trace.ended_s, event


def _read_event(
    reading: Reading, time_s: float, event: bytes, read: Callable[[Reading, float, Any], None]
) -> None:
    if reading.failure is not None:
        return
    try:
        body = msgspec.json.decode(event)
        if isinstance(body, dict) and (body.get("error") or body.get("object") == "error"):
            reading.failure = Failure(kind="error_event", message=error_message(event))
        else:
            read(reading, time_s, body)
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError):
        reading.failure = Failure(kind="malformed", message=_one_line(event))


def verdict(
    reading: Reading, *, wanted: int, most: int, ignore_eos: bool, stream: bool
) -> Failure | None:
    """Why the answer does not count, or None when it does. `most`: what the body allowed."""
    got = len(reading.stamps) if reading.output_tokens is None else reading.output_tokens
    if reading.failure is not None:
        return _after(reading.failure, got, wanted)
    if reading.finish is None:
        ended = "the stream ended" if stream else "the answer came"
        message = f"{ended} after {got} of {wanted} tokens without a finish reason"
        return Failure(kind="truncated", message=message)
    if got == 0:
        message = f"no token, finish reason {reading.finish!r}"
        return Failure(kind="empty", message=message)
    if stream and not reading.stamps:
        message = f"the server counts {got} tokens, but no event brought one"
        return Failure(kind="empty", message=message)
    if got > most:
        return Failure(kind="long_output", message=f"{got} tokens where {most} were asked for")
    if ignore_eos and got < wanted:
        message = f"{got} of {wanted} tokens although end tokens were to be ignored"
        return Failure(kind="short_output", message=f"{message}, finish reason {reading.finish!r}")
    return None


def _after(failure: Failure, got: int, wanted: int) -> Failure:
    """Say how far the answer had come."""
    if got == 0:
        return failure
    return failure.model_copy(
        update={"message": f"{failure.message} (after {got} of {wanted} tokens)"}
    )


def error_message(body: bytes) -> str:
    """The server's own words in an error body of any common shape, on one line."""
    try:
        said: Any = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return _one_line(body)
    for key in ("error", "message", "detail"):
        while isinstance(said, dict) and said.get(key):
            said = said[key]
    return _one_line(said.encode()) if isinstance(said, str) else _one_line(body)


def _one_line(text: bytes) -> str:
    line = " ".join(text.decode("utf-8", "replace").split())
    return line if len(line) <= MESSAGE_CAP else line[: MESSAGE_CAP - 1] + "…"
