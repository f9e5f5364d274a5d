"""Reading a request body: size first, then JSON, then types; every mistake is one sentence.

JSON is parsed by pydantic itself from the bytes, so bad UTF-8, lone surrogates, endless nesting and
numbers that are not finite are refused before any of our code sees them.

Fields that nobody knows are told in a header of the answer, or refused with `--strict-api`: a
misspelt `temprature` would else be an answer at another temperature.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, pairwise
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, core_schema
from starlette.requests import ClientDisconnect, Request

from tetrad.core.errors import RequestError, nearest
from tetrad.server.bodies.weight import HELD, LIGHT_BYTES, check_weight
from tetrad.server.door.arrival import arrival
from tetrad.server.wire.pace import beside, in_turn

WARNING_HEADER = "X-Tetrad-Warning"
MAX_WARNINGS = 4
MAX_SHOWN_CHARACTERS = 64


class _Nothing:
    """Takes any JSON value and keeps None, so that what changes nothing takes no memory."""

    def __get_pydantic_core_schema__(self, _source: Any, _handler: Any) -> CoreSchema:
        return core_schema.with_default_schema(
            core_schema.none_schema(), default=None, on_error="default"
        )

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: Any) -> dict[str, Any]:
        return {"description": "May be anything, and changes nothing here."}


Accepted = Annotated[Any, _Nothing()]
"""A known field that changes nothing here, whatever its value."""


_source = functools.cache(inspect.getsource)


def _described(schema: dict[str, Any], kind: type[BaseModel]) -> None:
    """Tell of each field what the docstring below it says. They are read when somebody wants the
    schema: pydantic would read them at every start."""
    for base in reversed(kind.__mro__[:-2]):
        for field, text in pairwise(ast.walk(ast.parse(_source(base)))):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(said))):
                    shown = kind.model_fields[name].alias or name
                    schema["properties"][shown]["description"] = inspect.cleandoc(said)


class Body(BaseModel):
    """Types are exact ("5" is no number); of fields nobody knows only the names are kept."""

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, frozen=True, json_schema_extra=_described
    )
    __pydantic_extra__: dict[str, Accepted] = Field(init=False)


class OpenBody(Body):
    """A part that is handed on with whatever else it has."""

    __pydantic_extra__: dict[str, Any] = Field(init=False)


BodyType = TypeVar("BodyType", bound=Body)


async def read_body(
    request: Request, body_type: type[BodyType], *, or_empty: bool = False
) -> BodyType:
    """The validated body; with `or_empty` none is an empty one. Raises RequestError (400 or 413)
    with a sentence and the field. Unknown fields become `arrival().warnings`, or a RequestError
    too if `app.state.is_strict`."""
    raw = bytearray()
    try:
        await _read(request, raw)
        await check_weight(raw)
        body = await in_turn(partial(_validated, body_type, raw, or_empty))
    except ValidationError as error:
        raise _request_error(error) from None
    finally:
        HELD.drop(len(raw))

    def unknown() -> list[tuple[str, str]]:
        return [_unknown(*found) for found in islice(_unknown_fields(body, ""), MAX_WARNINGS)]

    told = unknown() if len(raw) <= LIGHT_BYTES else await beside(unknown)
    if told and request.app.state.is_strict:
        sentence, name = told[0]
        raise RequestError(f"{sentence} The server runs with --strict-api.", param=name)
    arrival().warnings += [sentence for sentence, _ in told]
    arrival().ask(getattr(body, "priority", None), getattr(body, "timeout", None))
    arrival().ask_name(getattr(body, "own_id", None))
    return body


def _validated(body_type: type[BodyType], raw: bytearray, or_empty: bool) -> BodyType:
    return body_type.model_validate_json(raw if not or_empty or raw.strip() else b"{}")


def checked(body_type: type[BodyType], values: Mapping[str, Any]) -> BodyType:
    """A body that another one was translated to. Raises RequestError."""
    try:
        return body_type.model_validate(values)
    except ValidationError as error:
        raise _request_error(error) from None


def _unknown_fields(body: Body, path: str) -> Iterator[tuple[str, str, type[Body]]]:
    """(where, name, the body that does not know it) of each unknown field, nested ones too."""
    kind = type(body)
    if not isinstance(body, OpenBody):
        for name in body.__pydantic_extra__ or ():
            yield path, name, kind
    values = body.__dict__
    for name in _nested(kind):
        value = values[name]
        if isinstance(value, Body):
            yield from _unknown_fields(value, f"{path}.{name}")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if not isinstance(item, Body):
                    break
                if item.__pydantic_extra__ or _nested(type(item)):
                    yield from _unknown_fields(item, f"{path}.{name}[{index}]")


@functools.cache
def _nested(kind: type[Body]) -> tuple[str, ...]:
    """The fields whose values may be bodies or hold some."""
    return tuple(
        name for name, field in kind.model_fields.items() if _mentions_body(field.annotation)
    )


def _mentions_body(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return True
    return any(map(_mentions_body, get_args(annotation)))


def _unknown(path: str, name: str, kind: type[Body]) -> tuple[str, str]:
    """A sentence fit for a header, and the whole name."""
    shown = ascii(name[:MAX_SHOWN_CHARACTERS])
    where = f" in {path.removeprefix('.')}" if path else ""
    return (
        f"Unknown field {shown}{where}.{nearest(name, kind.model_fields)}",
        f"{path}.{name}".removeprefix("."),
    )


async def _read(request: Request, raw: bytearray) -> None:
    most_mib = arrival().config.max_request_body
    most_bytes = most_mib * 2**20
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > most_bytes:
        raise _too_large(most_mib)
    try:
        async for piece in request.stream():
            if len(raw) + len(piece) > most_bytes:
                raise _too_large(most_mib)
            HELD.grow(len(raw), len(raw) + len(piece))
            raw += piece
    except ClientDisconnect:
        raise RequestError("The connection was closed before the body was complete.") from None


def _too_large(most_mib: float) -> RequestError:
    return RequestError(
        f"The body is larger than {most_mib:g} MiB, the most this server reads "
        "(--max-request-body).",
        http_status=413,
    )


def _request_error(failure: ValidationError) -> RequestError:
    errors = failure.errors(include_url=False, include_input=False)
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
