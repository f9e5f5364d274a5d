"""Reading a request body: size first, then JSON, then types; every mistake is one sentence.

JSON is parsed by pydantic itself from the bytes, so bad UTF-8, lone surrogates, endless nesting and
numbers that are not finite are refused before any of our code sees them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

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
    # A field that takes several types fails once for each of them: report the attempt that came
    # furthest, and all that would work there.
    field = _parts(first["loc"])
    attempts = [_parts(error["loc"]) for error in errors]
    where = max((p for p in attempts if p[: len(field)] == field), key=_progress)
    reasons = [_reason(e) for e, parts in zip(errors, attempts, strict=True) if parts == where]
    reason = " or ".join(dict.fromkeys(reasons))
    name = _name(where)
    return RequestError(f"{name or 'The body'}: {reason}.", param=name or None)


def _reason(error: ErrorDetails) -> str:
    message = error["msg"].removeprefix("Value error, ").removesuffix(".")
    return message[:1].lower() + message[1:]


_BRANCH = re.compile(r"[\w-]*[\[(].*|constrained-\w+|str|int|float|bool|list|dict|[A-Z]\w*")
"""How pydantic names the branches of a union within a location, e.g. list[int]."""


def _parts(location: Sequence[int | str]) -> tuple[int | str, ...]:
    """A location without the names of union branches."""
    return tuple(p for p in location if isinstance(p, int) or not _BRANCH.fullmatch(p))


def _progress(parts: Sequence[int | str]) -> list[int]:
    """Orders locations by how far reading came: deeper, or later in a list."""
    return [part if isinstance(part, int) else 0 for part in parts]


def _name(parts: Sequence[int | str]) -> str:
    """messages[0].content, from ("messages", 0, "content")."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.removeprefix(".")
