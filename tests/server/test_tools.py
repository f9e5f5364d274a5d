"""Tool calls in GLM's format: every split gives the same calls, and malformed ones are content."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tetrad.server.tool_schema import argument_kinds
from tetrad.server.tools import MARKERS, ToolDelta, ToolParser

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "parameters": {
                "type": "object",
                "properties": {
                    "expression": {"type": "string"},
                    "digits": {"type": "integer"},
                    "options": {"type": "object"},
                    "unit": {"$ref": "#/$defs/Unit"},
                    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "exact": {"type": ["boolean", "string"]},
                },
                "$defs": {"Unit": {"enum": ["cm", "inch"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def call(name: str, **arguments: str) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{pairs}</tool_call>"


def read(pieces: Iterable[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and (name, arguments text) of every call."""
    ids = itertools.count()
    parser = ToolParser(TOOLS, lambda: f"call_{next(ids)}")
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    return collect(events)


def collect(events: Iterable[str | ToolDelta]) -> tuple[str, list[tuple[str, str]]]:
    content = ""
    names: list[str] = []
    arguments: list[str] = []
    for event in events:
        if isinstance(event, str):
            content += event
        elif event.name is not None:
            assert event.index == len(names)
            assert event.call_id == f"call_{event.index}"
            names.append(event.name)
            arguments.append(event.arguments)
        else:
            arguments[event.index] += event.arguments
    return content, list(zip(names, arguments, strict=True))


SUM = call("calculator", expression="3+5")
CASES: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("no call at all, a < b", "no call at all, a < b", []),
    (SUM, "", [("calculator", '{"expression": "3+5"}')]),
    ("Let me see.\n" + SUM, "Let me see.", [("calculator", '{"expression": "3+5"}')]),
    (call("now"), "", [("now", "{}")]),
    (call("now") + "\n" + call("now"), "", [("now", "{}"), ("now", "{}")]),
    (SUM + " \n done ", "done ", [("calculator", '{"expression": "3+5"}')]),
    (
        call("calculator", expression='a "q"\n\\', digits="3", options='{"a": [1]}'),
        "",
        [
            (
                "calculator",
                '{"expression": "a \\"q\\"\\n\\\\", "digits": 3, "options": {"a": [1]}}',
            )
        ],
    ),
    (call("calculator", digits="many"), "", [("calculator", '{"digits": "many"}')]),
    (call("calculator", digits=" 7 "), "", [("calculator", '{"digits": 7}')]),
    (call("calculator", expression="8"), "", [("calculator", '{"expression": "8"}')]),
    (call("calculator", unit="7"), "", [("calculator", '{"unit": "7"}')]),
    (call("calculator", maybe="null"), "", [("calculator", '{"maybe": null}')]),
    (call("calculator", maybe="5"), "", [("calculator", '{"maybe": "5"}')]),
    (call("calculator", exact="true"), "", [("calculator", '{"exact": true}')]),
    (call("unknown", x="NaN", y="1.5"), "", [("unknown", '{"x": "NaN", "y": 1.5}')]),
    (
        "<tool_call>calculator\n<arg_key>digits</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "",
        [("calculator", '{"digits": 3}')],
    ),
    ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
    ("a <tool_call>two words</tool_call>", "a <tool_call>two words</tool_call>", []),
    ("<tool_call>now<arg_value>", "<tool_call>now<arg_value>", []),
    ("<tool_call>now<arg_key>k</tool_call>", "<tool_call>now<arg_key>k</tool_call>", []),
    ("<tool_call><tool_call>now</tool_call>", "<tool_call>", [("now", "{}")]),
    ("<tool_call>now", "<tool_call>now", []),
    ("half <tool_ca", "half <tool_ca", []),
    (
        "<tool_call>calculator<arg_key>digits</arg_key><arg_value>3</arg_value> and more",
        " and more",
        [("calculator", '{"digits": 3}')],
    ),
    (
        "<tool_call>calculator<arg_key>expression</arg_key><arg_value>3+</tool_call>",
        "",
        [("calculator", '{"expression": "3+"}')],
    ),
    (
        "<tool_call>calculator<arg_key>expression</arg_key><arg_value>3+5</arg_",
        "",
        [("calculator", '{"expression": "3+5</arg_')],
    ),
]


@pytest.mark.parametrize(("text", "content", "calls"), CASES)
def test_every_split_gives_the_same(text: str, content: str, calls: list[tuple[str, str]]):
    for split in range(len(text) + 1):
        assert read([text[:split], text[split:]]) == (content, calls), split
    assert read(text) == (content, calls)


@pytest.mark.parametrize(("text", "content", "calls"), CASES)
def test_no_half_marker_is_shown_before_the_end(
    text: str, content: str, calls: list[tuple[str, str]]
):
    parser = ToolParser(TOOLS)
    shown = ""
    for character in text:
        shown += "".join(event for event in parser.feed(character) if isinstance(event, str))
        assert content.startswith(shown)


fragments = st.lists(
    st.sampled_from([*MARKERS, "now", "calculator", "digits", "expression", "3", " ", "x <", "\n"]),
    max_size=14,
).map("".join)


@settings(max_examples=300)
@given(fragments, st.data())
def test_any_text_however_cut_gives_the_same_and_loses_no_content(text: str, data: st.DataObject):
    whole = read([text])
    assert read(text) == whole
    cut = data.draw(st.integers(0, len(text)))
    assert read([text[:cut], text[cut:]]) == whole
    if not whole[1]:
        assert whole[0] == text


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_a_string_argument_arrives_verbatim(value: str):
    if any(marker in value for marker in MARKERS):
        return
    _, calls = read(call("calculator", expression=value))
    assert json.loads(calls[0][1]) == {"expression": value}


def test_arguments_are_streamed_as_they_come():
    parser = ToolParser(TOOLS)
    events = parser.feed("<tool_call>calculator<arg_key>expression</arg_key><arg_value>3+")
    assert isinstance(events[0], ToolDelta)
    assert events[0].name == "calculator"
    assert [e.arguments for e in events if isinstance(e, ToolDelta)] == [
        "",
        '{"expression": "',
        "3+",
    ]


def test_a_name_without_end_does_not_wait_for_ever():
    parser = ToolParser(TOOLS)
    text = "<tool_call>" + "x" * 300
    assert "".join(e for e in parser.feed(text) if isinstance(e, str)) == text


def test_a_schema_that_refers_to_itself_is_no_trap():
    loop = {"properties": {"x": {"$ref": "#/properties/x"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": loop}}]
    parser = ToolParser(tools, lambda: "call_0")
    assert collect(parser.feed(call("f", x="1"))) == ("", [("f", '{"x": 1}')])


def test_schemas_that_branch_into_each_other_are_no_trap():
    """Followed naively, 100 branches at each of many levels would never end."""
    branches = [{"$ref": "#/properties/x"}] * 100
    parameters = {
        "properties": {"x": {"anyOf": branches}, "y": {"oneOf": [{"type": "string"}] * 9}}
    }
    assert argument_kinds(parameters, "x") == frozenset()
    assert argument_kinds(parameters, "y") == {"string"}
