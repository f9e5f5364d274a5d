"""The application: routes, the key, and what becomes of errors."""

from __future__ import annotations

import asyncio
import difflib
import functools
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette import routing
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

import tetrad
from tetrad.core.errors import CapacityError, RequestError, TetradError
from tetrad.core.jsonfile import read_json_object
from tetrad.server.apis import about, admin, tokens
from tetrad.server.apis.absent import why_absent
from tetrad.server.apis.messages import routes as messages
from tetrad.server.apis.messages.protocol import CountBody, MessagesBody
from tetrad.server.apis.native import generate as native
from tetrad.server.apis.native.protocol import GenerateBody
from tetrad.server.apis.openai import chat, completions
from tetrad.server.apis.openai.protocol import ChatBody, CompletionBody
from tetrad.server.apis.responses import answer as response_answer
from tetrad.server.apis.responses import routes as responses
from tetrad.server.apis.responses.protocol import ResponsesBody
from tetrad.server.bodies.read import WARNING_HEADER, Body
from tetrad.server.door.access import KeyCheck
from tetrad.server.door.arrival import arrival
from tetrad.server.requests import REQUEST_ID, RequestDoor
from tetrad.server.service import Service
from tetrad.server.wire.failures import error_response, path_of, response_of, route_of

EXPOSED_HEADERS = (REQUEST_ID, WARNING_HEADER, "Retry-After")
"""That scripts of other origins may read."""

Handler = Callable[[Service, Request], Awaitable[Response]]


@dataclass(frozen=True)
class Route:
    """`name` is its operation's in the OpenAPI document, `body` what the handler reads and `query`
    what else; `is_admin`: it changes the server for all."""

    methods: tuple[str, ...]
    path: str
    name: str
    handler: Handler
    body: type[Body] | None = None
    is_admin: bool = False
    query: tuple[str, ...] = ()

    def operation_id(self, method: str) -> str:
        """Unique: what generated clients call it."""
        is_first = method == self.methods[0]
        return self.name if is_first else f"{self.name}_{method.lower()}"


def _order(
    name: str,
    handler: Handler,
    body: type[Body] | None = None,
    methods: tuple[str, ...] = ("POST",),
    query: tuple[str, ...] = (),
) -> Route:
    return Route(methods, f"/{name}", name, handler, body, is_admin=True, query=query)


GET, POST = ("GET",), ("POST",)
FAMILIES = {
    "OpenAI": (
        Route(POST, chat.ROUTE, "create_chat_completion", chat.chat, ChatBody),
        Route(
            POST, completions.ROUTE, "create_completion", completions.completions, CompletionBody
        ),
        Route(POST, response_answer.ROUTE, "create_response", responses.create, ResponsesBody),
        Route(GET, responses.ID_ROUTE, "get_response", responses.fetch, query=("stream",)),
        Route(("DELETE",), responses.ID_ROUTE, "delete_response", responses.delete),
        Route(POST, responses.CANCEL_ROUTE, "cancel_response", responses.cancel),
        Route(GET, "/v1/models", "list_models", about.models),
        Route(GET, "/v1/models/{name:path}", "get_model", about.model),
    ),
    "Anthropic": (
        Route(POST, messages.ROUTE, "create_message", messages.messages, MessagesBody),
        Route(POST, messages.COUNT_ROUTE, "count_message_tokens", messages.count_tokens, CountBody),
    ),
    "SGLang": (
        Route(("POST", "PUT"), native.ROUTE, "generate", native.native_generate, GenerateBody),
        Route(POST, "/v1/tokenize", "tokenize_v1", tokens.tokenize, tokens.TokenizeBody),
        Route(POST, "/v1/detokenize", "detokenize_v1", tokens.detokenize, tokens.DetokenizeBody),
        Route(GET, "/model_info", "model_info", about.model_info),
        Route(GET, "/get_model_info", "get_model_info", about.model_info),
        Route(GET, "/server_info", "server_info", about.server_info),
        Route(GET, "/get_server_info", "get_server_info", about.server_info),
    ),
    "vLLM": (
        Route(POST, "/tokenize", "tokenize", tokens.tokenize, tokens.TokenizeBody),
        Route(POST, "/detokenize", "detokenize", tokens.detokenize, tokens.DetokenizeBody),
        Route(GET, "/version", "version", about.version),
    ),
    "Operation": (
        _order("flush_cache", admin.flush_cache, methods=("GET", "POST"), query=("timeout",)),
        _order("reset_prefix_cache", admin.flush_cache, query=("timeout",)),
        _order("abort_request", admin.abort_request, admin.AbortBody),
        _order("pause_generation", admin.pause_generation, admin.PauseBody),
        _order("continue_generation", admin.continue_generation),
        _order("start_profile", admin.start_profile, admin.ProfileBody),
        _order("stop_profile", admin.stop_profile),
        _order("configure_logging", admin.logs, admin.LoggingBody),
        Route(GET, "/health", "health", about.health),
        Route(GET, "/ready", "ready", about.health),
        Route(("GET", "POST"), "/ping", "ping", about.health),
        Route(GET, "/health_generate", "health_generate", about.health_generate),
        Route(GET, "/metrics", "metrics", about.metrics),
    ),
}
"""Whose routes they are, as the OpenAPI document groups them."""
ROUTES = tuple(route for routes in FAMILIES.values() for route in routes)
GENERATING = (chat.ROUTE, completions.ROUTE, response_answer.ROUTE, messages.ROUTE, native.ROUTE)
"""Whose requests are counted by what became of them; each is the path of no other route."""

