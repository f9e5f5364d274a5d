"""Errors as HTTP, for every route and for streams that break: in OpenAI's shape, or in Anthropic's
on its routes."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from tetrad.core.errors import (
    AbortedError,
    CapacityError,
    DeadlineError,
    EngineDiedError,
    RequestError,
    TetradError,
)
from tetrad.server.wire.encoding import json_bytes

MAX_CHARACTERS = 2000

_KINDS = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "forbidden"),
    404: ("invalid_request_error", "not_found"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "queue_share_used"),
    503: ("server_error", "unavailable"),
    504: ("timeout_error", "deadline_exceeded"),
}


NO_THREADS = "thread_unsupported_request"
"""By this Anthropic's SDK knows that it must send the whole conversation."""
ANTHROPIC_ROUTES = "/v1/messages"
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def http_status(error: TetradError) -> int:
    """4xx is the client's to mend, 503 passes, 500 is ours."""
    if isinstance(error, RequestError):
        return error.http_status
    if isinstance(error, DeadlineError):
        return 504
    if isinstance(error, CapacityError) and error.is_share:
        return 429
    return 503 if isinstance(error, CapacityError | EngineDiedError) else 500


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """{"error": {...}} as OpenAI's clients read it. What a client sent may be in the message, but
    not whatever its length."""
    default = ("invalid_request_error", None) if status < 500 else ("server_error", None)
    kind, usual = _KINDS.get(status, default)
    field, text = None if param is None else _shortened(param), _shortened(message)
    return {"error": {"message": text, "type": kind, "param": field, "code": code or usual}}


def anthropic_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """{"type": "error", ...} as Anthropic's clients read it."""
    kind = _ANTHROPIC_KINDS.get(status, "invalid_request_error")
    error: dict[str, Any] = {"type": kind, "message": _shortened(message)}
    if code is not None:
        error["details"] = {"error_code": code}
    if code == NO_THREADS:
        error["details"]["unsupported"] = [param]
    return {"type": "error", "error": error}


def is_anthropic(path: str) -> bool:
    """Does it belong to Anthropic's API?"""
    return path == ANTHROPIC_ROUTES or path.startswith(f"{ANTHROPIC_ROUTES}/")


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 1]}…"


def body_of(error: TetradError) -> dict[str, Any]:
    """The body of an error of ours."""
    return error_body(str(error), http_status(error), *reason_of(error))


def reason_of(error: TetradError) -> tuple[str | None, str | None]:
    """The field that is to blame, and what clients know the reason by."""
    return (error.param, error.code) if isinstance(error, RequestError) else (None, None)


def error_response(
    message: str,
    status: int,
    param: str | None = None,
    headers: dict[str, str] | None = None,
    *,
    path: str = "",
    code: str | None = None,
) -> Response:
    """An error as a whole response, in the shape of the API that `path` belongs to."""
    body = anthropic_body if is_anthropic(path) else error_body
    return Response(
        json_bytes(body(message, status, param, code)),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )


def response_of(error: TetradError, path: str = "") -> Response:
    """The response for an error of ours; 429 and 503 say when to come back, 504 not to, nor does
    the end that an operator has made."""
    headers = {}
    if isinstance(error, CapacityError):
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, DeadlineError | AbortedError):
        headers["X-Should-Retry"] = "false"  # clients would send it again by themselves
    param, code = reason_of(error)
    return error_response(str(error), http_status(error), param, headers, path=path, code=code)


def path_of(scope: Scope) -> str:
    """The path below --root-path."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


def route_of(request: Request) -> str:
    """The path of the matched route, never the client's text, so that metrics stay few."""
    return str(getattr(request.scope.get("route"), "path", "other"))
