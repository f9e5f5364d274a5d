"""What an answer must match, as SGLang, vLLM and OpenAI name it.

All of it becomes one grammar for the engine. Only its form is looked at here; whether it can be
followed is found out by whoever compiles it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, model_validator

from tetrad.core.errors import RequestError
from tetrad.core.request import Grammar, GrammarKind
from tetrad.server.bodies.read import Accepted, Body, OpenBody

MAX_ALTERNATIVES = 4096

Schema = dict[str, Any] | bool | str
"""As JSON, or as its text."""
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_ALTERNATIVES, fail_fast=True)]
ANY_OBJECT = '{"type":"object"}'

Asked = tuple[str, GrammarKind, str]
"""Field, kind and text of a grammar."""


class NamedSchema(OpenBody):
    """OpenAI's `json_schema`. Strict or not, the answer matches it."""

    name: str | None = None
    """Changes nothing."""
    schema_: Schema | None = Field(default=None, alias="schema")
    """JSON Schema, or its text. Default: any object."""


class ResponseFormat(OpenBody):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    """What the answer is: text, any JSON object, JSON of a schema, or a structural tag."""
    json_schema: NamedSchema | None = None
    """For type `json_schema`: the schema, by its name."""

    @model_validator(mode="after")
    def _is_whole(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError('type "json_schema" needs json_schema: {"name": …, "schema": {…}}')
        return self

    def asked(self) -> Iterator[Asked]:
        """The grammar, if any."""
        match self.type:
            case "json_object":
                yield "response_format", "json_schema", ANY_OBJECT
            case "json_schema":
                assert self.json_schema is not None
                schema = self.json_schema.schema_
                text = ANY_OBJECT if schema is None else _text(schema)
                yield "response_format", "json_schema", text
            case "structural_tag":
                tag = self.model_dump(exclude={"json_schema"})
                yield "response_format", "structural_tag", structural_tag(tag)


class StructuredOutputs(Body):
    """vLLM's."""

    json_: Schema | None = Field(default=None, alias="json")
    """JSON Schema that the answer matches, or its text."""
    json_object: bool | None = None
    """The answer is a JSON object. Default false."""
    regex: str | None = None
    """Regular expression that the whole answer matches."""
    choice: Choices | None = None
    """The answer is one of these texts."""
    grammar: str | None = None
    """Grammar that the answer matches, as EBNF or Lark."""
    structural_tag: Schema | None = None
    """Structural tag, or its text."""
    disable_fallback: Accepted = None
    disable_any_whitespace: Accepted = None
    whitespace_pattern: Accepted = None

    def asked(self, prefix: str = "structured_outputs.") -> Iterator[Asked]:
        """One grammar for each field that is set."""
        if self.json_ is not None:
            yield prefix + "json", "json_schema", _text(self.json_)
        if self.json_object:
            yield prefix + "json_object", "json_schema", ANY_OBJECT
        if self.regex is not None:
            yield prefix + "regex", "regex", self.regex
        if self.choice is not None:
            yield prefix + "choice", "structural_tag", _one_of(self.choice)
        if self.grammar is not None:
            yield prefix + "grammar", _grammar_kind(self.grammar), self.grammar
        if self.structural_tag is not None:
            yield prefix + "structural_tag", "structural_tag", structural_tag(self.structural_tag)


class ConstraintFields(Body):
    """SGLang's, of every route that generates."""

    regex: str | None = None
    """Regular expression that the whole answer matches."""
    ebnf: str | None = None
    """Grammar that the answer matches, as EBNF."""
    json_schema: Schema | None = None
    """JSON Schema that the answer matches, or its text."""
    structural_tag: Schema | None = None
    """Structural tag, or its text."""

    def asked(self) -> Iterator[Asked]:
        """One grammar for each field that is set."""
        if self.regex is not None:
            yield "regex", "regex", self.regex
        if self.ebnf is not None:
            yield "ebnf", "ebnf", self.ebnf
        if self.json_schema is not None:
            yield "json_schema", "json_schema", _text(self.json_schema)
        if self.structural_tag is not None:
            yield "structural_tag", "structural_tag", structural_tag(self.structural_tag)


class OpenAIConstraintFields(ConstraintFields):
    """OpenAI's, and vLLM's."""

    response_format: ResponseFormat | None = None
    """What form the answer has. Default: text."""
    guided_json: Schema | None = None
    """JSON Schema that the answer matches, or its text."""
    guided_regex: str | None = None
    """Regular expression that the whole answer matches."""
    guided_choice: Choices | None = None
    """The answer is one of these texts."""
    guided_grammar: str | None = None
    """Grammar that the answer matches, as EBNF or Lark."""
    guided_decoding_backend: Accepted = None
    guided_whitespace_pattern: Accepted = None
    structured_outputs: StructuredOutputs | None = None
    """The same constraints under one name; one of all may be given."""

    def asked(self) -> Iterator[Asked]:
        yield from super().asked()
        if self.response_format is not None:
            yield from self.response_format.asked()
        guided = StructuredOutputs(
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )
        yield from guided.asked("guided_")
        if self.structured_outputs is not None:
            yield from self.structured_outputs.asked()


def grammar_of(body: ConstraintFields) -> Grammar | None:
    """The one grammar that a body asks for. Raises RequestError for a second."""
    asked = list(body.asked())
    if not asked:
        return None
    if len(asked) > 1:
        names = " and ".join(field for field, _, _ in asked)
        sentence = f"{names} cannot both constrain one answer; give one."
        raise RequestError(sentence, param=asked[1][0])
    field, kind, text = asked[0]
    return Grammar(kind, text, field)


def structural_tag(given: Schema) -> str:
    """xgrammar's structural tag as text. SGLang's older form, `structures` and `triggers`, is
    translated; a bare format is wrapped."""
    tag = _parsed(given)
    if not isinstance(tag, dict):
        raise RequestError("structural_tag must be a JSON object.", param="structural_tag")
    if isinstance(structures := tag.get("structures"), list):
        tags = [_tag(structure) for structure in structures]
        format_ = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
        tag = {"type": "structural_tag", "format": format_}
    return _json(tag)


def _tag(structure: Any) -> dict[str, Any]:
    if not isinstance(structure, dict):
        raise RequestError("Each of structures must be a JSON object.", param="structural_tag")
    content = {"type": "json_schema", "json_schema": structure.get("schema", {})}
    return {
        "type": "tag",
        "begin": structure.get("begin"),
        "content": content,
        "end": structure.get("end"),
    }


def _parsed(given: Schema) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return msgspec.json.decode(given)
    except (msgspec.DecodeError, RecursionError):
        raise RequestError("structural_tag is not valid JSON.", param="structural_tag") from None


def _text(schema: Schema) -> str:
    return schema if isinstance(schema, str) else _json(schema)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _one_of(choices: list[str]) -> str:
    elements = [{"type": "const_string", "value": choice} for choice in choices]
    return _json({"type": "structural_tag", "format": {"type": "or", "elements": elements}})


def _grammar_kind(text: str) -> GrammarKind:
    """vLLM takes both: EBNF defines rules by ::=, Lark by a colon."""
    return "ebnf" if "::=" in text else "lark"
