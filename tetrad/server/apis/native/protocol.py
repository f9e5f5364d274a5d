"""The body of SGLang's POST /generate."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from tetrad.server.bodies.fields import (
    LARGEST,
    MAX_PROMPTS,
    MAX_TOP_LOGPROBS,
    CountOrNone,
    ManyTokenIds,
    Priority,
    SamplingFields,
    Seconds,
    Seed,
    Texts,
    TokenIds,
)
from tetrad.server.bodies.foreign import ForeignGenerate

Rid = Annotated[str, Field(min_length=1, max_length=256)]


class NativeSampling(SamplingFields):
    """`sampling_params`, in SGLang's names."""

    max_new_tokens: CountOrNone | None = None
    """Most tokens of an answer; with 0 the prompt is computed and kept in the prefix cache. Default
    128."""
    min_new_tokens: int | None = Field(default=None, ge=0, le=LARGEST)
    """No end token and no stop string ends an answer before so many tokens. Default 0."""
    sampling_seed: Seed | None = None
    """The same seed and prompt give the same text. Default: drawn."""


class GenerateBody(ForeignGenerate):
    """One prompt, or a batch when `text` or `input_ids` is a list of prompts."""

    text: str | Texts | None = None
    """A prompt, or several; or else input_ids."""
    input_ids: TokenIds | ManyTokenIds | None = Field(default=None, validate_default=True)
    """The same as token ids."""
    sampling_params: (
        NativeSampling
        | Annotated[list[NativeSampling], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | None
    ) = None
    """How to sample, for all prompts or for each."""
    rid: Rid | Annotated[list[Rid], Field(max_length=MAX_PROMPTS, fail_fast=True)] | None = None
    """Names the request, or each of its prompts; /abort_request takes it. Default: a new one."""
    stream: bool | None = None
    """Send the answer as server-sent events, each with all there is so far. Default false."""
    return_logprob: bool | None = None
    """Tell each token's log-probability. Default false."""
    logprob_start_len: int | None = None
    """-1 or left out: log-probabilities are of the answer alone. Others are refused."""
    top_logprobs_num: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """With return_logprob: so many of the likeliest tokens at each place, 0 to 20. Default 0."""
    priority: Priority | None = None
    """Higher goes first, if the server runs with --enable-priority-scheduling. Default 0."""
    timeout: Seconds | None = None
    """Seconds that the request may take; then it is ended with a 504. Default: no limit, or
    --request-timeout."""

    @field_validator("input_ids")
    @classmethod
    def _one_prompt(cls, value: Any, info: ValidationInfo) -> Any:
        if (value is None) == (info.data.get("text") is None):
            raise ValueError("give either text or input_ids")
        return value

    @field_validator("logprob_start_len")
    @classmethod
    def _output_only(cls, value: int | None) -> int | None:
        if value is not None and value != -1:
            raise ValueError("log-probabilities of the prompt are not supported; -1 is")
        return value

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one or many."""
        given: Any = self.text if self.text is not None else self.input_ids
        return given if self.is_batch else [given]

    @property
    def is_batch(self) -> bool:
        if self.text is not None:
            return isinstance(self.text, list)
        return isinstance(self.input_ids, list) and isinstance(self.input_ids[0], list)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs_num or 0) if self.return_logprob else None
