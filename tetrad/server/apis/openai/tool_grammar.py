"""What an answer must match so that it calls tools as asked, as structural tags of xgrammar.

    tool_choice "required", or a name     calls and nothing else
    "auto" with strict tools, or          free text, in which every call is one of a known tool with
    parallel_tool_calls false             arguments by its schema
    "auto" beside a response_format       calls, or what the format asks for

Arguments match a tool's schema if it is strict or its call is forced, else they are any. Where
calls are not read from the text, none can be forced, and strict tools constrain nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from tetrad.core.errors import RequestError
from tetrad.core.request import Grammar
from tetrad.server.apis.openai.protocol import ChatBody
from tetrad.server.bodies.constraints import grammar_of
from tetrad.server.model import ServedModel
from tetrad.server.parsers import reasoning
from tetrad.server.parsers.reasoning import Start
from tetrad.server.parsers.tools import dsml
from tetrad.server.parsers.tools import json as tools_json
from tetrad.server.parsers.tools.dsml import DsmlParser
from tetrad.server.parsers.tools.events import ToolParser
from tetrad.server.parsers.tools.formats import TOOL_FORMATS
from tetrad.server.parsers.tools.glm import GlmParser

Format = dict[str, Any]

BEFORE_CALLS = r"\n{0,2}"
"""What models write between reasoning and calls."""


def chat_grammar(model: ServedModel, body: ChatBody, start: Start | None) -> Grammar | None:
    """What constrains the answers of a chat, from `start` on, which is None where no reasoning is
    split off. Raises RequestError."""
    grammar = _with_tools(model, body, grammar_of(body))
    if grammar is None or start in (None, "after"):
        return grammar
    return _after_reasoning(model, grammar, is_open=start == "inside")


def _with_tools(model: ServedModel, body: ChatBody, asked: Grammar | None) -> Grammar | None:
    tools, form = body.active_tools, model.tool_format
    is_forced = body.forced_tool is not None
    is_one = body.parallel_tool_calls is False or bool(body.forced_tool)
    is_strict = any(tool["function"].get("strict") for tool in tools)
    if form is None:
        if is_forced:
            raise RequestError(
                "tool_choice forces a call, and calls of this model are not read; start the server "
                f"with --tool-call-parser and one of {', '.join(TOOL_FORMATS)}, whichever the "
                "model was trained to write, or send tool_choice auto.",
                param="tool_choice",
            )
        return asked
    if is_forced:
        chosen = [tool for tool in tools if body.forced_tool in ("", tool["function"]["name"])]
        return _tag("tools", _only_calls(form, _all_strict(chosen), is_one=is_one))
    if tools and asked is not None:
        calls = _only_calls(form, tools, is_one=is_one)
        return _tag(asked.field, {"type": "or", "elements": [_format_of(asked), calls]})
    if is_strict or (tools and is_one):
        return _tag("tools", _calls_in_text(form, tools, is_one=is_one))
    return asked


def _after_reasoning(model: ServedModel, grammar: Grammar, *, is_open: bool) -> Grammar:
    """Nothing is constrained before the reasoning has ended."""
    form, id_of = model.reasoning_format, model.tokenizer.id_of
    assert form is not None
    open_id, close_id = id_of(reasoning.OPEN), id_of(reasoning.CLOSE)
    if open_id is None or close_id is None:
        raise RequestError(
            f"In this model's vocabulary {reasoning.OPEN} and {reasoning.CLOSE} are no tokens of "
            "their own, so an answer after reasoning cannot be constrained; switch reasoning off.",
            param=grammar.field,
        )
    return replace(
        grammar,
        close_id=close_id,
        open_id=None if is_open else open_id,
        call_id=id_of(reasoning.TOOL_CALL) if form.call_ends else None,
    )


def _all_strict(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**tool, "function": {**tool["function"], "strict": True}} for tool in tools]


def _only_calls(form: type[ToolParser], tools: Sequence[dict[str, Any]], *, is_one: bool) -> Format:
    calls = _calls(form, tools, is_one=is_one)
    if form is DsmlParser:
        calls = _block(calls)
    return {"type": "sequence", "elements": [{"type": "regex", "pattern": BEFORE_CALLS}, calls]}


def _calls_in_text(
    form: type[ToolParser], tools: Sequence[dict[str, Any]], *, is_one: bool
) -> Format:
    is_block = form is DsmlParser
    tags = [_block(_calls(form, tools, is_one=is_one))] if is_block else _tags(form, tools)
    return {
        "type": "triggered_tags",
        "triggers": [form.open],
        "tags": tags,
        "stop_after_first": is_one,
    }


def _calls(form: type[ToolParser], tools: Sequence[dict[str, Any]], *, is_one: bool) -> Format:
    """One or more."""
    return {
        "type": "tags_with_separator",
        "tags": _tags(form, tools),
        "separator": "" if form in (GlmParser, DsmlParser) else "\n",
        "at_least_one": True,
        "stop_after_first": is_one,
    }


def _block(calls: Format) -> Format:
    """DeepSeek's calls stand in one block."""
    return {
        "type": "tag",
        "begin": f"{dsml.OPEN}\n",
        "content": calls,
        "end": dsml.CLOSE,
    }


def _tags(form: type[ToolParser], tools: Sequence[dict[str, Any]]) -> list[Format]:
    return [_call(form, tool["function"]) for tool in tools]


def _call(form: type[ToolParser], function: dict[str, Any]) -> Format:
    """One call as the model writes it."""
    name = function["name"]
    if form is GlmParser:
        begin, style, end = f"{form.open}{name}", "glm_xml", "</tool_call>"
    elif form is DsmlParser:
        begin = f'{dsml.INVOKE} name="{name}">\n'
        style, end = "deepseek_xml", f"{dsml.INVOKE_CLOSE}\n"
    else:
        begin = f'{form.open}\n{{"name": "{name}", "arguments": '
        style, end = "json", f"}}\n{tools_json.CLOSE}"
    schema: Any = {"type": "object"}
    if function.get("strict"):
        schema = function.get("parameters") or {"type": "object", "properties": {}}
    content = {"type": "json_schema", "json_schema": schema, "style": style}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _format_of(grammar: Grammar) -> Format:
    """A grammar as a part of a structural tag."""
    match grammar.kind:
        case "json_schema":
            return {"type": "json_schema", "json_schema": _parsed(grammar)}
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "structural_tag":
            parsed = _parsed(grammar)
            form = parsed.get("format") if isinstance(parsed, dict) else None
            return form if isinstance(form, dict) else {"type": "unknown"}
        case _:
            return {"type": "grammar", "grammar": grammar.text, "syntax": grammar.kind}


def _parsed(grammar: Grammar) -> Any:
    try:
        return msgspec.json.decode(grammar.text)
    except (msgspec.DecodeError, RecursionError):
        raise RequestError(f"{grammar.field} is not valid JSON.", param=grammar.field) from None


def _tag(field: str, form: Format) -> Grammar:
    tag = {"type": "structural_tag", "format": form}
    return Grammar("structural_tag", msgspec.json.encode(tag).decode(), field)
