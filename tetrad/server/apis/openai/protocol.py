"""The bodies of OpenAI's routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from tetrad.server.bodies.chat_messages import Message, ReasoningSwitch, ThinkingSwitch
from tetrad.server.bodies.constraints import OpenAIConstraintFields
from tetrad.server.bodies.fields import (
    LARGEST,
    MAX_CHOICES_PER_PROMPT,
    MAX_TOP_LOGPROBS,
    Count,
    CountOrNone,
    ManyTokenIds,
    NamedBody,
    Priority,
    SamplingFields,
    Seconds,
    Seed,
    Texts,
    TokenIds,
)
from tetrad.server.bodies.foreign import ForeignChat, ForeignOpenAI, Refused
from tetrad.server.bodies.read import Accepted, Body, OpenBody
from tetrad.server.text.chat_template import RESERVED

MAX_TOOLS = 1024


class StreamOptions(Body):
    include_usage: bool | None = None
    """End the stream with a chunk that has the usage and no choices. Default false."""
    continuous_usage_stats: bool | None = None
    """With include_usage: every chunk has the usage so far. Default false."""
    include_obfuscation: Accepted = None


class OpenAIBody(OpenAIConstraintFields, SamplingFields, NamedBody, ForeignOpenAI):
    """What chat and completions have in common."""

    model: str | None = None
    """The served name, the model's folder or `default`; anything else is a 404. Default: the served
    model."""
    max_tokens: Count | None = None
    """Most tokens of an answer. Default: all that fit."""
    min_tokens: int | None = Field(default=None, ge=0, le=LARGEST)
    """No end token and no stop string ends an answer before so many tokens. Default 0."""
    seed: Seed | None = None
    """The same seed and prompt give the same text. Default: drawn."""
    stream: bool | None = None
    """Send the answer as server-sent events, while it is computed. Default false."""
    stream_options: StreamOptions | None = None
    """What else a stream tells."""
    priority: Priority | None = None
    """Higher goes first, if the server runs with --enable-priority-scheduling. Default 0."""
    timeout: Seconds | None = None
    """Seconds that the request may take; then it is ended with a 504. Default: no limit, or
    --request-timeout."""
    include_stop_str_in_output: bool | None = None
    """The same as no_stop_trim."""

    @property
    def keeps_stop(self) -> bool:
        return bool(self.no_stop_trim or self.include_stop_str_in_output)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_running_usage(self) -> bool:
        """Whether each chunk has the usage so far."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


class Function(OpenBody):
    name: str = Field(pattern=r"^[\w.:/-]+$", max_length=256)
    """What the model calls it."""
    description: str | None = None
    """What it does, for the model."""
    parameters: dict[str, Any] | None = None
    """JSON Schema of its arguments."""


class Tool(OpenBody):
    type: Literal["function"]
    """Always `function`."""
    function: Function
    """What can be called."""


def _named_tool(choice: dict[str, Any]) -> str:
    """OpenAI's chat nests the name, its responses do not."""
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


