"""Reading a request body: size first, then JSON, then types; every mistake is one sentence.

JSON is parsed by pydantic itself from the bytes, so bad UTF-8, lone surrogates, endless nesting and
numbers that are not finite are refused before any of our code sees them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from tetrad.core.errors import RequestError

MAX_BODY_BYTES = 32 * 1024 * 1024


class Body(BaseModel):
    """Types are exact ("5" is no number); fields nobody knows are ignored, as SDKs send many."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


BodyType = TypeVar("BodyType", bound=Body)


async def read_body(request: Request, body_type: type[BodyType]) -> BodyType:
    """The validated body. Raises RequestError (400 or 413) with a sentence and the field."""
    raw = await _read(request)
    try:
        return body_type.model_validate_json(raw)
    except ValidationError as error:
        raise _request_error(error.errors(include_url=False, include_input=False)) from None


async def _read(request: Request) -> bytes:
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise _too_large()
    raw = bytearray()
    try:
        async for piece in request.stream():
            raw += piece
            if len(raw) > MAX_BODY_BYTES:
                raise _too_large()
    except ClientDisconnect:
        raise RequestError("The connection was closed before the body was complete.") from None
    return bytes(raw)


def _too_large() -> RequestError:
    return RequestError(
        f"The body is larger than {MAX_BODY_BYTES // 2**20} MiB, the most this server reads.",
        http_status=413,
    )


def _request_error(errors: Sequence[ErrorDetails]) -> RequestError:
    first = errors[0]
    if first["type"] == "json_invalid":
        return RequestError(f"The body is not valid JSON: {first['ctx']['error']}.")
    where = _field(first["loc"])
    # A field that takes several types fails once for each of them: say all that would work.
    reasons = [_reason(error) for error in errors if _field(error["loc"]) == where]
    reason = " or ".join(dict.fromkeys(reasons))
    return RequestError(f"{where or 'The body'}: {reason}.", param=where or None)


def _reason(error: ErrorDetails) -> str:
    message = error["msg"].removeprefix("Value error, ").removesuffix(".")
    return message[:1].lower() + message[1:]


_BRANCH = re.compile(r"[\w-]*[\[(].*|str|int|float|bool|list|dict")
"""How pydantic names the branches of a union within a location, e.g. list[int]."""


def _field(location: Sequence[Any]) -> str:
    """messages[0].content, from ("messages", 0, "content", "str")."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not _BRANCH.fullmatch(part):
            path += f".{part}" if path else part
    return path
