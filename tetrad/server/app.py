"""The application: routes, the key, and what becomes of errors."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import tetrad
from tetrad.core.errors import CapacityError, RequestError, TetradError
from tetrad.server import (
    about,
    chat,
    completions,
    messages,
    native,
    response_answer,
    responses,
    tokens,
)
from tetrad.server.absent import ABSENT
from tetrad.server.bodies import WARNING_HEADER, Body
from tetrad.server.failures import error_response, response_of, route_of
from tetrad.server.messages_protocol import CountBody, MessagesBody
from tetrad.server.native_protocol import GenerateBody
from tetrad.server.protocol import ChatBody, CompletionBody
from tetrad.server.responses_protocol import ResponsesBody
from tetrad.server.service import Service

OPEN_PATHS = frozenset({"/health"})
"""Served without a key, for those who watch over the process."""

Handler = Callable[[Service, Request], Awaitable[Response]]


@dataclass(frozen=True)
class Route:
    """`body` is what the handler reads, for the OpenAPI document."""

    methods: tuple[str, ...]
    path: str
    handler: Handler
    body: type[Body] | None = None


ROUTES = (
    Route(("POST",), chat.ROUTE, chat.chat, ChatBody),
    Route(("POST",), completions.ROUTE, completions.completions, CompletionBody),
    Route(("POST",), response_answer.ROUTE, responses.create, ResponsesBody),
    Route(("GET",), responses.ID_ROUTE, responses.fetch),
    Route(("DELETE",), responses.ID_ROUTE, responses.delete),
    Route(("POST",), responses.CANCEL_ROUTE, responses.cancel),
    Route(("POST",), messages.ROUTE, messages.messages, MessagesBody),
    Route(("POST",), messages.COUNT_ROUTE, messages.count_tokens, CountBody),
    Route(("GET",), "/v1/models", about.models),
    Route(("GET",), "/v1/models/{name:path}", about.model),
    Route(("POST", "PUT"), native.ROUTE, native.native_generate, GenerateBody),
    Route(("POST",), "/tokenize", tokens.tokenize, tokens.TokenizeBody),
    Route(("POST",), "/detokenize", tokens.detokenize, tokens.DetokenizeBody),
    Route(("GET",), "/model_info", about.model_info),
    Route(("GET",), "/get_model_info", about.model_info),
    Route(("GET",), "/server_info", about.server_info),
    Route(("GET",), "/get_server_info", about.server_info),
    Route(("GET", "POST"), "/flush_cache", about.flush_cache),
    Route(("GET",), "/health", about.health),
    Route(("GET",), "/health_generate", about.health_generate),
    Route(("GET",), "/metrics", about.metrics),
)


def build_app(service: Service) -> FastAPI:
    """The ASGI application of one service."""
    # The pages at /docs would load scripts from elsewhere; the document itself is served.
    service.metrics.tell_apart(route.path for route in ROUTES)
    app = FastAPI(title="Tetrad", version=tetrad.__version__, docs_url=None, redoc_url=None)
    app.state.is_strict = service.config.strict_api
    for route in ROUTES:
        for method in route.methods:
            app.add_api_route(
                route.path,
                _endpoint(service, route.handler),
                methods=[method],
                name=f"{method} {route.path}",
                summary=(route.handler.__doc__ or "").strip(),
                openapi_extra=_body_schema(route.body),
            )
    app.openapi = partial(_document, app)  # type: ignore[method-assign]
    app.add_exception_handler(TetradError, _Failures(service).of_tetrad)
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(Exception, _of_bug)
    if service.config.api_key is not None:
        app.add_middleware(KeyCheck, key=service.config.api_key)
    return app


_SCHEMAS = "#/components/schemas/"


def _body_schema(body: type[Body] | None) -> dict[str, Any] | None:
    if body is None:
        return None
    schema = {"$ref": _SCHEMAS + body.__name__}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document. Handlers read their bodies themselves, so their schemas are added."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    bodies = {route.body for route in ROUTES if route.body is not None}
    _, definitions = models_json_schema(
        [(body, "validation") for body in sorted(bodies, key=lambda body: body.__name__)],
        ref_template=_SCHEMAS + "{model}",
    )
    document.setdefault("components", {})["schemas"] = definitions["$defs"]
    return document


def _endpoint(service: Service, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        response = await handler(service, request)
        if warnings := getattr(request.state, "warnings", None):
            response.headers[WARNING_HEADER] = " ".join(warnings)
        return response

    return endpoint


class KeyCheck:
    """Lets through who brings the key as a bearer token, or as Anthropic's clients do; comparing
    takes the same time for any wrong one."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            headers = Headers(scope=scope)
            given = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"
            if not hmac.compare_digest(given.encode("latin-1"), self._expected):
                response = error_response(
                    "This server needs its API key, as the header Authorization: Bearer KEY or "
                    "x-api-key: KEY.",
                    401,
                    path=scope["path"],
                )
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Failures:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def of_tetrad(self, request: Request, error: Exception) -> Response:
        """Our own errors carry their sentence and their status."""
        assert isinstance(error, TetradError)
        if isinstance(error, RequestError | CapacityError):
            self._service.metrics.refused(route_of(request))
        return response_of(error, request.url.path)


async def _of_http(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    known = ", ".join(route.path for route in ROUTES if "{" not in route.path)
    allowed = (error.headers or {}).get("Allow", "another method")
    missing = f"There is no {request.url.path[:200]!r} here; there are {known}."
    message = {
        404: ABSENT.get(request.url.path.removeprefix("/v1"), missing),
        405: f"{request.method} is not possible on {request.url.path[:200]!r}; {allowed} is.",
    }.get(error.status_code, str(error.detail))
    headers = dict(error.headers or {})
    return error_response(message, error.status_code, headers=headers, path=request.url.path)


async def _of_bug(request: Request, _error: Exception) -> Response:
    """Anything else is a bug of ours; its traceback goes to the log, not to the client."""
    message = "The server failed on this request; its log says why."
    return error_response(message, 500, path=request.url.path)
