"""Routes of the operator, under SGLang's names. Each does what it says for the whole server,
whichever of its processes is asked; `door/access.py` says who may."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tetrad.core.errors import RequestError
from tetrad.core.messages import Reply
from tetrad.core.operation_options import AccessLog
from tetrad.server.bodies.read import Accepted, Body, read_body
from tetrad.server.service import Service

FLUSH_RETRY_S = 0.05
MAX_FLUSH_TIMEOUT_S = 600.0


class AbortBody(Body):
    """POST /abort_request."""

    rid: str = Field(default="", max_length=256)
    """A rid, an answer's id or an X-Request-Id; or else abort_all."""
    abort_all: bool = False
    """End all requests."""
    abort_message: Accepted = None

    @model_validator(mode="after")
    def _says_whom(self) -> AbortBody:
        if self.abort_all == bool(self.rid):
            raise ValueError("give either rid or abort_all")
        return self


class PauseBody(Body):
    """POST /pause_generation. What becomes of those that run: they end, they wait with what they
    have, or they wait and give their memory back."""

    mode: Literal["abort", "in_place", "retract"] = "abort"
    """What becomes of requests that run: they end (abort), wait with their memory (in_place), or
    wait and give it back (retract)."""


class ProfileBody(Body):
    """POST /start_profile. The rest of what SGLang's clients send changes nothing."""

    num_steps: int | None = Field(default=None, ge=1)
    """End by itself after so many steps. Default: at /stop_profile."""
    output_dir: str | None = None
    """Refused: --profile-dir says where traces are written."""
    activities: Accepted = None
    profile_by_stage: Accepted = None
    profile_stages: Accepted = None
    profile_prefix: Accepted = None
    profile_id: Accepted = None
    start_step: Accepted = None
    merge_profiles: Accepted = None
    with_stack: Accepted = None
    record_shapes: Accepted = None


class LoggingBody(Body):
    """POST /configure_logging."""

    log_level: Literal["debug", "info", "warning", "error"] | None = None
    """From which level on something is logged."""
    access_log: AccessLog | None = None
    """What is written of each request."""

    @model_validator(mode="after")
    def _says_something(self) -> LoggingBody:
        if self.log_level is None and self.access_log is None:
            raise ValueError("give log_level, access_log or both")
        return self


async def flush_cache(service: Service, request: Request) -> Response:
    """Empty the prefix cache; `?timeout=s` waits so many seconds for running requests to end."""
    deadline = time.monotonic() + _timeout(request)
    while True:
        ok, text = await service.engine.flush_cache()
        if ok or time.monotonic() >= deadline:
            break
        await asyncio.sleep(FLUSH_RETRY_S)
    return PlainTextResponse(
        "Cache flushed.\n" if ok else f"Cache not flushed. {text}\n",
        status_code=200 if ok else 400,
    )


def _timeout(request: Request) -> float:
    text = request.query_params.get("timeout", "0")
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = -1.0
    if not 0.0 <= timeout_s <= MAX_FLUSH_TIMEOUT_S:
        raise RequestError(
            f"timeout must be seconds from 0 to {MAX_FLUSH_TIMEOUT_S:g}, not {text[:32]!r}.",
            param="timeout",
        )
    return timeout_s


async def abort_request(service: Service, request: Request) -> Response:
    """Abort the requests of a rid, an answer's id or an X-Request-Id, or all."""
    body = await read_body(request, AbortBody)
    reply = await _ask(service, "abort", rid=None if body.abort_all else body.rid)
    return JSONResponse(reply.data)


async def pause_generation(service: Service, request: Request) -> Response:
    """Pause the engine: no more steps run, and requests that come are queued."""
    body = await read_body(request, PauseBody, or_empty=True)
    await _ask(service, "pause", mode=body.mode)
    return JSONResponse({"status": "ok", "message": "Generation is paused."})


async def continue_generation(service: Service, _request: Request) -> Response:
    """Continue after a pause."""
    await _ask(service, "resume")
    return JSONResponse({"status": "ok", "message": "Generation continues."})


async def start_profile(service: Service, request: Request) -> Response:
    """Profile the engine's steps with torch's profiler, for `num_steps` or until told to stop."""
    body = await read_body(request, ProfileBody, or_empty=True)
    if body.output_dir is not None:
        raise RequestError(
            "Where a profile is written is the operator's to say, by --profile-dir; leave "
            "output_dir out.",
            param="output_dir",
        )
    await _ask(service, "start_profile", num_steps=body.num_steps)
    return PlainTextResponse("Start profiling.\n")


async def stop_profile(service: Service, _request: Request) -> Response:
    """Stop the profiler, and say where its trace is."""
    reply = await _ask(service, "stop_profile")
    return PlainTextResponse(f"Stopped profiling; the trace is {reply.text}\n")


async def logs(service: Service, request: Request) -> Response:
    """Change the log level or the form of the access log, in all processes."""
    body = await read_body(request, LoggingBody)
    await _ask(service, "set_logging", log_level=body.log_level, access_log=body.access_log)
    return JSONResponse({"status": "ok"})


async def _ask(service: Service, name: str, **arguments: Any) -> Reply:
    reply = await service.engine.ask(name, **arguments)
    if not reply.ok:
        raise RequestError(reply.text)
    return reply
