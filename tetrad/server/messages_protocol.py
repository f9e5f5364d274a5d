"""The bodies of Anthropic's routes, and what they are as a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tetrad.server.bodies import Accepted, Body, OpenBody, checked
from tetrad.server.encoding import json_text
from tetrad.server.foreign import Refused
from tetrad.server.protocol import (
    ChatBody,
    Count,
    Priority,
    SamplingFields,
    Seconds,
    Strings,
    sampling_of,
)


class ContentBlock(OpenBody):
    """A part of a message. What a client adds, such as cache_control, changes nothing."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Annotated[list[ContentBlock], Field(fail_fast=True)] | None = None

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
    content: str | Blocks


class AnthropicTool(OpenBody):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None

    @model_validator(mode="after")
    def _is_the_clients(self) -> AnthropicTool:
        if self.type not in (None, "custom") or self.input_schema is None:
            raise ValueError(
                f'a tool of type "{self.type or "custom"}" is known by its input_schema alone; '
                "give it one, and no type"
            )
        return self


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Accepted = None
    display: Accepted = None


class OutputConfig(Body):
    effort: str | None = None
    format: dict[str, Any] | None = None


class CountBody(Body):
    """POST /v1/messages/count_tokens, and what it shares with /v1/messages."""

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, fail_fast=True)]
    system: str | Blocks | None = None
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: Accepted = None
    betas: Accepted = None
    context_management: Accepted = None
    mcp_servers: Annotated[Any, Refused("this server calls no other; leave this field out")] = None

    @property
    def num_parts(self) -> int:
        """Messages, their blocks and tools."""
        contents = [message.content for message in self.messages]
        num_blocks = sum(len(content) for content in contents if isinstance(content, list))
        return len(self.messages) + num_blocks + len(self.tools or ())


class MessagesBody(CountBody, SamplingFields):
    """POST /v1/messages. Sampling fields of SGLang and vLLM are known beside Anthropic's."""

    max_tokens: Count
    min_tokens: int | None = Field(default=None, ge=0)
    stop_sequences: Strings | None = None
    stream: bool | None = None
    metadata: Accepted = None
    service_tier: Accepted = None
    inference_geo: Accepted = None
    speed: Accepted = None
    diagnostics: Accepted = None
    user_profile_id: Accepted = None
    workspace_id: Accepted = None
    priority: Priority | None = None
    timeout: Seconds | None = None
    n: int | None = Field(default=None, ge=1, le=1)
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
