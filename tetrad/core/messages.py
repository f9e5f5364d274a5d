"""What API processes and the engine process say to each other.

A message travels as msgpack, tagged with the name of its class: a subclass of `Message` in this
file. Nothing else is decoded.

Several API processes ("workers") may share one engine. `worker` is the number under which the
engine knows one; it is never given again, so what is still under way to a process that is gone
reaches no other.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tetrad.core.limits import Limits
from tetrad.core.request import Request, RequestOutput

FIRST_WORKER = 0
"""The API process that started the engine."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """One of those below."""


class AddRequests(Message, frozen=True):
    """API → engine: start these. A rid is never used again, by no worker."""

    requests: list[Request]


class AbortRequests(Message, frozen=True):
    """API → engine: forget these and free what they hold. Unknown ids are ignored."""

    rids: list[str]


class Call(Message, frozen=True):
    """API → engine: a question or an order, answered by one `Reply`. Names: `engine/calls.py`."""

    call_id: int
    name: str
    worker: int = FIRST_WORKER
    arguments: dict[str, Any] = {}


class WorkerJoined(Message, frozen=True):
    """First worker → engine: speak to one more, which answers at the sockets of its number. It is
    told `EngineReady`."""

    worker: int


class WorkerLeft(Message, frozen=True):
    """First worker → engine: that process is gone. Its requests are aborted, and what it still
    says is ignored."""

    worker: int


class Shutdown(Message, frozen=True):
    """API → engine: end. The API has already drained its requests; what is left is aborted."""


class EngineStats(msgspec.Struct, frozen=True):
    """A reading of the engine, sent with every batch of outputs and every heartbeat."""

    running_requests: int = 0
    waiting_requests: int = 0
    used_pages: int = 0
    """Pages held by live requests."""
    cached_pages: int = 0
    """Pages kept only for the prefix cache; they can be evicted."""
    total_pages: int = 0
    prompt_tokens_total: int = 0
    """Prompt tokens computed or taken from the cache since start."""
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0
    preemptions_total: int = 0
    """Requests preempted because pages ran out, or for one of a higher priority."""
    new_token_ratio: float = 0.0
    """Of the tokens that a request may still get, those that admission expects it to get."""
    nonfinite_total: int = 0
    steps_total: int = 0
    gen_throughput: float = 0.0
    """Generated tokens per second over the last second or so."""


class EngineReady(Message, frozen=True):
    """Engine → API, once to each worker: the model is loaded. `info` is what /server_info shows of
    the engine: resolved limits, memory, chosen backends with reasons and refusals. What does not
    keep within `limits` is not sent to the engine."""

    info: dict[str, Any]
    limits: Limits


class EngineProgress(Message, frozen=True):
    """Engine → first worker while starting: what it is doing, for the console and for /health."""

    phase: str
    detail: str = ""


class RequestRefused(Message, frozen=True):
    """Engine → API: a request of `AddRequests` was not taken; the fields of its RequestError."""

    rid: str
    message: str
    http_status: int
    param: str | None = None


class StepOutputs(Message, frozen=True):
    """Engine → API after a step that gave someone something: one message to each worker, for all
    of its requests.

    A plain token is one of which nothing else is new since the last output of its request. There
    are thousands a step, so they travel as two columns of equal length. They come before
    `outputs`: a request may be in both.
    """

    outputs: list[RequestOutput]
    """What is more than a plain token: the first of a request, its end, several at once."""
    stats: EngineStats
    numbers: bytes = b""
    """Of the requests that got a plain token, `Request.number` as uint32 of this machine."""
    tokens: bytes = b""
    """Their tokens, as int32 of this machine."""


class Heartbeat(Message, frozen=True):
    """Engine → API at least once a second, also while a long step has not ended: sent by a thread
    that watches the step loop. `step_age_s` is how long the current step has been running."""

    step_age_s: float
    stats: EngineStats


class Reply(Message, frozen=True):
    """Engine → API: the answer to a `Call`."""

    call_id: int
    ok: bool
    text: str = ""
    data: dict[str, Any] = {}


class LogSettings(Message, frozen=True):
    """Engine → API, to all workers: what one of them was told to log is for all. None: as
    before."""

    log_level: str | None
    access_log: str | None


class EngineDied(Message, frozen=True):
    """Engine → API, last words: why it ends and with which exit code."""

    reason: str
    exit_code: int
    kind: str = "EngineDiedError"
    """Class of core.errors that the API process raises: a UserError keeps its class."""
