"""What a JSON schema asks that xgrammar does not enforce: it leaves such keywords out silently.

A schema that has one is refused, so that what comes matches what was asked. Keywords that say
nothing about values are let through, and so are those that JSON Schema does not have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

MAX_PLACE_CHARACTERS = 80
MAX_MULTIPLE = 1024
"""Of `multipleOf`, in xgrammar."""

Schema = dict[str, Any]

DECIDERS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""xgrammar reads the first of these and no other keyword beside it."""
OBJECT = frozenset(
    (
        "properties",
        "required",
        "additionalProperties",
        "unevaluatedProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
    )
)
ARRAY = frozenset(("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"))
STRING = frozenset(("pattern", "format", "minLength", "maxLength"))
RANGE = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
KINDS = {
    "object": OBJECT,
    "array": ARRAY,
    "string": STRING,
    "number": RANGE | {"multipleOf"},
}
ASSERTIONS = frozenset(("type", *DECIDERS)).union(*KINDS.values())
NEVER = {
    "not": "`enum` or `anyOf` of what is allowed works",
    "if": "`anyOf` of the cases works",
    "dependentRequired": "`required`, or `anyOf` of the cases, works",
    "dependentSchemas": "`anyOf` of the cases works",
    "dependencies": "`required`, or `anyOf` of the cases, works",
    "contains": "`prefixItems` works for items at known places",
    "$dynamicRef": "`$ref` works",
    "$recursiveRef": "`$ref` works",
}
"""Keyword → what works instead."""
IGNORED_FORMATS = frozenset(("idn-email", "idn-hostname", "iri", "iri-reference", "regex"))
"""The standard's that xgrammar does not know. Names that are not the standard's mean nothing."""
NEVER_EMPTY = frozenset(("date", "date-time", "email", "hostname", "uri", "uuid"))
"""Formats with which a least length of 1 says nothing more, as some libraries say it."""
LOOKAROUND = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|(\(\?<?[=!])", re.DOTALL)


class UnenforcedError(Exception):
    """The text names the keyword, its place and what works."""


def enforced(root: Any) -> Any:
    """The schema `root`, changed where that helps, if all it asks is enforced: `format` gives way
    to a `pattern` beside it, and a `discriminator` is required. Raises UnenforcedError."""
    waiting: list[tuple[Any, str]] = [(root, "#")]
    seen: set[int] = set()
    while waiting:
        schema, place = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        _Check(root, schema, place).run()
        waiting += _parts(root, schema, place)
    return root


def enforced_tag(tag: Any) -> Any:
    """The same for every schema in a structural tag."""
    waiting = [tag]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if "json_schema" in part:
                enforced(part["json_schema"])
            waiting += [value for name, value in part.items() if name != "json_schema"]
        elif isinstance(part, list):
            waiting += part
    return tag


def check_pattern(pattern: object, place: str) -> None:
    """Raises UnenforcedError if parts of the pattern are not looked at."""
    if isinstance(pattern, str) and any(found[1] for found in LOOKAROUND.finditer(pattern)):
        raise _refused("a look-ahead or look-behind", place, "a pattern without them works")


def _refused(what: str, place: str, works: str) -> UnenforcedError:
    if len(place) > MAX_PLACE_CHARACTERS:
        place = "…" + place[-MAX_PLACE_CHARACTERS:]
    return UnenforcedError(f"{what} at {place} cannot be enforced; {works}")


def _parts(root: Any, schema: Schema, place: str) -> Iterator[tuple[Any, str]]:
    """Schemas that `schema` leads to."""
    for name in ("properties", "patternProperties"):
        if isinstance(parts := schema.get(name), dict):
            yield from ((part, f"{place}/{name}/{key}") for key, part in parts.items())
    for name in ("prefixItems", "anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(name), list):
            yield from ((part, f"{place}/{name}/{i}") for i, part in enumerate(parts))
    for name in (
        "items",
        "unevaluatedItems",
        "additionalProperties",
        "unevaluatedProperties",
        "propertyNames",
    ):
        yield schema.get(name), f"{place}/{name}"
    if isinstance(reference := schema.get("$ref"), str):
        yield _resolved(root, reference), reference


def _resolved(root: Any, reference: str) -> Any:
    """What a reference within the schema leads to; None if nothing."""
    if not reference.startswith(("#/", "#")) or reference[1:2] not in ("", "/"):
        return None
    found = root
    for raw in reference.split("/")[1:]:
        key = unquote(raw).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdigit() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


class _Check:
    """One schema, without those within it."""

    def __init__(self, root: Any, schema: Schema, place: str) -> None:
        self._root, self._schema, self._place = root, schema, place

    def run(self) -> None:
        for name, works in NEVER.items():
            if name in self._schema:
                self._refuse(f"`{name}`", works)
        decider = next((name for name in DECIDERS if name in self._schema), None)
        if decider is not None:
            self._check_decider(decider)
            return
        kinds = self._kinds()
        if "object" in kinds:
            self._check_object()
        if "array" in kinds and self._schema.get("uniqueItems"):
            works = "a plain array (`list`, where Python's `set` was), checked when it comes, works"
            self._refuse("`uniqueItems`", works)
        if "string" in kinds:
            self._check_string()
        if "number" in kinds:
            self._check_multiple()

    def _refuse(self, what: str, works: str) -> None:
        raise _refused(what, self._place, works)

    def _check_decider(self, decider: str) -> None:
        schema = self._schema
        beside = sorted(ASSERTIONS & schema.keys() - {decider, "type"})
        if decider == "const" and beside == ["enum"] and _among(schema["const"], schema["enum"]):
            beside = []
        if beside:
            works = "say it within the alternatives, or in one schema"
            self._refuse(f"`{beside[0]}` beside `{decider}`", works)
        types = _types(schema)
        if types is not None and not (_found_types(self._root, _without_type(schema)) <= types):
            works = "leave out the values or alternatives of another type"
            self._refuse(f"`type` beside a `{decider}` that goes beyond it", works)
        if decider == "$ref" and _resolved(self._root, str(schema["$ref"])) is None:
            works = "only `#` and paths such as `#/$defs/name` work"
            self._refuse(f"`$ref` to `{str(schema['$ref'])[:60]}`", works)
        if decider == "allOf" and len(schema["allOf"]) != 1:
            self._refuse("`allOf` of several", "one schema that says all of it works")
        if decider == "oneOf":
            self._check_one_of(schema["oneOf"])

    def _check_one_of(self, parts: Any) -> None:
        parts = parts if isinstance(parts, list) else []
        self._require_discriminator(parts)
        for i, one in enumerate(parts):
            for j, other in enumerate(parts[:i]):
                if not _are_apart(self._root, one, other):
                    works = "`anyOf`, or a required property with its own `const` in each, works"
                    self._refuse(f"`oneOf` whose {j} and {i} may both match", works)

    def _require_discriminator(self, parts: list[Any]) -> None:
        """Which alternative it is shows only where the property is, so none may leave it out."""
        match self._schema.get("discriminator"):
            case {"propertyName": str(name)}:
                pass
            case _:
                return
        for part in parts:
            found = _resolved(self._root, part["$ref"]) if _refers(part) else part
            match found:
                case {"properties": dict(properties)} if name in properties:
                    found["required"] = sorted({*found.get("required", ()), name})

    def _kinds(self) -> set[str]:
        """Kinds of values, with keywords, that the answer may have here."""
        schema = self._schema
        types = _types(schema)
        if types is not None:
            return {"number" if name == "integer" else name for name in types}
        for kind, names in (
            ("object", ("properties", "additionalProperties", "unevaluatedProperties")),
            ("array", ("items", "prefixItems", "unevaluatedItems")),
        ):
            if any(name in schema for name in names):
                return {kind}
        for kind, keywords in KINDS.items():
            if found := sorted(keywords & schema.keys()):
                self._refuse(
                    f"`{found[0]}` without a `type`", f'`"type": "{kind}"` beside it works'
                )
        if schema.get("uniqueItems"):
            return {"array"}
        return set()

    def _check_object(self) -> None:
        schema = self._schema
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if isinstance(required, list) and isinstance(properties, dict):
            for name in required:
                if name not in properties:
                    works = "name it in `properties` too"
                    self._refuse(f"`required` of `{str(name)[:60]}`, no property,", works)
        free = [name for name in ("propertyNames", "patternProperties") if name in schema]
        if not free:
            return
        open_ = [
            name
            for name in ("additionalProperties", "unevaluatedProperties")
            if schema.get(name, False) is not False and free[-1] == "patternProperties"
        ]
        beside = ["properties"] if properties else open_ or free[1:]
        if beside:
            self._refuse(f"`{free[0]}` beside `{beside[0]}`", "one of the two works")
        if len(schema.get("patternProperties", ())) > 1:
            self._refuse("`patternProperties` of several patterns", "one pattern works")
        for pattern in schema.get("patternProperties", ()):
            check_pattern(pattern, f"{self._place}/patternProperties")
        names = schema.get("propertyNames")
        if isinstance(names, dict) and not any(name in names for name in DECIDERS):
            names.setdefault("type", "string")

    def _check_string(self) -> None:
        schema = self._schema
        if schema.get("format") in NEVER_EMPTY and schema.get("minLength") == 1:
            del schema["minLength"]
        lengths = [name for name in ("minLength", "maxLength") if name in schema]
        if "pattern" in schema:
            schema.pop("format", None)
            check_pattern(schema["pattern"], f"{self._place}/pattern")
            if lengths:
                works = "say the length in the pattern, as in `^[a-z]{2,5}$`"
                self._refuse(f"`{lengths[0]}` beside `pattern`", works)
        elif "format" in schema:
            if schema["format"] in IGNORED_FORMATS:
                self._refuse(f"`format` `{schema['format']}`", "a `pattern` works")
            if lengths:
                self._refuse(
                    f"`{lengths[0]}` beside `format`", "one of the two, or a pattern, works"
                )

    def _check_multiple(self) -> None:
        schema = self._schema
        multiple = schema.get("multipleOf", 1)
        types = _types(schema) or frozenset()
        if "multipleOf" not in schema or (multiple == 1 and "number" not in types):
            return
        if "number" in types or not isinstance(multiple, int) or not 1 <= multiple <= MAX_MULTIPLE:
            works = f"it works for integers, as an integer up to {MAX_MULTIPLE}"
            self._refuse(f"`multipleOf` {json.dumps(multiple)[:20]}", works)
        if beside := sorted(RANGE & schema.keys()):
            self._refuse(f"`multipleOf` beside `{beside[0]}`", "one of the two, or `enum`, works")


def _types(schema: Schema) -> frozenset[str] | None:
    """Those it names; None if it names none. A number may be an integer."""
    given = schema.get("type")
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list):
        return None
    types = frozenset(name for name in names if isinstance(name, str))
    return types | {"integer"} if "number" in types else types


ALL_TYPES = frozenset(("object", "array", "string", "number", "integer", "boolean", "null"))


def _without_type(schema: Schema) -> Schema:
    return {name: value for name, value in schema.items() if name != "type"}


def _found_types(root: Any, schema: Any, depth: int = 0) -> frozenset[str]:
    """Types of values that may match, as far as that is easily seen."""
    if not isinstance(schema, dict) or depth > 8:
        return ALL_TYPES
    if (types := _types(schema)) is not None:
        return types
    if (values := _values(root, schema)) is not None:
        return frozenset(_type_of(value) for value in values)
    if "$ref" in schema:
        return _found_types(root, _resolved(root, str(schema["$ref"])), depth + 1)
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(name), list) and parts:
            return frozenset().union(*(_found_types(root, part, depth + 1) for part in parts))
    return ALL_TYPES


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
    return "integer" if value == value // 1 else "number"


