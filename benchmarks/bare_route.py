"""A Starlette route that streams constant bytes: what any server on uvicorn is up against.

uvicorn bare_route:app --app-dir benchmarks --loop uvloop --http httptools
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

EVENT = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "bare"}


def line(text: str, finish: str | None = None, usage: dict[str, int] | None = None) -> bytes:
    """One event of a completion, about as long as a real one."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    body = EVENT | {"choices": [choice]} | ({"usage": usage} if usage else {})
    return b"data: " + json.dumps(body).encode() + b"\n\n"


TOKEN = line(" word")
DONE = b"data: [DONE]\n\n"


async def completions(request: Request) -> StreamingResponse:
    """`max_tokens` times the same event."""
    wanted = int((await request.json())["max_tokens"])
    usage = {"prompt_tokens": 1, "completion_tokens": wanted, "total_tokens": wanted + 1}

    async def events() -> AsyncIterator[bytes]:
        for _ in range(wanted - 1):
            yield TOKEN
            # A turn of the loop for each: what comes in one turn uvloop writes at once, and tokens
            # of a model do not come in one.
            await asyncio.sleep(0)
        yield line(" word", "length", usage)
        yield DONE

    return StreamingResponse(events(), media_type="text/event-stream")


async def models(_request: Request) -> JSONResponse:
    """One."""
    return JSONResponse({"object": "list", "data": [{"id": "bare", "object": "model"}]})


async def health(_request: Request) -> JSONResponse:
    """Always."""
    return JSONResponse({})


app = Starlette(
    routes=[
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
    ]
)
