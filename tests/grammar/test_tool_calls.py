"""What a grammar of tool calls lets a model write is what the parser of the same format reads."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.grammar.conftest import SOURCE, Compile
from tests.grammar.test_masks import row_of
from tetrad.core.config import ServeConfig
from tetrad.core.request import Grammar
from tetrad.grammar.compiler import Compiled, Compiler
from tetrad.grammar.layout import ALLOWED
from tetrad.grammar.masks import MaskMaker
from tetrad.server.apis.openai.protocol import ChatBody
from tetrad.server.apis.openai.tool_grammar import chat_grammar
from tetrad.server.model import ServedModel
from tetrad.server.parsers.tools.formats import TOOL_FORMATS

CALC = {
    "name": "calc",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {
            "expression": {"type": "string", "maxLength": 5},
            "digits": {"type": "integer", "minimum": 0, "maximum": 99},
            "unit": {"enum": ["cm", "inch"]},
        },
        "required": ["expression", "digits"],
        "additionalProperties": False,
    },
}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": function} for function in (CALC, NOW)]


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return ServedModel.load(ServeConfig())


@pytest.fixture
def maker(compiler: Compiler) -> Iterator[MaskMaker]:
    made = MaskMaker(compiler, SOURCE.size, 1)
    yield made
    made.stop()


def grammar_of(model: ServedModel, name: str, **fields: Any) -> Grammar:
    body = {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS} | fields
    served = replace(model, tool_call_parser=name, reasoning_parser=None)
    grammar = chat_grammar(served, ChatBody.model_validate(body), None)
    assert grammar is not None
    return grammar


def write(maker: MaskMaker, compiled: Compiled, vocabulary: list[bytes], seed: int) -> str:
    """A random text that the grammar allows; it ends when it may. Single bytes are rare, so that
    most of it is text."""
    draw = random.Random(seed)
    number, said = maker.open(compiled), b""
    news: list[int] = []
    while True:
        assert maker.fill([(number, news)]) == [ALLOWED]
        allowed = row_of(maker, 0)
        ends = allowed & set(SOURCE.end_ids)
        if ends:
            maker.close(number)
            return said.decode(errors="replace")
        readable = sorted(i for i in allowed if vocabulary[i].isascii())
        news = [draw.choice(readable or sorted(allowed))]
        said += vocabulary[news[0]]
        assert len(said) < 20_000


def check_arguments(name: str, text: str) -> None:
    arguments = json.loads(text)
    if name == "now":
        assert arguments == {}
        return
    assert name == "calc"
    assert set(arguments) - {"unit"} == {"expression", "digits"}
    assert isinstance(arguments["expression"], str)
    assert 0 <= arguments["digits"] <= 99
    assert arguments.get("unit", "cm") in ("cm", "inch")


@pytest.mark.parametrize("form", TOOL_FORMATS)
@pytest.mark.parametrize("choice", ["required", "calc", "now"])
def test_a_forced_call_is_read_as_one(
    compiled: Compile,
    maker: MaskMaker,
    vocabulary: list[bytes],
    model: ServedModel,
    form: str,
    choice: str,
):
    named = {"type": "function", "function": {"name": choice}}
    grammar = grammar_of(model, form, tool_choice="required" if choice == "required" else named)
    outcome = compiled(grammar.kind, grammar.text)
    assert isinstance(outcome, Compiled), outcome
    for seed in range(6):
        text = write(maker, outcome, vocabulary, seed)
        parser = TOOL_FORMATS[form](TOOLS)
        events = [*parser.feed(text), *parser.finish()]
        calls: dict[int, tuple[str, str]] = {}
        for event in events:
            assert not isinstance(event, str), f"content {event!r} of {text!r}"
            name, so_far = calls.get(event.index, (event.name or "", ""))
            calls[event.index] = (name, so_far + event.arguments)
        assert calls, text
        assert choice == "required" or [name for name, _ in calls.values()] == [choice]
        for name, arguments in calls.values():
            check_arguments(name, arguments)


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_text_or_calls_compile(compiled: Compile, model: ServedModel, form: str):
    for fields in (
        {},
        {"parallel_tool_calls": False},
        {"response_format": {"type": "json_object"}},
        {"regex": "a+"},
        {"ebnf": 'root ::= "a"'},
        {"guided_grammar": 'start: "a"'},
        {"guided_choice": ["a", "b"]},
    ):
        grammar = grammar_of(model, form, **fields)
        assert isinstance(compiled(grammar.kind, grammar.text), Compiled), fields
