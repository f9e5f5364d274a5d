"""docs/api.md says what every field does; here each row is held against the server."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import httpx
import pytest
from pydantic.fields import FieldInfo

from tests.house.source import ROOT
from tests.server.fake_engine import FakeEngine
from tetrad.server.apis.messages.protocol import MessagesBody
from tetrad.server.apis.native.protocol import GenerateBody, NativeSampling
from tetrad.server.apis.openai.protocol import ChatBody, CompletionBody, OpenAIBody
from tetrad.server.apis.responses.protocol import ResponsesBody
from tetrad.server.app import ROUTES
from tetrad.server.bodies.fields import SamplingFields
from tetrad.server.bodies.foreign import ForeignOpenAI
from tetrad.server.bodies.read import WARNING_HEADER, Accepted, Body

KINDS = ("same", "partly", "accepted", "refused")
MESSAGES = [{"role": "user", "content": "3"}]
FUNCTION = {"name": "f", "description": "x", "parameters": {"type": "object"}}


class Api(NamedTuple):
    """A route, the least it needs, and the headings whose tables it is told by."""

    route: str
    least: dict[str, Any]
    body: type[Body]
    headings: tuple[str, ...]


SAMPLING, OPENAI = "Sampling, on every route", "Chat and completions"
APIS = [
    Api("/v1/chat/completions", {"messages": MESSAGES}, ChatBody, (SAMPLING, OPENAI)),
    Api("/v1/completions", {"prompt": "3"}, CompletionBody, (SAMPLING, OPENAI)),
    Api("/generate", {"text": "3"}, GenerateBody, ()),
    Api("/v1/responses", {"input": "3"}, ResponsesBody, (SAMPLING, OPENAI)),
    Api("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}, MessagesBody, (SAMPLING,)),
]

WORKS: dict[str, Any] = {
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "background": True,
    "best_of": 2,
    "chat_template_kwargs": {"enable_thinking": False},
    "continue_final_message": True,
    "echo": True,
    "frequency_penalty": 0.5,
    "ignore_eos": True,
    "include": ["reasoning.encrypted_content"],
    "include_reasoning": True,
    "include_stop_str_in_output": True,
    "instructions": "Be brief.",
    "logit_bias": {"5": 1},
    "logprob_start_len": -1,
    "logprobs": {"/v1/chat/completions": True, "/v1/completions": 2},
    "max_completion_tokens": 5,
    "max_new_tokens": 5,
    "max_output_tokens": 5,
    "max_tokens": 5,
    "messages": MESSAGES,
    "metadata": {"a": "b"},
    "min_new_tokens": 1,
    "min_p": 0.5,
    "min_tokens": 1,
    "modalities": ["text"],
    "model": "abacus",
    "n": {"/v1/responses": 1, "/v1/messages": 1, "": 2},
    "no_stop_trim": True,
    "output_config": {"effort": "high"},
    "parallel_tool_calls": True,
    "presence_penalty": 0.5,
    "priority": 5,
    "reasoning": {"effort": "high"},
    "reasoning_effort": "high",
    "repetition_penalty": 1.5,
    "response_format": {"type": "text"},
    "return_logprob": True,
    "request_id": "r",
    "rid": "r",
    "sampling_params": {"top_k": 5},
    "sampling_seed": 5,
    "seed": 5,
    "separate_reasoning": True,
    "skip_special_tokens": False,
    "stop": ["x"],
    "stop_sequences": ["x"],
    "stop_token_ids": [5],
    "store": True,
    "stream": True,
    "stream_options": {},
    "system": "Be brief.",
    "temperature": 0.5,
    "text": {"/generate": "3", "": {"format": {"type": "text"}}},
    "ebnf": 'root ::= "a"',
    "guided_choice": ["a", "b"],
    "guided_grammar": 'start: "a"',
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "json_schema": '{"type": "object"}',
    "regex": "a+",
    "structural_tag": '{"type": "structural_tag", "format": {"type": "any_text"}}',
    "structured_outputs": {"regex": "a+"},
    "thinking": {"type": "disabled"},
    "thinking_budget": -1,
    "thinking_token_budget": -1,
    "timeout": 5,
    "tool_choice": {"/v1/messages": {"type": "none"}, "": "none"},
    "tools": {
        "/v1/chat/completions": [{"type": "function", "function": FUNCTION}],
        "/v1/responses": [{"type": "function", **FUNCTION}],
        "/v1/messages": [{"name": "f", "input_schema": {"type": "object"}}],
    },
    "top_k": 5,
    "top_logprobs": 0,
    "top_logprobs_num": 0,
    "top_p": 0.5,
    "truncation": "disabled",
}
"""A value that works, by field, and by route where it must differ."""
SHOWN_ELSEWHERE = {"input", "input_ids", "previous_response_id", "prompt", "output_format"}
"""Fields that are the least a route needs, or that need what an earlier request gave."""


class Row(NamedTuple):
    kind: str
    why: str


def tables() -> dict[str, list[dict[str, Row]]]:
    """By heading the tables of fields under it."""
    found: dict[str, list[dict[str, Row]]] = {}
    for section in re.split(r"^## ", (ROOT / "docs/api.md").read_text(), flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        found[heading.replace("`", "")] = [
            table_of(lines)
            for lines in re.split(r"^\| field .*\n.*\n", text, flags=re.MULTILINE)[1:]
        ]
    return found


def table_of(lines: str) -> dict[str, Row]:
    fields: dict[str, Row] = {}
    for line in lines.splitlines():
        if not line.startswith("|"):
            break
        names, kind, why = (cell.strip() for cell in line.strip("|").split("|"))
        for name in names.replace("`", "").split(", "):
            assert name not in fields, name
            fields[name] = Row(kind, why)
    return fields


TABLES = tables()
NATIVE_SAMPLING: dict[str, Row] = TABLES[SAMPLING][0] | TABLES["POST /generate"][1]


def rows_of(api: Api) -> dict[str, Row]:
    """Every field of a route; what it tells itself comes before what routes share."""
    shared = [TABLES[heading][0] for heading in api.headings]
    if api.body is ResponsesBody:
        names = ForeignOpenAI.model_fields
        shared[1] = {name: row for name, row in shared[1].items() if name in names}
    rows: dict[str, Row] = {}
    for table in (*shared, TABLES[f"POST {api.route}"][0]):
        rows |= table
    return rows


def test_every_field_is_told_once_and_none_that_is_not_there():
    assert set(TABLES[SAMPLING][0]) == set(SamplingFields.model_fields)
    assert set(TABLES[OPENAI][0]) == set(OpenAIBody.model_fields) - set(SamplingFields.model_fields)
    assert set(NATIVE_SAMPLING) == set(NativeSampling.model_fields)
    for api in APIS:
        assert set(rows_of(api)) == set(api.body.model_fields), api.route
    every = [row for found in TABLES.values() for table in found for row in table.values()]
    assert len(every) > 200
    assert {row.kind for row in every} == set(KINDS)
    assert all(row.why for row in every if row.kind != "same")


def changes_nothing(field: FieldInfo) -> bool:
    return Accepted.__metadata__[0] in field.metadata


def each_field() -> list[Any]:
    fields = [(api, name, row) for api in APIS for name, row in rows_of(api).items()]
    native = APIS[2]
    fields += [(native, f"sampling_params.{name}", row) for name, row in NATIVE_SAMPLING.items()]
    return [pytest.param(*case, id=f"{case[0].route} {case[1]}") for case in fields]


def asked(api: Api, name: str, value: Any) -> dict[str, Any]:
    nested = name.removeprefix("sampling_params.")
    fields: dict[str, Any] = (
        {name: value} if nested == name else {"sampling_params": {nested: value}}
    )
    if name == "top_logprobs":
        fields["logprobs"] = True
    if name == "stream_options":
        fields["stream"] = True
    return api.least | fields


@pytest.mark.parametrize(("api", "name", "row"), each_field())
async def test_each_field_does_what_its_row_says(
    client: httpx.AsyncClient, engine: FakeEngine, api: Api, name: str, row: Row
):
    own = name.removeprefix("sampling_params.")
    model = api.body if own == name else NativeSampling
    assert changes_nothing(model.model_fields[own]) == (row.kind == "accepted")
    if own in SHOWN_ELSEWHERE and row.kind != "refused":
        return
    if row.kind == "accepted":
        values: tuple[Any, ...] = ("x", 5, {"a": [1]})
        for value in values:
            await check_accepted(client, api, asked(api, name, value))
    if row.kind in ("same", "partly"):
        value = WORKS[own]
        if isinstance(value, dict) and ("" in value or api.route in value):
            value = value[api.route if api.route in value else ""]
        await check_accepted(client, api, asked(api, name, value))
    if row.kind in ("refused", "partly"):
        await check_refused(client, api, name)


async def check_accepted(client: httpx.AsyncClient, api: Api, fields: dict[str, Any]) -> None:
    response = await client.post(api.route, json=fields)
    assert response.status_code == 200, response.text
    assert WARNING_HEADER not in response.headers


async def check_refused(client: httpx.AsyncClient, api: Api, name: str) -> None:
    bad: Any = {"tools": [{"type": "x"}], "include": ["message.output_text.logprobs"]}.get(name, 7)
    if name in ("separate_reasoning", "include_reasoning"):
        bad = False
    response = await client.post(api.route, json=asked(api, name, bad))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert str(error.get("param") or error["message"]).startswith(name), error


def test_every_route_is_told():
    text = (ROOT / "docs/api.md").read_text()
    listed = text[text.index("## Routes") : text.index("## Sampling")]
    told = set(re.findall(r"`([A-Z]+ /[^`]*)`", listed))
    assert told == {f"{method} {route.path}" for route in ROUTES for method in route.methods}
