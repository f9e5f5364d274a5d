"""The bodies of Anthropic's routes, and what they are as a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tetrad.server.apis.openai.protocol import ChatBody
from tetrad.server.bodies.fields import (
    Count,
    Priority,
    SamplingFields,
    Seconds,
    Strings,
    sampling_of,
)
from tetrad.server.bodies.foreign import Refused
from tetrad.server.bodies.read import Accepted, Body, OpenBody, checked
from tetrad.server.wire.encoding import json_text


class ContentBlock(OpenBody):
    """A part of a message. What a client adds, such as cache_control, changes nothing."""

    type: str
    """`text`, `thinking`, `redacted_thinking`, `tool_use` or `tool_result`."""
    text: str | None = None
    """Of a text: what it says."""
    thinking: str | None = None
    """Of thinking: what it says."""
    id: str | None = None
    """Of a tool's use: what its result refers to."""
    name: str | None = None
    """Of a tool's use: the tool."""
    input: dict[str, Any] | None = None
    """Of a tool's use: its arguments."""
    tool_use_id: str | None = None
    """Of a tool's result: which use it answers."""
    content: str | Annotated[list[ContentBlock], Field(fail_fast=True)] | None = None
    """Of a tool's result: a text or text blocks."""

    @model_validator(mode="after")
    def _is_known(self) -> ContentBlock:
        needed = _NEEDED.get(self.type)
        if needed is None:
            raise ValueError(
                f'a block of type "{self.type}" cannot be read; this model reads '
                f"{', '.join(_NEEDED)}"
            )
        for name in needed:
            if getattr(self, name) is None:
                raise ValueError(f'a block of type "{self.type}" needs {name}')
        return self


_NEEDED: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}

Blocks = Annotated[list[ContentBlock], Field(fail_fast=True)]


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    """Who says it."""
    content: str | Blocks
    """A text or blocks."""


class AnthropicTool(OpenBody):
    name: str
    """What the model calls it."""
    description: str | None = None
    """What it does, for the model."""
    input_schema: dict[str, Any] | None = None
    """JSON Schema of its arguments; needed."""
    type: str | None = None
    """`custom` or left out; tools that Anthropic runs are refused."""

    @model_validator(mode="after")
    def _is_the_clients(self) -> AnthropicTool:
        if self.type not in (None, "custom"):
            raise ValueError(
                f"a tool of type {self.type!r} is Anthropic's own: nothing here runs it, and this "
                "model was not taught its arguments; a tool with name, description and "
                "input_schema works"
            )
        if self.input_schema is None:
            raise ValueError("a tool needs an input_schema, the JSON schema of its arguments")
        return self


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    """Whether the model may, must or must not call tools, or must call one."""
    name: str | None = None
    """For type `tool`: which one."""
    disable_parallel_tool_use: bool | None = None
    """One call at most. Default false."""


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    """`disabled` switches thinking off, all others on."""
    budget_tokens: Accepted = None
    display: Accepted = None


class OutputConfig(Body):
    effort: str | None = None
    """The same as reasoning_effort of chat."""
    format: dict[str, Any] | None = None
    """{"type": "json_schema", "schema": ...}: what the answer matches."""


class CountBody(Body):
    """POST /v1/messages/count_tokens, and what it shares with /v1/messages."""

    model: str | None = None
    """The served name, the model's folder or `default`; anything else is a 404. Default: the served
    model."""
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, fail_fast=True)]
    """The conversation so far; if the last message is the assistant's, it is continued."""
    system: str | Blocks | None = None
    """A system message: a text or text blocks."""
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True)] | None = None
    """Functions that the model may call; nothing is run here."""
    tool_choice: ToolChoice | None = None
    """Whether it may, must or must not call them. Default: it may."""
    thinking: Thinking | None = None
    """Whether to think. Default: the chat template's."""
    output_config: OutputConfig | None = None
    """How much to think, and what form the answer has."""
    output_format: dict[str, Any] | None = None
    """{"type": "json_schema", "schema": ...}: what the answer matches."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""
    cache_control: Accepted = None
    betas: Accepted = None
    context_management: Accepted = None
    compaction: Accepted = None
    fallbacks: Accepted = None
    fallback_credit_token: Accepted = None
    billing_policy: Accepted = None
    thread: Any = None
    """Refused, so that Anthropic's SDK sends the whole conversation: none is stored here."""
    mcp_servers: Annotated[Any, Refused("no MCP server is called; leave this field out")] = None

    @property
    def num_parts(self) -> int:
        """Messages, their blocks and tools."""
        contents = [message.content for message in self.messages]
        num_blocks = sum(len(content) for content in contents if isinstance(content, list))
        return len(self.messages) + num_blocks + len(self.tools or ())