class ChatBody(OpenAIBody, ForeignChat):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    """The conversation so far; texts alone can be read."""
    max_completion_tokens: Count | None = None
    """Most tokens of an answer, reasoning included; goes before max_tokens. Default: all that
    fit."""
    logprobs: bool | None = None
    """Tell each token's log-probability. Default false."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """With logprobs: so many of the likeliest tokens at each place, 0 to 20. Default 0."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Functions that the model may call; nothing is run here."""
    tool_choice: str | dict[str, Any] | None = None
    """`none`, `auto`, `required` or {"type": "function", "function": {"name": ...}}. Default
    `auto`."""
    reasoning_effort: str | float | None = None
    """How much to think, handed to the chat template; `none` switches it off."""
    reasoning: ReasoningSwitch | None = None
    """How much to think, as some gateways ask."""
    thinking: ThinkingSwitch | None = None
    """Whether to think, as GLM's own API asks."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""
    parallel_tool_calls: bool | None = None
    """false: one call at most. Default true."""
    add_generation_prompt: bool | None = None
    """End the prompt with the beginning of the assistant's turn. Default true."""
    continue_final_message: bool | None = None
    """Go on with the last message instead of answering it. Default false."""
    separate_reasoning: bool | None = None
    """true or left out: reasoning is always in reasoning_content. false is refused."""
    include_reasoning: bool | None = None
    """true or left out: reasoning is always told. false is refused."""
    functions: Annotated[Any, Refused("was replaced by tools and tool_choice")] = None
    function_call: Annotated[Any, Refused("was replaced by tools and tool_choice")] = None

    @field_validator("continue_final_message")
    @classmethod
    def _one_end(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("add_generation_prompt"):
            raise ValueError("needs add_generation_prompt to be false")
        if value and (messages := info.data.get("messages")) and not messages[-1].text.strip():
            raise ValueError("needs a last message with a text to continue")
        return value

    @field_validator("separate_reasoning", "include_reasoning")
    @classmethod
    def _always_separate(cls, value: bool | None) -> bool | None:
        if value is False:
            raise ValueError(
                "reasoning is always separate; join reasoning_content and content, or start the "
                "server with --reasoning-parser none"
            )
        return value

    @field_validator("tool_choice")
    @classmethod
    def _known_choice(cls, value: Any, info: ValidationInfo) -> Any:
        if value in (None, "none", "auto"):
            return value
        names = [tool.function.name for tool in info.data.get("tools") or ()]
        if isinstance(value, dict):
            if (kind := value.get("type", "function")) != "function":
                raise ValueError(
                    f'of type {kind!r} is not supported; "auto", "required" or the function to '
                    "call is, and tools may list fewer"
                )
            if (name := _named_tool(value)) not in names:
                raise ValueError(f"names {name!r}, which is none of tools")
        elif value != "required":
            raise ValueError(
                'should be "none", "auto", "required" or '
                '{"type": "function", "function": {"name": "..."}}'
            )
        elif not names:
            raise ValueError('"required" needs tools')
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _asked_for(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("needs logprobs to be true")
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _not_ours(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if taken := RESERVED & set(value or ()):
            raise ValueError(f"{', '.join(sorted(taken))} is set by the server")
        return value

    @property
    def opens_turn(self) -> bool:
        """Whether the prompt ends with the beginning of the assistant's turn."""
        return self.add_generation_prompt is not False and not self.continue_final_message

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def forced_tool(self) -> str | None:
        """Name of the tool that must be called; "" if any must, None if none needs to be."""
        if isinstance(self.tool_choice, dict):
            return _named_tool(self.tool_choice)
        return "" if self.tool_choice == "required" else None

    @property
    def active_tools(self) -> list[dict[str, Any]]:
        """Tools that the model may call, as the template shows them."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_unset=True) for tool in self.tools or []]


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    prompt: str | Texts | TokenIds | ManyTokenIds
    """A text, token ids, or a list of either."""
    max_tokens: CountOrNone | None = None
    """Most tokens of an answer; with 0 the prompt is computed and kept in the prefix cache. Default
    16."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """Tell each token's log-probability and so many of the likeliest, 0 to 20. Default: none."""
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES_PER_PROMPT)
    """Compute so many answers, give the n likeliest; not streamed. Default: n."""
    echo: bool | None = None
    """Begin each answer with its prompt; not with logprobs. Default false."""
    add_special_tokens: bool | None = None
    """Let the tokenizer put its own tokens around a text. Default true."""
    suffix: Annotated[Any, Refused("is not supported; only text after the prompt is generated")] = (
        None
    )
    prompt_embeds: Annotated[Any, Refused("embeddings cannot be read; use prompt")] = None

    @field_validator("echo")
    @classmethod
    def _text_alone(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("logprobs") is not None:
            raise ValueError("needs logprobs to be left out; those of a prompt are not supported")
        return value

    @field_validator("best_of")
    @classmethod
    def _enough(cls, value: int | None, info: ValidationInfo) -> int | None:
        num_asked = info.data.get("n") or 1
        if value is not None and value < num_asked:
            raise ValueError(f"must be n, which is {num_asked}, or more")
        if value is not None and value > num_asked and info.data.get("stream"):
            raise ValueError("needs stream to be false when it is larger than n")
        return value

    @property
    def num_tried(self) -> int:
        """Answers to each prompt that are generated."""
        return self.best_of or self.n or 1

    @property
    def tries_more(self) -> bool:
        """Whether more are generated than asked for, the best of which are given."""
        return self.num_tried > (self.n or 1)
