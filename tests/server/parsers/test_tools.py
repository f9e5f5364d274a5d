"""Tool calls: every split gives the same calls, and malformed ones are content."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tetrad.server.parsers.tools.dsml import DsmlParser
from tetrad.server.parsers.tools.events import ToolDelta, ToolParser
from tetrad.server.parsers.tools.formats import TOOL_FORMATS, guessed_format
from tetrad.server.parsers.tools.glm import GlmParser
from tetrad.server.parsers.tools.json import JsonParser
from tetrad.server.parsers.tools.schema import argument_kinds

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
                    "size": {"enum": ["big", "small"]},
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


def read(
    pieces: Iterable[str], form: type[ToolParser] = GlmParser
) -> tuple[str, list[tuple[str, str]]]:
    """Content, and (name, arguments text) of every call."""
    ids = itertools.count()
    parser = form(TOOLS, lambda: f"call_{next(ids)}")
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
GLM: list[tuple[str, str, list[tuple[str, str]]]] = [
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
    (call("calculator", size="\n big "), "", [("calculator", '{"size": "big"}')]),
    (call("calculator", size=" huge"), "", [("calculator", '{"size": " huge"}')]),
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


def json_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


JSON: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("no call at all, a < b", "no call at all, a < b", []),
    (json_call("now", "{}"), "", [("now", "{}")]),
    (json_call("now", "{}") + "\n" + json_call("now", "{}"), "", [("now", "{}")] * 2),
    (
        "Let me see.\n" + json_call("calculator", '{"expression": "3+5", "options": {"a": {}}}'),
        "Let me see.",
        [("calculator", '{"expression": "3+5", "options": {"a": {}}}')],
    ),
    (
        json_call("calculator", r'{"expression": "} \\\" </tool_call> {"}') + " done",
        "done",
        [("calculator", r'{"expression": "} \\\" </tool_call> {"}')],
    ),
    (
        '<tool_call>{"name":"now","parameters":{"x":[{}]}}</tool_call>',
        "",
        [("now", '{"x":[{}]}')],
    ),
    (
        '<tool_call>\n{"arguments": {"x": 1}, "name": "now"}\n</tool_call>after',
        "after",
        [("now", '{"x":1}')],
    ),
    ('<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    (
        '<tool_call>{"name": "now", "arguments": {}, "id": "x"}</tool_call> after',
        "after",
        [("now", "{}")],
    ),
    (
        '<tool_call>{"name": "now", "arguments": {"a":\t"b\t{\x01"}}</tool_call>',
        "",
        [("now", '{"a":\t"b\\t{\\u0001"}')],
    ),
    ('<tool_call>{"name": "now", "arguments": {"a": "b', "", [("now", '{"a": "b')]),
    ('<tool_call>{"name": "now", "arguments": {"a": "b\\', "", [("now", '{"a": "b\\')]),
    ('<tool_call>{"name": "now", "arguments": {}', "", [("now", "{}")]),
    ('<tool_call>{"name": "now", "arguments": {}} and', "and", [("now", "{}")]),
    ('<tool_call>{"name": "now", "arguments": {}', "", [("now", "{}")]),
    ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
    ("<tool_call>now</tool_call>", "<tool_call>now</tool_call>", []),
    ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    (
        '<tool_call>{"name": "a b"}</tool_call>',
        '<tool_call>{"name": "a b"}</tool_call>',
        [],
    ),
    (
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        [],
    ),
    ("<tool_call>{nonsense}</tool_call>", "<tool_call>{nonsense}</tool_call>", []),
    ('<tool_call>{"name": "no', '<tool_call>{"name": "no', []),
    ("half <tool_ca", "half <tool_ca", []),
]

D = "\uff5cDSML\uff5c"


def dsml_block(*calls: str) -> str:
    return f"<{D}function_calls>\n" + "".join(calls) + f"</{D}function_calls>"


def dsml_call(name: str, *parameters: tuple[str, bool, str]) -> str:
    lines = "".join(
        f'<{D}parameter name="{key}" string="{str(is_text).lower()}">{value}</{D}parameter>\n'
        for key, is_text, value in parameters
    )
    return f'<{D}invoke name="{name}">\n{lines}</{D}invoke>\n'


DSML: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("no call at all, a < b", "no call at all, a < b", []),
    (dsml_block(dsml_call("now")), "", [("now", "{}")]),
    (
        "Let me see.\n\n" + dsml_block(dsml_call("now"), dsml_call("now")) + "\n",
        "Let me see.",
        [("now", "{}"), ("now", "{}")],
    ),
    (
        dsml_block(
            dsml_call("calculator", ("expression", True, 'a "q"\n<b>'), ("digits", False, " 3 "))
        ),
        "",
        [("calculator", '{"expression": "a \\"q\\"\\n<b>", "digits": 3}')],
    ),
    (
        dsml_block(dsml_call("calculator", ("options", False, '{"a": [1]}'))) + " done",
        "done",
        [("calculator", '{"options": {"a": [1]}}')],
    ),
    (
        dsml_block(dsml_call("calculator", ("digits", False, "many"))),
        "",
        [("calculator", '{"digits": "many"}')],
    ),
    (dsml_block(), dsml_block(), []),
    (f"<{D}function_calls>text", f"<{D}function_calls>text", []),
    (f"a <{D}invoke name", f"a <{D}invoke name", []),
    (
        dsml_block(f'<{D}invoke name="two words">'),
        dsml_block(f'<{D}invoke name="two words">'),
        [],
    ),
    (f'<{D}function_calls><{D}invoke name="no', f'<{D}function_calls><{D}invoke name="no', []),
    (
        f"<{D}function_calls>" + dsml_call("now") + "and more",
        "and more",
        [("now", "{}")],
    ),
    (
        dsml_block(dsml_call("calculator", ("expression", True, "3+"))).partition("</")[0],
        "",
        [("calculator", '{"expression": "3+')],
    ),
    (f"half <{D}func", f"half <{D}func", []),
]

CASES = [
    *(pytest.param(GlmParser, *case, id=f"glm-{number}") for number, case in enumerate(GLM)),
    *(pytest.param(JsonParser, *case, id=f"json-{number}") for number, case in enumerate(JSON)),
    *(pytest.param(DsmlParser, *case, id=f"dsml-{number}") for number, case in enumerate(DSML)),
]
FORMS = [GlmParser, JsonParser, DsmlParser]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_every_split_gives_the_same(
    form: type[ToolParser], text: str, content: str, calls: list[tuple[str, str]]
):
    assert read([text], form) == (content, calls)
    for split in range(len(text) + 1):
        assert read([text[:split], text[split:]], form) == (content, calls), split
    assert read(text, form) == (content, calls)


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_no_half_marker_is_shown_before_the_end(
    form: type[ToolParser], text: str, content: str, calls: list[tuple[str, str]]
):
    parser = form(TOOLS)
    shown = ""
    for character in text:
        shown += "".join(event for event in parser.feed(character) if isinstance(event, str))
        assert content.startswith(shown)


WORDS = ["now", "calculator", "digits", "expression", "3", " ", "x <", "\n"]
PIECES: dict[type[ToolParser], list[str]] = {
    GlmParser: [],
    JsonParser: ["{", "}", '{"name": "now", "arguments": ', '"', "\\", '{"a": "', ","],
    DsmlParser: [">", ' name="now">', ' name="digits" string="false">', ' name="x"'],
}


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=250)
@given(data=st.data())
def test_any_text_however_cut_gives_the_same_and_loses_no_content(
    form: type[ToolParser], data: st.DataObject
):
    known = [*form.markers, *WORDS, *PIECES[form]]
    text = "".join(data.draw(st.lists(st.sampled_from(known), max_size=14)))
    whole = read([text], form)
    assert read(text, form) == whole
    cut = data.draw(st.integers(0, len(text)))
    assert read([text[:cut], text[cut:]], form) == whole
    if not whole[1]:
        assert whole[0] == text


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>{{ name }}<arg_key>", "glm47"),
        ("<tool_call>{{ name }}\\n<arg_key>", "glm45"),
        ("<tool_call>{{ tool_call | tojson }}", "hermes"),
        ("<{{ dsml }}invoke>" + D, "deepseekv32"),
        ("hello", None),
    ],
)
def test_the_template_tells_the_format(template: str, name: str | None):
    assert guessed_format(template) == name
    assert name is None or name in TOOL_FORMATS


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_a_string_argument_arrives_verbatim(value: str):
    if any(marker in value for marker in GlmParser.markers):
        return
    _, calls = read(call("calculator", expression=value))
    assert json.loads(calls[0][1]) == {"expression": value}


def test_arguments_are_streamed_as_they_come():
    parser = GlmParser(TOOLS)
    events = parser.feed("<tool_call>calculator<arg_key>expression</arg_key><arg_value>3+")
    assert isinstance(events[0], ToolDelta)
    assert events[0].name == "calculator"
    assert [e.arguments for e in events if isinstance(e, ToolDelta)] == [
        "",
        '{"expression": "',
        "3+",
    ]


def test_a_name_without_end_does_not_wait_for_ever():
    parser = GlmParser(TOOLS)
    text = "<tool_call>" + "x" * 300
    assert "".join(e for e in parser.feed(text) if isinstance(e, str)) == text


def test_a_schema_that_refers_to_itself_is_no_trap():
    loop = {"properties": {"x": {"$ref": "#/properties/x"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": loop}}]
    parser = GlmParser(tools, lambda: "call_0")
    assert collect(parser.feed(call("f", x="1"))) == ("", [("f", '{"x": 1}')])


def test_schemas_that_branch_into_each_other_are_no_trap():
    """Followed naively, 100 branches at each of many levels would never end."""
    branches = [{"$ref": "#/properties/x"}] * 100
    parameters = {
        "properties": {"x": {"anyOf": branches}, "y": {"oneOf": [{"type": "string"}] * 9}}
    }
    assert argument_kinds(parameters, "x") == frozenset()
    assert argument_kinds(parameters, "y") == {"string"}
