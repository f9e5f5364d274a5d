"""The body of OpenAI's POST /v1/responses, and what it is as a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tetrad.server.apis.openai.protocol import ChatBody
from tetrad.server.bodies.fields import (
    LARGEST,
    Count,
    NamedBody,
    Priority,
    SamplingFields,
    Seconds,
    Seed,
    sampling_of,
)
from tetrad.server.bodies.foreign import ForeignOpenAI, Refused
from tetrad.server.bodies.read import Accepted, Body, OpenBody, checked
from tetrad.server.stream.blocks import Block

ChatMessages = list[dict[str, Any]]
TEXTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")


class Part(OpenBody):
    type: str
    """`input_text`, `output_text`, `reasoning_text`, `summary_text` or `text`."""
    text: str | None = None
    """What it says."""

    @model_validator(mode="after")
    def _is_text(self) -> Part:
        if self.type not in TEXTS or self.text is None:
            raise ValueError(
                f'a part of type "{self.type}" cannot be read; this model reads text, '
                'as {"type": "input_text", "text": "..."}'
            )
        return self


Content = str | Annotated[list[Part], Field(fail_fast=True)] | None


class Item(OpenBody):
    """One item of the input: a message, reasoning, a call, or what came of it."""

    type: str = "message"
    """`message`, `reasoning`, `function_call` or `function_call_output`."""
    role: Literal["user", "assistant", "system", "developer"] | None = None
    """Of a message: who says it."""
    content: Content = None
    """Of a message or reasoning: a text or text parts."""
    summary: Content = None
    """Of reasoning without content: read instead."""
    call_id: str | None = None
    """Of a call and of its output: which one."""
    name: str | None = None
    """Of a call: the function."""
    arguments: str | None = None
    """Of a call: JSON of its arguments."""
    output: Content = None
    """Of a call's output: a text or text parts."""

    @model_validator(mode="after")
    def _is_known(self) -> Item:
        needed = _NEEDED.get(self.type)
        if needed is None:
            raise ValueError(
                f'an item of type "{self.type}" cannot be read; here there are {", ".join(_NEEDED)}'
            )
        for name in needed:
            if getattr(self, name) is None:
                raise ValueError(f'an item of type "{self.type}" needs {name}')
        return self


_NEEDED: dict[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}


class Reasoning(Body):
    effort: str | None = None
    """The same as reasoning_effort of chat."""
    summary: Accepted = None
    generate_summary: Accepted = None
    context: Accepted = None
    mode: Accepted = None


class TextConfig(Body):
    format: dict[str, Any] | None = None
    """The same as response_format of chat, with the schema beside `type`."""
    verbosity: Accepted = None


class FunctionTool(OpenBody):
    type: str
    """Always `function`; tools that would run here are refused."""
    name: str | None = None
    """What the model calls it."""
    description: str | None = None
    """What it does, for the model."""
    parameters: dict[str, Any] | None = None
    """JSON Schema of its arguments."""
    strict: bool | None = None
    """Whether arguments match the schema whatever the model would say. Default false."""

    @model_validator(mode="after")
    def _is_a_function(self) -> FunctionTool:
        if self.type != "function" or self.name is None:
            raise ValueError(
                f'a tool of type "{self.type}" would run here, and nothing does; the client can '
                'offer its own as {"type": "function", "name": "..."}'
            )
        return self


class ResponsesBody(SamplingFields, NamedBody, ForeignOpenAI):
    """POST /v1/responses. Sampling fields of SGLang and vLLM are known beside OpenAI's."""

    model: str | None = None
    """The served name, the model's folder or `default`; anything else is a 404. Default: the served
    model."""
    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    """A text, or messages, reasoning, function calls and their outputs."""
    instructions: str | None = None
    """A system message for this request alone."""
    previous_response_id: str | None = None
    """Go on from this stored response."""
    store: bool | None = None
    """Keep the response for an hour, so that it can be fetched and continued. Default true."""
    background: bool | None = None
    """Answer at once and compute without a connection; needs store. Default false."""
    stream: bool | None = None
    """Send the response as server-sent events, while it is computed. Default false."""
    stream_options: Accepted = None
    max_output_tokens: Count | None = None
    """Most tokens of the answer, reasoning included. Default: all that fit."""
    min_tokens: int | None = Field(default=None, ge=0, le=LARGEST)
    """No end token and no stop string ends the answer before so many tokens. Default 0."""
    seed: Seed | None = None
    """The same seed and input give the same text. Default: drawn."""
    n: int | None = Field(default=None, ge=1, le=1)
    """Always 1."""
    metadata: dict[str, Any] | None = None
    """Given back with the response."""
    reasoning: Reasoning | None = None
    """How much to think."""
    text: TextConfig | None = None
    """What form the answer has."""
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None
    """Functions that the model may call; nothing is run here."""
    tool_choice: str | dict[str, Any] | None = None
    """`none`, `auto`, `required` or {"type": "function", "name": ...}. Default `auto`."""
    parallel_tool_calls: bool | None = None
    """false: one call at most. Default true."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""
    priority: Priority | None = None
    """Higher goes first, if the server runs with --enable-priority-scheduling. Default 0."""
    timeout: Seconds | None = None
    """Seconds that the request may take; then it is ended with a 504. Default: no limit, or
    --request-timeout."""
    include: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    """Names of what else to tell; `message.output_text.logprobs` is refused, others change
    nothing."""
    top_logprobs: Annotated[
        Any, Refused("is not supported here; /v1/chat/completions has logprobs")
    ] = None
    max_tool_calls: Accepted = None
    background_options: Accepted = None
    prompt_cache_options: Accepted = None
    access_programs: Accepted = None
    moderation: Annotated[Any, Refused("nothing is moderated here; leave this field out")] = None
    truncation: Annotated[
        Any, Refused('a conversation is never cut; "disabled" works', ("disabled",))
    ] = None
    conversation: Annotated[
        Any, Refused("there are no stored conversations; use previous_response_id")
    ] = None
    prompt: Annotated[Any, Refused("there are no stored prompts; use instructions")] = None
    context_management: Accepted = None
    image: Annotated[Any, Refused("this model reads text; leave this field out")] = None

    @field_validator("include")
    @classmethod
    def _no_logprobs(cls, value: list[str] | None) -> list[str] | None:
        if "message.output_text.logprobs" in (value or ()):
            raise ValueError("log-probabilities are not supported here; chat has logprobs")
        return value

    @model_validator(mode="after")
    def _can_be_fetched(self) -> ResponsesBody:
        if self.background and self.store is False:
            raise ValueError("background needs store, or nobody could fetch the answer")
        if self.background and self.stream:
            raise ValueError(
                "background with stream is not supported; poll GET /v1/responses/{id}, or leave "
                "one of them out"
            )
        return self

    @property
    def num_parts(self) -> int:
        """Items and tools."""
        return (1 if isinstance(self.input, str) else len(self.input)) + len(self.tools or ())

    @property
    def own_messages(self) -> ChatMessages:
        """The input as messages, without instructions and what came before."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return list(_messages(self.input))


