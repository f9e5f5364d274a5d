"""A server that misbehaves on request: it answers every generation in one chosen way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Body = dict[str, Any]


class MockServer:
    """Counts what it is asked; `behaviour` says how it answers after `healthy` good answers: one
    word for all, or one for each."""

    def __init__(
        self,
        behaviour: str | Sequence[str] = "good",
        healthy: int = 0,
        flush_path: str | None = "/flush_cache",
        models_status: Sequence[int] = (200,),
        models: Any = ({"id": "mock"},),
        info_status: int = 404,
        moved_to: str | None = None,
        metrics: str | None = None,
    ) -> None:
        self.behaviour = behaviour
        self.models_status = list(models_status)
        self.models_listed = models
        self.info_status = info_status
        self.moved_to = moved_to
        self.metrics_text = metrics
        self.healthy = healthy
        self.flush_path = flush_path
        self.bodies: list[Body] = []
        self.flushes = 0
        self.headers: list[dict[str, str]] = []
        self.peers: set[Any] = set()
        """Addresses of the connections that generations came over."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/server_info", self.server_info)
        if self.metrics_text is not None:
            app.router.add_get("/metrics", self.metrics)
        if self.flush_path is not None:
            app.router.add_post(self.flush_path, self.flush)
        for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self.generate)
        async with TestServer(app, shutdown_timeout=0.1) as server:
            yield str(server.make_url("/")).rstrip("/")

    def _behaviour_now(self) -> str:
        if len(self.bodies) <= self.healthy:
            return "good"
        if isinstance(self.behaviour, str):
            return self.behaviour
        return self.behaviour[len(self.bodies) - self.healthy - 1]

    async def models(self, request: web.Request) -> web.Response:
        left = self.models_status
        status = left.pop(0) if len(left) > 1 else left[0]
        return web.json_response({"object": "list", "data": self.models_listed}, status=status)

    async def server_info(self, request: web.Request) -> web.Response:
        return web.json_response({}, status=self.info_status)

    async def metrics(self, request: web.Request) -> web.Response:
        assert self.metrics_text is not None
        return web.Response(text=self.metrics_text.replace("BODIES", str(len(self.bodies))))

    async def flush(self, request: web.Request) -> web.Response:
        self.flushes += 1
        return web.Response(text="Cache flushed.")

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        if self.moved_to is not None:
            raise web.HTTPTemporaryRedirect(self.moved_to + request.path)
        behaviour = self._behaviour_now()
        if behaviour == "http 500":
            return web.json_response({"error": {"message": "out of pages"}}, status=500)
        if behaviour == "hang":
            await asyncio.sleep(30)
        api = {"/generate": Native, "/v1/completions": Completions}.get(request.path, Chat)
        events = api(body).events(behaviour)
        if not body["stream"] or behaviour == "whole":
            return web.json_response(events[-1] if events else None)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for event in events:
            await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        while behaviour == "endless":
            await answer.write(b": still here\n\n" * 1000)
        if behaviour == "more after the end":
            await answer.write(b'data: [DONE]\n\ndata: {"usage": {"completion_tokens": 5}}\n\n')
        if behaviour == "broken connection":
            assert request.transport is not None
            request.transport.abort()
        elif behaviour != "truncated":
            await answer.write(b"data: [DONE]\n\n")
        return answer


class Native:
    """Events of SGLang's /generate."""

    def __init__(self, body: Body) -> None:
        self.wanted = body["sampling_params"]["max_new_tokens"]
        self.num_prompt = len(body.get("input_ids") or body.get("text") or "")

    def event(self, tokens: int, finish: Body | None = None) -> Body:
        meta = {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": tokens,
            "cached_tokens": 0,
            "finish_reason": finish,
        }
        return {"text": " a" * tokens, "meta_info": meta}

    def events(self, behaviour: str) -> list[Body]:
        half = [self.event(tokens) for tokens in range(1, self.wanted // 2 + 1)]
        error = {"error": {"message": "the engine died", "code": 500}}
        match behaviour:
            case "error event":
                return [error]
            case "late error event":
                return [*half, error]
            case "truncated" | "broken connection":
                return half
            case "empty":
                return [self.event(0, {"type": "stop", "matched": 2})]
            case "nothing":
                return []
            case "early stop":
                return [*half[:-1], self.event(len(half), {"type": "stop", "matched": 2})]
            case "abort":
                return [self.event(1, {"type": "abort", "message": "gave it up"})]
            case "malformed":
                return [{"text": "a"}]
            case "too many":
                return [*half, self.event(99, {"type": "length", "length": 99})]
        rest = [self.event(tokens) for tokens in range(len(half) + 1, self.wanted)]
        end = self.event(self.wanted, {"type": "length", "length": self.wanted})
        return [*half, *rest, end]


class Completions(Native):
    """Events of /v1/completions, translated from the native ones."""

    def __init__(self, body: Body) -> None:
        self.wanted = body.get("max_tokens") or body["max_completion_tokens"]
        self.num_prompt = len(body.get("prompt") or body["messages"])

    def choice(self, text: str, finish: str | None) -> Body:
        return {"text": text, "finish_reason": finish}

    def events(self, behaviour: str) -> list[Body]:
        said, events = 0, []
        for event in super().events(behaviour):
            meta = event.get("meta_info")
            if meta is None:
                events.append(event)
                continue
            finish = (meta["finish_reason"] or {}).get("type")
            text = " a" * (meta["completion_tokens"] - said)
            said = meta["completion_tokens"]
            events.append({"choices": [self.choice(text, finish)], "usage": None})
            if finish:
                usage = {"prompt_tokens": self.num_prompt, "completion_tokens": said}
                events.append({"choices": [], "usage": usage})
        return events


class Chat(Completions):
    """Events of /v1/chat/completions."""

    def choice(self, text: str, finish: str | None) -> Body:
        return {"delta": {"content": text}, "finish_reason": finish}