MAY_BE_LEFT_OUT = (admin.PauseBody, admin.ProfileBody)


def build_app(service: Service) -> Starlette:
    """The ASGI application of one service.

    Handlers read their bodies themselves, so that FastAPI's layers around them would only take
    time; it writes the OpenAPI document.
    """
    service.metrics.tell_apart(GENERATING)
    failures: dict[Any, Any] = {
        TetradError: _Failures(service).of_tetrad,
        HTTPException: _of_http,
        Exception: _of_bug,
    }
    app = Starlette(routes=_routes(service), exception_handlers=failures)
    app.router.redirect_slashes = False
    app.state.is_strict = service.config.strict_api
    _add_layers(app, service)
    return app


class _Served(routing.Route):
    """One whose requests know it, whichever Starlette there is: the log and metrics name it."""

    def matches(self, scope: Scope) -> tuple[routing.Match, Scope]:
        match, found = super().matches(scope)
        if match is not routing.Match.NONE:
            found["route"] = self
        return match, found


def _routes(service: Service) -> list[routing.Route]:
    routes: list[routing.Route] = [
        _Served(route.path, _endpoint(service, route.handler), methods=route.methods)
        for route in ROUTES
    ]
    for told, route in zip(ROUTES, routes, strict=True):
        if told.is_admin:  # it would do what GET does
            route.methods = set(told.methods)
    return [*routes, _Served("/openapi.json", _openapi, methods=["GET"])]


def _add_layers(app: Starlette, service: Service) -> None:
    """What a request passes on its way to its route; who is added last is the first that it
    meets."""
    origins = service.config.allowed_origins
    admin_paths = [route.path for route in ROUTES if route.is_admin]
    app.add_middleware(KeyCheck, keys=service.keys, admin_paths=admin_paths, origins=origins)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("*",),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
    # Around the layer that turns bugs into answers, too, which is Starlette's outermost.
    app.middleware_stack = RequestDoor(app.build_middleware_stack(), service)


ANSWERS = Path(__file__).with_name("answers.json")
"""What routes return: by method and path the schema of each type of content, and the schemas."""
_SCHEMAS = "#/components/schemas/"
_FAILURE = {
    "description": "What is wrong, in a sentence.",
    "content": {"application/json": {"schema": {"$ref": _SCHEMAS + "Failure"}}},
}