def chat_of(body: ResponsesBody, before: ChatMessages) -> ChatBody:
    """The same as a chat; `before` are the messages of the previous response. Raises
    RequestError."""
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    values = sampling_of(body)
    for name in ("min_tokens", "seed", "tool_choice", "chat_template_kwargs"):
        if (value := getattr(body, name)) is not None:
            values[name] = value
    if body.parallel_tool_calls is not None:
        values["parallel_tool_calls"] = body.parallel_tool_calls
    if body.max_output_tokens is not None:
        values["max_completion_tokens"] = body.max_output_tokens
    if body.reasoning is not None and body.reasoning.effort is not None:
        values["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        values["response_format"] = _format(body.text.format)
    if body.tools:
        values["tools"] = [_tool(tool) for tool in body.tools]
    if isinstance(body.tool_choice, dict) and "name" in body.tool_choice:
        function = {"name": body.tool_choice["name"]}
        values["tool_choice"] = {"type": "function", "function": function}
    return checked(ChatBody, values | {"messages": system + before + body.own_messages})


def _format(form: dict[str, Any]) -> dict[str, Any]:
    """Chat nests what responses have flat."""
    rest = {name: value for name, value in form.items() if name != "type"}
    return {"type": form.get("type"), "json_schema": rest} if rest else form


def _tool(tool: FunctionTool) -> dict[str, Any]:
    function = tool.model_dump(
        include={"name", "description", "parameters", "strict"}, exclude_none=True
    )
    return {"type": "function", "function": function}


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text or "" for part in content or ())


def _messages(items: Sequence[Item]) -> Iterator[dict[str, Any]]:
    """Reasoning, text and calls of one turn of the assistant are one message."""
    turn: dict[str, Any] = {}
    for item in items:
        begins_turn = not _continues(turn, item)
        if turn and begins_turn:
            yield turn
        if begins_turn:
            turn = {"role": "assistant", "content": ""} if _is_assistants(item) else {}
        if item.type == "function_call_output":
            yield {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
        elif not _is_assistants(item):
            yield {"role": item.role, "content": _text(item.content)}
        else:
            _extend(turn, item)
    if turn:
        yield turn


def _is_assistants(item: Item) -> bool:
    return item.type in ("reasoning", "function_call") or item.role == "assistant"


def _continues(turn: dict[str, Any], item: Item) -> bool:
    if not turn or not _is_assistants(item):
        return False
    if item.type == "function_call":
        return True
    if item.type == "reasoning":
        return not turn["content"] and "tool_calls" not in turn
    return "tool_calls" not in turn


def _extend(turn: dict[str, Any], item: Item) -> None:
    if item.type == "reasoning":
        text = _text(item.content) or _text(item.summary)
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text
    elif item.type == "function_call":
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
    else:
        turn["content"] += _text(item.content)


def answer_message(blocks: Sequence[Block]) -> dict[str, Any]:
    """An answer as the message that the next request goes on from."""
    texts = {
        kind: "".join(block.text for block in blocks if block.kind == kind)
        for kind in ("reasoning", "text")
    }
    message: dict[str, Any] = {"role": "assistant", "content": texts["text"]}
    if texts["reasoning"]:
        message["reasoning_content"] = texts["reasoning"]
    calls = [
        {
            "id": block.call_id,
            "type": "function",
            "function": {"name": block.name, "arguments": block.text},
        }
        for block in blocks
        if block.kind == "tool" and block.arguments is not None
    ]
    return message | ({"tool_calls": calls} if calls else {})
