"""The messages of a chat, and the ways to ask for thinking."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from tetrad.server.bodies.foreign import Refused
from tetrad.server.bodies.read import Accepted, Body, OpenBody


class ContentPart(OpenBody):
    type: str
    """Always `text`; this model reads nothing else."""
    text: str | None = None
    """What it says."""

    @model_validator(mode="after")
    def _is_text(self) -> ContentPart:
        if self.type != "text" or self.text is None:
            raise ValueError(
                f'a part of type "{self.type}" cannot be read; this model reads text, '
                'as {"type": "text", "text": "..."}'
            )
        return self


_OBJECT = TypeAdapter(dict[str, Any])


class FunctionCall(Body):
    name: str
    """Which function was called."""
    arguments: str = "{}"
    """JSON of an object. Default: an empty one."""

    @model_validator(mode="after")
    def _is_object(self) -> FunctionCall:
        self.parsed()
        return self

    def parsed(self) -> dict[str, Any]:
        """The arguments as templates want them."""
        try:
            return _OBJECT.validate_json(self.arguments or "{}")
        except ValidationError:
            raise ValueError("arguments must be the text of a JSON object") from None


class ToolCall(OpenBody):
    id: str | None = None
    """What the message with its result refers to."""
    type: Literal["function"] = "function"
    """Always `function`."""
    function: FunctionCall
    """What was called, and with what."""


class Message(Body):
    name: Accepted = None
    refusal: Accepted = None
    annotations: Accepted = None
    audio: Accepted = None
    function_call: Annotated[Any, Refused("was replaced by tool_calls")] = None
    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Who says it; `developer` is read as `system`."""
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    """What is said: a text or text parts; an assistant that called tools may have none."""
    reasoning_content: str | None = None
    """What the assistant thought before it."""
    reasoning: str | None = None
    """vLLM's name of it."""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    """What the assistant called."""
    tool_call_id: str | None = None
    """Of a `tool` message: which call it answers."""

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} needs content")
        return self

    @property
    def text(self) -> str:
        """Content as one string."""
        if isinstance(self.content, list):
            return "".join(part.text or "" for part in self.content)
        return self.content or ""

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: text content, arguments as objects."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.text}
        if (reasoning := self.reasoning_content or self.reasoning) is not None:
            message["reasoning_content"] = reasoning
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.parsed()},
                }
                for call in self.tool_calls
            ]
        return message


class ReasoningSwitch(Body):
    """SGLang's and some gateways' form of it."""

    effort: str | float | None = None
    """The same as reasoning_effort."""
    enabled: bool | None = None
    """false: do not think. Default: the chat template's."""
    exclude: Accepted = None


class ThinkingSwitch(Body):
    """GLM's own form of it."""

    type: Literal["enabled", "disabled"]
    """Whether to think."""
    clear_thinking: bool | None = None
    """Whether the chat template leaves out earlier thinking. Default: the template's."""