def _values(root: Any, schema: Any) -> list[Any] | None:
    """All values that match, if they are listed."""
    if isinstance(schema, dict) and "$ref" in schema:
        schema = _resolved(root, str(schema["$ref"]))
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _among(value: Any, values: Any) -> bool:
    """Where 1 is not true."""
    return isinstance(values, list) and any(
        value == other and _type_of(value) == _type_of(other) for other in values
    )


def _are_apart(root: Any, one: Any, other: Any) -> bool:
    """Is it easily seen that no value matches both?"""
    if not _found_types(root, one) & _found_types(root, other):
        return True
    if _are_other_values(root, one, other):
        return True
    pair = [_resolved(root, part["$ref"]) if _refers(part) else part for part in (one, other)]
    if not all(isinstance(part, dict) for part in pair):
        return False
    parts = [part.get("properties", {}) for part in pair]
    required = [set(part.get("required", ())) for part in pair]
    named = (required[0] | required[1]) & parts[0].keys() & parts[1].keys()
    if any(_are_other_values(root, *(part[name] for part in parts)) for name in named):
        return True
    closed = [part.get("additionalProperties") is False for part in pair]
    return any(closed[i] and required[1 - i] - parts[i].keys() for i in (0, 1))


def _refers(schema: Any) -> bool:
    return isinstance(schema, dict) and isinstance(schema.get("$ref"), str)


def _are_other_values(root: Any, one: Any, other: Any) -> bool:
    values, others = _values(root, one), _values(root, other)
    return values is not None and others is not None and not any(_among(v, others) for v in values)
