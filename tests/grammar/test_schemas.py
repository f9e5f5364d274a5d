"""Schemas are enforced whole or refused by the keyword's name and place."""

from __future__ import annotations

import copy
import datetime
import json
import uuid
from typing import Annotated, Any, Literal

import pydantic
import pytest
import xgrammar
from pydantic import Field, conint, constr

from tests.grammar.test_trial import EVERYDAY, VOCABULARIES
from tetrad.grammar.compiling import RefusedError, compile_grammar
from tetrad.grammar.schemas import NEVER_EMPTY, UnenforcedError, enforced, enforced_tag

INFO = VOCABULARIES["abacus"]
INTEGER: dict[str, Any] = {"type": "integer"}
STRING: dict[str, Any] = {"type": "string"}


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


A = obj(a=INTEGER)
REFUSED: list[tuple[dict[str, Any], str]] = [
    (A | {"required": ["b"]}, "`required` of `b`, no property, at #"),
    ({"type": "object", "required": ["b"], "additionalProperties": True}, "`required` of `b`"),
    ({"allOf": [INTEGER, {"minimum": 5}]}, "`allOf` of several at #"),
    ({"allOf": [INTEGER], "minimum": 5}, "`minimum` beside `allOf`"),
    ({"type": "number", "multipleOf": 0.01}, "`multipleOf` 0.01 at #"),
    (INTEGER | {"multipleOf": 5, "minimum": 7}, "`multipleOf` beside `minimum`"),
    (INTEGER | {"multipleOf": 2000}, "`multipleOf` 2000"),
    ({"type": "object", "properties": {"x": {"not": INTEGER}}}, "`not` at #/properties/x"),
    ({"$ref": "http://x/y.json"}, "`$ref` to `http://x/y.json` at #"),
    ({"$ref": "#anchor", "$defs": {"a": INTEGER | {"$anchor": "anchor"}}}, "`$ref` to `#anchor`"),
    ({"$ref": "#/$defs/a", "$defs": {"a": INTEGER}, "minimum": 5}, "`minimum` beside `$ref`"),
    ({"$ref": "#/$defs/a", "$defs": {"a": INTEGER}, "type": "string"}, "`type` beside a `$ref`"),
    (INTEGER | {"if": {"const": 1}, "then": {"const": 2}}, "`if` at #"),
    (A | {"dependentRequired": {"a": ["b"]}}, "`dependentRequired` at #"),
    (A | {"dependentSchemas": {"a": A}}, "`dependentSchemas` at #"),
    (A | {"dependencies": {"a": ["b"]}}, "`dependencies` at #"),
    ({"type": "array", "items": INTEGER, "uniqueItems": True}, "`uniqueItems` at #"),
    ({"items": INTEGER, "uniqueItems": True}, "`uniqueItems` at #"),
    ({"type": "array", "contains": INTEGER}, "`contains` at #"),
    (STRING | {"pattern": "^a*$", "maxLength": 2}, "`maxLength` beside `pattern` at #"),
    (STRING | {"pattern": "^(?!a).*$"}, "look-ahead or look-behind at #/pattern"),
    (STRING | {"format": "date", "maxLength": 2}, "`maxLength` beside `format`"),
    (STRING | {"format": "iri"}, "`format` `iri`"),
    (INTEGER | {"enum": ["a", 1]}, "`type` beside a `enum`"),
    (INTEGER | {"const": True}, "`type` beside a `const`"),
    ({"enum": [1, 9], "minimum": 5}, "`minimum` beside `enum`"),
    ({"const": 1, "enum": [True]}, "`enum` beside `const`"),
    (A | {"anyOf": [{"required": ["a"]}]}, "`properties` beside `anyOf`"),
    (INTEGER | {"anyOf": [{"minimum": 5}]}, "`type` beside a `anyOf`"),
    ({"oneOf": [INTEGER, {"type": "number"}]}, "`oneOf` whose 0 and 1 may both match"),
    ({"oneOf": [A, obj(b=INTEGER)]}, "`oneOf` whose 0 and 1"),
    ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "`oneOf` whose 0 and 1"),
    ({"minimum": 5}, "`minimum` without a `type`"),
    ({"pattern": "^a$"}, "`pattern` without a `type`"),
    ({"minItems": 2}, "`minItems` without a `type`"),
    ({"items": INTEGER, "unevaluatedProperties": True, "required": ["a"]}, "`required` of `a`"),
    ({"patternProperties": {"x": INTEGER}}, "`patternProperties` without a `type`"),
    (obj(xa=STRING) | {"patternProperties": {"x": INTEGER}}, "`patternProperties` beside `prop"),
    (
        {"type": "object", "patternProperties": {"x": INTEGER}, "additionalProperties": STRING},
        "`patternProperties` beside `additionalProperties`",
    ),
    ({"type": "object", "patternProperties": {"x": STRING, "y": STRING}}, "of several patterns"),
    (A | {"propertyNames": {"pattern": "^x"}}, "`propertyNames` beside `properties`"),
    ({"$dynamicRef": "#a"}, "`$dynamicRef` at #"),
    (obj(a={"$ref": "#/$defs/b"}) | {"$defs": {"b": {"not": {}}}}, "`not` at #/$defs/b"),
    (
        obj(a={"type": "array", "items": {"anyOf": [{"not": {}}]}}),
        "`not` at #/properties/a/items/an",
    ),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_enforced_is_refused(schema: dict[str, Any], reason: str):
    with pytest.raises(UnenforcedError) as caught:
        enforced(copy.deepcopy(schema))
    assert reason in str(caught.value)
    assert "cannot be enforced; " in str(caught.value)
    assert len(str(caught.value)) <= 300
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    with pytest.raises(UnenforcedError):
        enforced_tag(copy.deepcopy(tag))