def _told(route: Route, answers: Mapping[str, str]) -> dict[str, Any]:
    """What the OpenAPI document says of a route that reads its path and its body itself."""
    content = {kind: {"schema": {"$ref": _SCHEMAS + name}} for kind, name in answers.items()}
    told: dict[str, Any] = {"responses": {"200": {"content": content}, "default": _FAILURE}}
    in_path = [(name, "path") for name in re.findall(r"{(\w+)", route.path)]
    if places := in_path + [(name, "query") for name in route.query]:
        told["parameters"] = [
            {"name": name, "in": where, "required": where == "path", "schema": {"type": "string"}}
            for name, where in places
        ]
    if route.body is not None:
        read = {"application/json": {"schema": {"$ref": _SCHEMAS + route.body.__name__}}}
        told["requestBody"] = {"required": route.body not in MAY_BE_LEFT_OUT, "content": read}
    return told


async def _openapi(request: Request) -> Response:
    root = request.scope.get("root_path", "")
    servers = {"servers": [{"url": root}]} if root else {}
    return JSONResponse(await asyncio.to_thread(openapi_document) | servers)


@functools.cache
def openapi_document() -> dict[str, Any]:
    """What the server can be asked, and what it answers. Handlers read their bodies and write their
    answers themselves, so their schemas are added."""
    answers = read_json_object(ANSWERS)
    shown = [
        APIRoute(
            route.path,
            _shown,
            methods=[method],
            operation_id=route.operation_id(method),
            tags=[family],
            summary=" ".join((route.handler.__doc__ or "").split()),
            response_class=Response,
            openapi_extra=_told(route, answers["routes"][f"{method} {route.path}"]),
        )
        for family, routes in FAMILIES.items()
        for route in routes
        for method in route.methods
    ]
    document = get_openapi(title="Tetrad", version=tetrad.__version__, routes=shown)
    bodies = {route.body for route in ROUTES if route.body is not None}
    _, definitions = models_json_schema(
        [(body, "validation") for body in sorted(bodies, key=lambda body: body.__name__)],
        ref_template=_SCHEMAS + "{model}",
    )
    key = {"type": "http", "scheme": "bearer"}
    schemas = definitions["$defs"] | answers["schemas"]
    document["components"] = {"schemas": schemas, "securitySchemes": {"key": key}}
    return document | {"security": [{}, {"key": []}]}


async def _shown(request: Request) -> Response:
    # A docstring would be in the document, which shows paths and bodies, no handler's arguments.
    raise NotImplementedError(request.url.path)


def _endpoint(service: Service, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        response = await handler(service, request)
        if warnings := arrival().warnings:
            response.headers[WARNING_HEADER] = " ".join(warnings)
        return response

    return endpoint


class _Failures:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def of_tetrad(self, request: Request, error: Exception) -> Response:
        """Our own errors carry their sentence and their status."""
        assert isinstance(error, TetradError)
        has_failed = arrival().finish == "error"  # and is counted as that
        if isinstance(error, RequestError | CapacityError) and not has_failed:
            self._service.metrics.refused(route_of(request))
        return response_of(error, path_of(request.scope))


async def _of_http(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path = path_of(request.scope)
    known = [route.path for route in ROUTES if "{" not in route.path]
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = _allowed(request)
    allowed = headers.get("Allow", "another method")
    near = difflib.get_close_matches(path[:200], known, 1)
    missing = f"There is no {path[:200]!r} here" + (
        f"; perhaps {near[0]!r} is meant." if near else "; /openapi.json lists what there is."
    )
    if (absent := why_absent(path)) is not None:
        # Gateways take a server that has answered a request with 404 for gone, for everybody.
        return error_response(absent, 400, path=path)
    message = {
        404: missing,
        405: f"{request.method} is not possible on {path[:200]!r}, but {allowed}.",
    }.get(error.status_code, str(error.detail))
    return error_response(message, error.status_code, headers=headers, path=path)


def _allowed(request: Request) -> str:
    """All methods of a path, which has a route for each."""
    methods: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not routing.Match.NONE:
            methods |= route.methods
    return ", ".join(sorted(methods))


async def _of_bug(request: Request, _error: Exception) -> Response:
    """Anything else is a bug of ours; its traceback goes to the log, not to the client."""
    message = "The server failed on this request; its log says why."
    return error_response(message, 500, path=path_of(request.scope))
