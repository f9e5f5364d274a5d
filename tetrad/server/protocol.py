"""The bodies of OpenAI's routes. A field's range is written here and nowhere else.

What cannot be served yet is refused with a sentence that says what works; fields that change
nothing (`user`, `metadata`, `store` and whatever else a client library adds) are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tetrad.server.bodies import Body
from tetrad.server.chat_template import RESERVED

MAX_STOPS = 32
MAX_STOP_CHARACTERS = 512
MAX_TOP_LOGPROBS = 20
MAX_CHOICES_PER_PROMPT = 128
MAX_BIASED_TOKENS = 4096
MAX_PROMPTS = 1024


def _check_stop(stop: str | list[str]) -> str | list[str]:
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings are allowed")
    if any(not 0 < len(text) <= MAX_STOP_CHARACTERS for text in stops):
        raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters")
    return stop


def _check_size(bias: Any) -> Any:
    if isinstance(bias, dict) and len(bias) > MAX_BIASED_TOKENS:
        raise ValueError(f"at most {MAX_BIASED_TOKENS} tokens can be biased, not {len(bias)}")
    return bias


# A body of many megabytes must not give an error for each of its items: every list ends at its
# first mistake, every mapping is counted before its values are read.
Strings = Annotated[list[str], Field(fail_fast=True)]
Stop = Annotated[str | Strings, AfterValidator(_check_stop)]
LARGEST = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=LARGEST)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
ManyTokenIds = Annotated[
    list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Field(ge=1, le=LARGEST)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]


def _refuse(value: Any) -> None:
    if value:
        raise ValueError("is not supported yet; leave this field out")


def _refuse_grammar(value: Any) -> None:
    if value is not None:
        raise ValueError("constrained output is not supported yet; leave this field out")


Unserved = Annotated[Any, AfterValidator(_refuse)]
"""A field of SGLang or vLLM that would change the answer; switched off it may be there."""
Grammar = Annotated[Any, AfterValidator(_refuse_grammar)]


class SamplingFields(Body):
    """Sampling fields that OpenAI's routes and SGLang's share. None: the server's default."""

    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=LARGEST)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: Annotated[dict[TokenKey, Bias] | None, BeforeValidator(_check_size)] = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES_PER_PROMPT)

    regex: Grammar = None
    ebnf: Grammar = None
    json_schema: Grammar = None
    structural_tag: Grammar = None
    stop_regex: Unserved = None
    no_stop_trim: Unserved = None


class StreamOptions(Body):
    include_usage: bool | None = None


class ResponseFormat(Body):
    type: str


class OpenAIBody(SamplingFields):
    """What chat and completions have in common."""

    model: str | None = None
    max_tokens: Count | None = None
    min_tokens: int | None = Field(default=None, ge=0, le=LARGEST)
    seed: Seed | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    lora_path: Unserved = None
    guided_json: Grammar = None
    guided_regex: Grammar = None
    guided_choice: Grammar = None
    guided_grammar: Grammar = None
    structured_outputs: Grammar = None
    include_stop_str_in_output: Unserved = None

    @field_validator("response_format")
    @classmethod
    def _free_text(cls, value: ResponseFormat | None) -> ResponseFormat | None:
        if value is not None and value.type != "text":
            raise ValueError(f'type "{value.type}" is not supported yet; "text" is')
        return value

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ContentPart(Body):
    type: str
    text: str | None = None

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
    arguments: str = "{}"

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


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None

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
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
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


class Function(Body):
    model_config = ConfigDict(extra="allow")

    name: str = Field(pattern=r"^[\w.:/-]+$", max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: Function


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: Unserved = None
    separate_reasoning: bool | None = None
    functions: Any = None
    function_call: Any = None

    @field_validator("separate_reasoning")
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
    def _free_choice(cls, value: Any) -> Any:
        if value not in (None, "none", "auto"):
            raise ValueError('should be "none" or "auto"; forcing a call is not supported yet')
        return value

    @field_validator("functions", "function_call")
    @classmethod
    def _replaced(cls, value: Any) -> None:
        if value is not None:
            raise ValueError("this field was replaced by tools and tool_choice")

    @field_validator("top_logprobs")
    @classmethod
    def _asked_for(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and not info.data.get("logprobs"):
            raise ValueError("needs logprobs to be true")
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _not_ours(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if taken := RESERVED & set(value or ()):
            raise ValueError(f"{', '.join(sorted(taken))} is set by the server")
        return value

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def active_tools(self) -> list[dict[str, Any]]:
        """Tools that the model may call, as the template shows them."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_unset=True) for tool in self.tools or []]


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    prompt: str | Texts | TokenIds | ManyTokenIds
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: Count | None = None
    echo: bool | None = None
    suffix: str | None = None

    @field_validator("echo")
    @classmethod
    def _no_echo(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("is not supported; put the prompt before the answer yourself")
        return value

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str | None) -> str | None:
        if value:
            raise ValueError("is not supported; only text after the prompt is generated")
        return value

    @field_validator("best_of")
    @classmethod
    def _all_of_them(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value != (info.data.get("n") or 1):
            raise ValueError("must equal n; use n for several answers")
        return value