class MessagesBody(CountBody, SamplingFields):
    """POST /v1/messages. Sampling fields of SGLang and vLLM are known beside Anthropic's."""

    max_tokens: Count
    """Most tokens of the answer, thinking included; needed."""
    min_tokens: int | None = Field(default=None, ge=0)
    """No end token and no stop string ends the answer before so many tokens. Default 0."""
    stop_sequences: Strings | None = None
    """Texts that end the answer; they are not part of it."""
    stream: bool | None = None
    """Send the message as server-sent events, while it is computed. Default false."""
    metadata: Accepted = None
    service_tier: Accepted = None
    inference_geo: Accepted = None
    speed: Accepted = None
    diagnostics: Accepted = None
    user_profile_id: Accepted = None
    workspace_id: Accepted = None
    priority: Priority | None = None
    """Higher goes first, if the server runs with --enable-priority-scheduling. Default 0."""
    timeout: Seconds | None = None
    """Seconds that the request may take; then it is ended with a 504. Default: no limit, or
    --request-timeout."""
    n: int | None = Field(default=None, ge=1, le=1)
    """Always 1."""
    container: Annotated[Any, Refused("no code is run here; leave this field out")] = None

    @field_validator("stop_sequences")
    @classmethod
    def _one_name(cls, value: Any, info: Any) -> Any:
        if value is not None and info.data.get("stop") is not None:
            raise ValueError("give either stop_sequences or stop")
        return value


def chat_of(body: CountBody) -> ChatBody:
    """The same as a chat. Raises RequestError."""
    values: dict[str, Any] = {"messages": list(_messages(body))}
    if isinstance(body, MessagesBody):
        values |= sampling_of(body)
        values |= {"max_tokens": body.max_tokens, "min_tokens": body.min_tokens}
        values |= {"stop": body.stop_sequences} if body.stop_sequences else {}
    values["continue_final_message"] = body.messages[-1].role == "assistant"
    values |= _tools(body) | _thinking(body)
    return checked(ChatBody, values)


def _thinking(body: CountBody) -> dict[str, Any]:
    """How much to think, and what form the answer has."""
    values: dict[str, Any] = {}
    variables: dict[str, Any] = {}
    if body.thinking is not None:
        variables["enable_thinking"] = body.thinking.type != "disabled"
    values["chat_template_kwargs"] = variables | (body.chat_template_kwargs or {})
    config = body.output_config or OutputConfig()
    if config.effort is not None:
        values["reasoning_effort"] = config.effort
    if (form := config.format or body.output_format) is not None:
        schema = {"name": "answer", "schema": form.get("schema")}
        values["response_format"] = {"type": form.get("type"), "json_schema": schema}
    return values


def _tools(body: CountBody) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if body.tools:
        values["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                },
            }
            for tool in body.tools
        ]
    if (choice := body.tool_choice) is not None:
        values["tool_choice"] = {
            "auto": "auto",
            "any": "required",
            "none": "none",
            "tool": {"type": "function", "function": {"name": choice.name}},
        }[choice.type]
        if choice.disable_parallel_tool_use:
            values["parallel_tool_calls"] = False
    return values


def _messages(body: CountBody) -> Iterator[dict[str, Any]]:
    if body.system:
        yield {"role": "system", "content": _text(body.system)}
    for message in body.messages:
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "assistant":
            yield _assistant(message.content)
        else:
            yield from _from_user(message.role, message.content)


def _text(content: str | Sequence[ContentBlock] | None) -> str:
    if isinstance(content, str):
        return content
    return "".join(block.text or "" for block in content or ())


def _from_user(role: str, blocks: Sequence[ContentBlock]) -> Iterator[dict[str, Any]]:
    """Results of tools are messages of their own."""
    texts: list[str] = []
    for block in blocks:
        if block.type == "tool_result":
            if texts:
                yield {"role": role, "content": "".join(texts)}
                texts = []
            content = _text(block.content)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        else:
            texts.append(block.text or "")
    if texts:
        yield {"role": role, "content": "".join(texts)}


def _assistant(blocks: Sequence[ContentBlock]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _text(blocks)}
    if thinking := "".join(block.thinking or "" for block in blocks):
        message["reasoning_content"] = thinking
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json_text(block.input)},
        }
        for block in blocks
        if block.type == "tool_use"
    ]
    return message | ({"tool_calls": calls} if calls else {})
