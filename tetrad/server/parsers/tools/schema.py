"""What the JSON schema of a tool says about the type of each argument.

GLM writes a string argument verbatim and every other value as JSON, so the schema decides how the
text between the markers is read.
"""

from __future__ import annotations

from typing import Any

import msgspec

ANY: frozenset[str] = frozenset()
"""No type is known."""

MAX_SCHEMAS = 256
"""No more are looked at for one argument: they come from clients and may refer to each other."""


def argument_kinds(parameters: Any, key: str) -> frozenset[str]:
    """JSON types that argument `key` may have by a tool's `parameters`; ANY when not said."""
    if not isinstance(parameters, dict):
        return ANY
    properties = parameters.get("properties")
    pending = [properties.get(key) if isinstance(properties, dict) else None]
    kinds: frozenset[str] = frozenset()
    for _ in range(MAX_SCHEMAS):
        own, others = _look(pending.pop(), parameters)
        if not own and not others:
            return ANY
        kinds |= own
        pending += others
        if not pending:
            return kinds
    return ANY


def argument_choices(parameters: Any, key: str) -> list[Any]:
    """What argument `key` may be if a tool's `parameters` list it; else nothing."""
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    schema = properties.get(key) if isinstance(properties, dict) else None
    values = schema.get("enum") if isinstance(schema, dict) else None
    return values if isinstance(values, list) else []


def _look(schema: Any, root: dict[str, Any]) -> tuple[frozenset[str], list[Any]]:
    """The types that `schema` names, or the schemas that name them; neither if it is silent."""
    if not isinstance(schema, dict):
        return ANY, []
    if "type" in schema:
        kinds = schema["type"]
        return frozenset(map(str, kinds if isinstance(kinds, list) else [kinds])), []
    if isinstance(reference := schema.get("$ref"), str):
        return ANY, [_resolve(reference, root)]
    if isinstance(values := schema.get("enum"), list):
        return frozenset(map(_kind_of, values)), []
    branches = schema.get("anyOf") or schema.get("oneOf")
    return ANY, branches if isinstance(branches, list) else []


def _resolve(reference: str, root: dict[str, Any]) -> Any:
    """Follow a reference within the document, such as #/$defs/Unit."""
    node: Any = root
    for part in reference.removeprefix("#/").split("/"):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    for kind, types in _PYTHON_TYPES.items():
        if isinstance(value, types):
            return kind
    return "array"


_PYTHON_TYPES: dict[str, type] = {"integer": int, "number": float, "string": str, "object": dict}


def as_json(text: str, kinds: frozenset[str]) -> str:
    """The JSON that `text` stands for: itself if it is JSON of an allowed type, else a string.

    A text that is no JSON stays a string even where the schema wants another type: the client
    then sees what the model wrote.
    """
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return quoted(text)
    kind = _kind_of(value)
    if "string" in kinds and kind not in kinds and not (kind == "integer" and "number" in kinds):
        return quoted(text)
    return text.strip()


def quoted(text: str) -> str:
    """`text` as a JSON string."""
    return msgspec.json.encode(text).decode()
