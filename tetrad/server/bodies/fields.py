"""Fields that several APIs share. A field's range is written here and nowhere else.

What cannot be served is refused with a sentence that says what works. Fields of other servers that
have no use here are in `foreign`; docs/api.md lists every field.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from tetrad.server.bodies.constraints import ConstraintFields
from tetrad.server.bodies.foreign import ForeignSampling
from tetrad.server.bodies.read import Body
from tetrad.server.door.arrival import LONGEST_TIMEOUT_S

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
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]
RequestId = Annotated[str, Field(pattern=r"^[!-~]{1,128}$")]
"""As in the header X-Request-Id."""
Seconds = Annotated[float, Field(gt=0, le=LONGEST_TIMEOUT_S)]
Count = Annotated[int, Field(ge=1, le=LARGEST)]
CountOrNone = Annotated[int, Field(ge=0, le=LARGEST)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]


class SamplingFields(ConstraintFields, ForeignSampling):
    """Sampling fields that OpenAI's routes and SGLang's share. None: the server's default."""

    temperature: float | None = Field(default=None, ge=0, le=100)
    """Randomness, 0 to 100; 0 is greedy. Default: the model's."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Draw from the likeliest tokens that have this probability together, above 0 to 1. Default:
    the model's."""
    top_k: int | None = Field(default=None, ge=-1, le=LARGEST)
    """Draw from so many of the likeliest tokens; -1 and 0 are all. Default: the model's."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Draw from tokens that have at least this share of the likeliest one's probability, 0 to 1.
    Default: the model's."""
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    """Above 1 makes tokens that have come, in prompt or answer, less likely, 0.01 to 100; 1 changes
    nothing. Default: the model's."""
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Subtracted from the logits of generated tokens, -2 to 2. Default 0."""
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    """The same, for each time that the token was generated, -2 to 2. Default 0."""
    logit_bias: Annotated[dict[TokenKey, Bias] | None, BeforeValidator(_check_size)] = None
    """Added to logits: token id, as text, to -100 to 100."""
    stop: Stop | None = None
    """A text that ends the answer, or several; it is not part of it."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256, fail_fast=True)] | None = None
    """Token ids that end the answer, besides the model's end tokens."""
    ignore_eos: bool | None = None
    """Go on past end tokens. Default false."""
    no_stop_trim: bool | None = None
    """Keep the stop string that ended the answer. Default false."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text. Default true."""
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES_PER_PROMPT)
    """Answers to each prompt. Default 1."""

    @property
    def keeps_stop(self) -> bool:
        """Whether the stop string that ends the text stays in it."""
        return bool(self.no_stop_trim)


def sampling_of(body: SamplingFields) -> dict[str, Any]:
    """The sampling fields that a body has, to be handed on."""
    names = body.model_fields_set & SamplingFields.model_fields.keys()
    return {name: getattr(body, name) for name in names}


class NamedBody(Body):
    """A request may have an id, by SGLang's name or by vLLM's."""

    rid: RequestId | None = None
    """Names the request, instead of the header X-Request-Id; /abort_request takes it."""
    request_id: RequestId | None = None
    """The same, as vLLM calls it; rid goes before."""

    @property
    def own_id(self) -> str | None:
        return self.rid or self.request_id
