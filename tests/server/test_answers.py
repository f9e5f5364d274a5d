"""The served OpenAPI document describes what is asked, and what is answered as it is."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from typing import Any

import httpx
import jsonschema_rs
import pytest

from tests.server.conftest import until
from tests.server.fake_engine import FakeEngine, Step, saying
from tests.server.test_api_document import APIS
from tetrad.core.jsonfile import read_json_object
from tetrad.core.request import Finish
from tetrad.server.apis.native.protocol import NativeSampling
from tetrad.server.app import ANSWERS, FAMILIES, ROUTES, openapi_document
from tetrad.server.bodies.foreign import Refused
from tetrad.server.service import Service
from tetrad.server.text.tokenizer import Tokenizer

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TALK = [{"role": "user", "content": "What is 3+5?"}]
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
FUNCTION = {"name": "calculator", "description": "computes", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
VERBS = (
    "Abort|Answer|Cancel|Change|Continue|Count|Create|Delete|Describe|Empty|Generate|Get|Have|List|"
    "Pause|Profile|Stop|Tokenize|Turn"
)
"""What summaries of operations begin with."""
RESPONSES_TOOL = {"type": "function", **FUNCTION}
MESSAGES_TOOL = {"name": "calculator", "input_schema": PARAMETERS}
CALL = "<tool_call>calculator<arg_key>expression</arg_key><arg_value>3+5</arg_value></tool_call>"
SAID = f"three plus five</think>3 + 5 = 8{CALL}"
USAGE = {"include_usage": True}
CHOSEN = {"tools": [RESPONSES_TOOL], "tool_choice": {"type": "function", "name": "calculator"}}


SHORT = {"input": "3"}


def native(**sampling: Any) -> dict[str, Any]:
    return {"text": "3 4", "sampling_params": sampling}


def talk(**fields: Any) -> dict[str, Any]:
    return {"messages": TALK} | fields


ASKED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, talk()),
    (CHAT, talk(tools=[TOOL], stream_options=USAGE)),
    (CHAT, talk(tools=[TOOL], n=2, logprobs=True, top_logprobs=2)),
    (CHAT, talk(max_tokens=3, stream_options=USAGE | {"continuous_usage_stats": True})),
    (CHAT, talk(stop=" = ")),
    (COMPLETIONS, {"prompt": "3 4", "max_tokens": 100}),
    (COMPLETIONS, {"prompt": ["3 4", "5"], "n": 2, "echo": True, "stream_options": USAGE}),
    (COMPLETIONS, {"prompt": [5, 6], "logprobs": 2, "stop": " = ", "max_tokens": 30}),
    (GENERATE, native(max_new_tokens=4)),
    (GENERATE, native()),
    (GENERATE, native(n=2) | {"return_logprob": True, "top_logprobs_num": 2}),
    (GENERATE, native(stop=["plus"]) | {"text": ["3", "4"], "return_logprob": True}),
    (RESPONSES, {"input": "3"}),
    (RESPONSES, {"input": "3", "tools": [RESPONSES_TOOL], "metadata": {"a": "b"}}),
    (RESPONSES, {"input": "3", "instructions": "Be brief.", **CHOSEN}),
    (RESPONSES, {"input": "3", "max_output_tokens": 12, "reasoning": {"effort": "high"}}),
    (MESSAGES, talk(max_tokens=100)),
    (MESSAGES, talk(max_tokens=100, tools=[MESSAGES_TOOL], tool_choice={"type": "auto"})),
    (MESSAGES, talk(max_tokens=8)),
    (MESSAGES, talk(max_tokens=100, stop_sequences=[" = "])),
]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """As it is served, but for objects of answers that have nothing else than what is told."""
    found = deepcopy(openapi_document())
    for name in read_json_object(ANSWERS)["schemas"]:
        close(found["components"]["schemas"][name])
    return found


def close(schema: Any) -> None:
    if isinstance(schema, dict):
        if "properties" in schema:
            schema["additionalProperties"] = False
        for part in schema.values():
            close(part)
    elif isinstance(schema, list):
        for part in schema:
            close(part)


def check(document: dict[str, Any], method: str, route: str, answer: httpx.Response) -> list[Any]:
    """That it is what the document says of the route; returns what was in it."""
    told = document["paths"][route][method]["responses"]
    contents = told[str(answer.status_code) if answer.status_code == 200 else "default"]["content"]
    kind = answer.headers.get("content-type", "").partition(";")[0]
    if not contents:
        assert (kind, answer.content) == ("", b"")
        return []
    schema = contents[kind]["schema"] | {"components": document["components"]}
    validator = jsonschema_rs.Draft202012Validator(schema)
    found = parts(kind, answer.text)
    for each in found:
        for error in validator.iter_errors(each):
            raise AssertionError(f"{error.message} at {error.instance_path} of {each}")
    return found


def parts(kind: str, text: str) -> list[Any]:
    """The value of an answer, or of each event of a stream."""
    if kind == "text/plain":
        return [text]
    if kind == "application/json":
        return [json.loads(text)]
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert len(lines) > 1
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("route", "body"), ASKED)
async def test_answers_are_what_the_document_says(
    address: str,
    engine: FakeEngine,
    tokenizer: Tokenizer,
    document: dict[str, Any],
    route: str,
    body: dict[str, Any],
    stream: bool,
):
    engine.info["context_length"] = 1000
    engine.script = saying(tokenizer.encode(SAID, add_special_tokens=False))
    sent = {name: value for name, value in body.items() if stream or name != "stream_options"}
    async with httpx.AsyncClient(base_url=address) as client:
        answer = await client.post(route, json=sent | {"stream": stream})
        assert answer.status_code == 200, answer.text
        check(document, "post", route, answer)


async def test_answers_without_a_text_are_too(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, document: dict[str, Any]
):
    engine.script = saying(tokenizer.encode(f"</think>{CALL}", add_special_tokens=False))
    (found,) = check(document, "post", CHAT, await client.post(CHAT, json=talk(tools=[TOOL])))
    message = found["choices"][0]["message"]
    assert message["content"] is message["reasoning_content"] is None


@pytest.mark.parametrize("end", ["abort", "error"])
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, GENERATE, RESPONSES, MESSAGES])
async def test_streams_that_end_otherwise_are_too(
    address: str, engine: FakeEngine, document: dict[str, Any], route: str, end: Any
):
    engine.script = lambda _: [Step((18,)), Step((), Finish(end, message="No luck."))]
    body = next(body for asked, body in ASKED if asked == route)
    async with httpx.AsyncClient(base_url=address) as client:
        found = check(
            document, "post", route, await client.post(route, json=body | {"stream": True})
        )
        if end == "abort":
            check(document, "post", route, await client.post(route, json=body))
    assert ("No luck." in json.dumps(found[-1])) == (end == "error")


@pytest.mark.parametrize("route", [CHAT, MESSAGES])
async def test_refusals_are_too(client: httpx.AsyncClient, document: dict[str, Any], route: str):
    (found,) = check(document, "post", route, await client.post(route, json={}))
    assert "messages" in found["error"]["message"]


async def test_other_routes_are_too(
    client: httpx.AsyncClient, engine: FakeEngine, service: Service, document: dict[str, Any]
):
    cards: list[tuple[str, Any]] = [
        *(("/tokenize", {"prompt": text}) for text in ("3", ["3", "4 5"])),
        *(("/v1/tokenize", {"messages": TALK}), ("/detokenize", {"tokens": [5]})),
        *(("/v1/detokenize", {"tokens": []}), ("/v1/messages/count_tokens", talk())),
        *(("/abort_request", {"abort_all": True}), ("/pause_generation", None)),
        *(("/continue_generation", None), ("/start_profile", None), ("/stop_profile", None)),
        *(("/configure_logging", {"log_level": "info"}), ("/ping", None), ("/flush_cache", None)),
    ]
    for path, body in cards:
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        check(document, "post", path, answer)
    check(document, "put", GENERATE, await client.put(GENERATE, json=native()))
    plain = [route for route in ROUTES if "GET" in route.methods and "{" not in route.path]
    for route in plain:
        check(document, "get", route.path, await client.get(route.path))
    one = await client.get("/v1/models/abacus")
    check(document, "get", "/v1/models/{name}", one)


async def test_stored_responses_are_too(
    client: httpx.AsyncClient, engine: FakeEngine, service: Service, document: dict[str, Any]
):
    engine.gate.clear()
    begun = await client.post(RESPONSES, json={"input": "3", "background": True})
    check(document, "post", RESPONSES, begun)
    path = f"{RESPONSES}/{begun.json()['id']}"
    await until(lambda: bool(engine.live))
    stored, told = f"{RESPONSES}/{{response_id}}", "/v1/responses/{response_id}/cancel"
    check(document, "get", stored, await client.get(path))
    (ended,) = check(document, "post", told, await client.post(f"{path}/cancel"))
    assert ended["status"] == "cancelled"
    check(document, "delete", stored, await client.delete(path))
    engine.gate.set()
    (first,) = check(document, "post", RESPONSES, await client.post(RESPONSES, json=SHORT))
    body = SHORT | {"previous_response_id": first["id"]}
    check(document, "post", RESPONSES, await client.post(RESPONSES, json=body))


def test_every_route_has_its_answers_and_no_schema_two_meanings(document: dict[str, Any]):
    answers = read_json_object(ANSWERS)
    told = {f"{method} {route.path}" for route in ROUTES for method in route.methods}
    assert set(answers["routes"]) == told
    bodies = [
        s for n, s in document["components"]["schemas"].items() if n not in answers["schemas"]
    ]
    for name in answers["schemas"]:
        reference = f'"#/components/schemas/{name}"'
        assert reference in json.dumps(document), f"{name} is used nowhere"
        assert reference not in json.dumps(bodies), f"{name} is a part of a body, too"


def test_every_field_of_a_body_is_described(document: dict[str, Any]):
    answers = read_json_object(ANSWERS)["schemas"]
    bodies = {n: s for n, s in document["components"]["schemas"].items() if n not in answers}
    assert len(bodies) > 30
    told = [way["summary"] for path in document["paths"].values() for way in path.values()]
    assert all(summary == " ".join(summary.split()) for summary in told)
    assert all(re.match(rf"({VERBS})\b.* .*\.$", summary) for summary in told), told
    for name, schema in bodies.items():
        for field, told in schema.get("properties", {}).items():
            assert 5 < len(told.get("description", "")) < 200, f"{name}.{field}"
    temperature = bodies["ChatBody"]["properties"]["temperature"]
    assert temperature["description"] == "Randomness, 0 to 100; 0 is greedy. Default: the model's."
    assert bodies["ResponsesBody"]["properties"]["n"]["description"] == "Always 1.", "not its own"


def test_each_operation_has_a_short_name_of_its_own_and_the_api_it_is_of(document: dict[str, Any]):
    ways = [way for path in document["paths"].values() for way in path.values()]
    names = [way["operationId"] for way in ways]
    assert len(set(names)) == len(names) == sum(len(route.methods) for route in ROUTES)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]{,25}", name) for name in names), names
    for path, method, name, api in (
        (CHAT, "post", "create_chat_completion", "OpenAI"),
        ("/v1/responses/{response_id}/cancel", "post", "cancel_response", "OpenAI"),
        (f"{MESSAGES}/count_tokens", "post", "count_message_tokens", "Anthropic"),
        (GENERATE, "post", "generate", "SGLang"),
        (GENERATE, "put", "generate_put", "SGLang"),
        ("/tokenize", "post", "tokenize", "vLLM"),
        ("/abort_request", "post", "abort_request", "Operation"),
    ):
        way = document["paths"][path][method]
        assert (way["operationId"], way["tags"]) == (name, [api])
    assert {tag for way in ways for tag in way["tags"]} == set(FAMILIES)


def test_what_is_refused_is_marked_and_told_as_it_is(document: dict[str, Any]):
    num_refused = 0
    kinds = [(api.body, api.least) for api in APIS] + [(NativeSampling, {})]
    for body, least in kinds:
        shown = document["components"]["schemas"][body.__name__]["properties"]
        for name, field in body.model_fields.items():
            marks = [mark for mark in field.metadata if isinstance(mark, Refused)]
            assert bool(shown[name].get("deprecated")) == bool(marks), name
            for mark in marks:
                num_refused += 1
                told = shown[name]["description"]
                assert mark.reason in told
                for value in (None, False, 0, "", [], {}, *mark.allowed):
                    body.model_validate(least | {name: value})
                assert all(repr(value) in told for value in mark.allowed)
                for value in (7, "x", [0], {"a": 0}, True):
                    with pytest.raises(ValueError, match=name):
                        body.model_validate(least | {name: value})
    assert num_refused > 100