class Inner(pydantic.BaseModel):
    name: Annotated[str, Field(min_length=1, max_length=20)]
    day: datetime.date
    id: uuid.UUID


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    tricks: list[str]


class Model(pydantic.BaseModel):
    """A model of every day."""

    model_config = pydantic.ConfigDict(extra="forbid")

    maybe: int | None = None
    some: Annotated[list[float], Field(min_length=1, max_length=3)]
    choice: Literal["a", "b", 3]
    only: Literal["one"]
    inner: Inner
    inners: list[Inner] = Field(description="several")
    counts: dict[str, int]
    names: dict[Annotated[str, Field(pattern="^[a-z]+$")], bool]
    code: constr(pattern=r"^[A-Z]{2}\d{3}$")  # type: ignore[valid-type]
    number: conint(ge=1, le=10)  # type: ignore[valid-type]
    pair: tuple[int, str]
    when: datetime.datetime
    anything: Any
    pet: Cat | Dog
    child: Model | None = None


ZOD: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 50},
        "age": {"type": "integer", "minimum": 0, "maximum": 9007199254740991},
        "positive": {"type": "number", "exclusiveMinimum": 0},
        "role": {"type": "string", "enum": ["admin", "user"]},
        "kind": {"type": "string", "const": "x"},
        "email": {"type": "string", "format": "email"},
        "id": {"type": "string", "format": "uuid", "pattern": "^[0-9a-f]{8}$"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "old": {"type": ["string", "null"]},
        "map": {
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {"type": "number"},
        },
        "shape": {
            "oneOf": [
                obj(t={"type": "string", "const": t}) | {"required": ["t"]} for t in ("a", "b")
            ]
        },
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ACCEPTED: dict[str, Any] = EVERYDAY | {
    "pydantic": pydantic.TypeAdapter(Model).json_schema(),
    "pydantic union": pydantic.TypeAdapter(
        Annotated[Cat | Dog, Field(discriminator="kind")]
    ).json_schema(),
    "zod": ZOD,
    "annotations": INTEGER
    | dict.fromkeys(("title", "description", "$comment", "$id", "$schema", "x-mine"), "a")
    | {"default": 1, "examples": [1], "deprecated": True, "readOnly": True, "nullable": True},
    "v1 reference": {"allOf": [{"$ref": "#/$defs/a"}], "default": 1, "$defs": {"a": INTEGER}},
    "names like keywords": obj(type=INTEGER, enum=STRING, **{"not": STRING, "$ref": INTEGER}),
    "values like keywords": {"enum": [{"not": 1, "if": 2}]},
    "unused": INTEGER | {"$defs": {"a": {"not": {}}}},
    "escaped": {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": INTEGER}},
    "multiple": INTEGER | {"multipleOf": 5},
    "sizes": {"type": "object", "additionalProperties": INTEGER, "minProperties": 1},
    "pattern of names": {"type": "object", "patternProperties": {"^x-[a-z]$": INTEGER}},
    "bracket": STRING | {"pattern": r"^[(?=]\(?!$"},
    "bytes": STRING | {"format": "binary"},
    "type of alternatives": {"type": "object", "anyOf": [A, obj(b=INTEGER)]},
    "closed one of": {
        "oneOf": [
            obj(**{name: INTEGER}) | {"required": [name], "additionalProperties": False}
            for name in "ab"
        ]
    },
    "tree": {"$ref": "#/$defs/n", "$defs": {"n": obj(next={"$ref": "#/$defs/n"})}},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_schemas_of_every_day_compile(name: str):
    assert compile_grammar(INFO, "json_schema", json.dumps(ACCEPTED[name]))


def matches(schema: Any, text: str) -> bool:
    compiler = xgrammar.GrammarCompiler(INFO, max_threads=1, cache_enabled=False)
    compiled = compiler.compile_json_schema(json.dumps(enforced(copy.deepcopy(schema))))
    matcher = xgrammar.GrammarMatcher(compiled)
    return matcher.accept_string(text) and matcher.is_completed()


def test_a_discriminator_is_required():
    parts = [obj(t={"const": "a"}, a=INTEGER), obj(t={"const": "b"})]
    schema = {"oneOf": parts, "discriminator": {"propertyName": "t"}}
    assert matches(schema, '{"t": "a", "a": 1}')
    assert not matches(schema, '{"a": 1}')
    with pytest.raises(UnenforcedError, match="oneOf"):
        enforced({"oneOf": parts})


def test_a_format_that_is_never_empty_may_say_so():
    """As pydantic's AnyUrl does."""
    for name in NEVER_EMPTY:
        assert enforced(STRING | {"format": name, "minLength": 1}) == STRING | {"format": name}
    with pytest.raises(UnenforcedError, match="`minLength` beside `format`"):
        enforced(STRING | {"format": "uri", "minLength": 2})


def test_a_pattern_goes_before_a_format():
    schema = STRING | {"format": "date", "pattern": "^a$"}
    assert matches(schema, '"a"')
    assert not matches(schema, '"2020-01-01"')


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (INTEGER | {"multipleOf": 5}, "3"),
        (obj(a=INTEGER, b=INTEGER) | {"minProperties": 1}, "{}"),
        (obj(a=INTEGER, b=INTEGER) | {"maxProperties": 1}, '{"a": 1, "b": 1}'),
        ({"type": "object", "patternProperties": {"^x": INTEGER}}, '{"y": 1}'),
        ({"type": "object", "propertyNames": {"pattern": "^x$"}}, '{"y": 1}'),
        ({"type": ["string", "null"], "maxLength": 2}, '"aaa"'),
        ({"items": INTEGER, "minItems": 2}, "[1]"),
        ({"unevaluatedItems": INTEGER, "minItems": 1}, "[]"),
        ({"unevaluatedProperties": INTEGER}, '{"a": "b"}'),
        ({"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False}, "[1, 2]"),
        ({"properties": {"a": INTEGER}, "required": ["a"]}, "{}"),
    ],
    ids=range(11),
)
def test_what_is_accepted_is_enforced(schema: dict[str, Any], text: str):
    assert not matches(schema, text)


def test_a_schema_that_is_nested_too_deeply_is_refused():
    with pytest.raises(RefusedError, match="too deeply"):
        compile_grammar(INFO, "json_schema", '{"items":' * 3000 + "{}" + "}" * 3000)


def test_a_look_ahead_of_a_regex_is_refused():
    with pytest.raises(RefusedError, match="look-ahead"):
        compile_grammar(INFO, "regex", "(?!a)[a-z]")
