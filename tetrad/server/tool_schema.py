"""What the JSON schema of a tool says about the type of each argument.

GLM writes a string argument verbatim and every other value as JSON, so the schema decides how the
text between the markers is read.
"""

from __future__ import annotations

from typing import Any

import msgspec

ANY: frozenset[str] = frozenset()
"""No type is known."""

MAX_DEPTH = 8
"""Schemas are followed no deeper: they come from clients and may refer to themselves."""


def argument_kinds(parameters: Any, key: str) -> frozenset[str]:
    """JSON types that argument `key` may have by a tool's `parameters`; ANY when not said."""
    if not isinstance(parameters, dict):
        return ANY
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    return _kinds(schema, parameters, MAX_DEPTH)


def _kinds(schema: Any, root: dict[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, dict) or depth == 0:
        return ANY
    if "type" in schema:
        kinds = schema["type"]
        return frozenset(map(str, kinds)) if isinstance(kinds, list) else frozenset({str(kinds)})
    if isinstance(reference := schema.get("$ref"), str):
        return _kinds(_resolve(reference, root), root, depth - 1)
    if isinstance(values := schema.get("enum"), list):
        return frozenset(map(_kind_of, values))
    branches = schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(branches, list):
        return ANY
    found = [_kinds(branch, root, depth - 1) for branch in branches]
    return frozenset().union(*found) if all(found) else ANY


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
