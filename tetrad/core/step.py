"""The step is a value: the scheduler writes a `StepPlan`, the runner answers with a `StepResult`.

Both are plain data, so the scheduler is tested without torch, the runner without a scheduler and
the cost model without either. What a step has thousands of are structs: a frozen dataclass takes
four times as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tetrad.core.request import SamplingParams, TokenLogprob

PAGE_TOKENS = 64
"""Tokens per cache page. One constant: kernels, scheduler and cache layout agree on it."""

PENDING = -1
"""In place of a token id: what the step planned just before samples for this sequence. The host may
not know it yet, the device does."""


class SequenceWork(msgspec.Struct, frozen=True):
    """The tokens one sequence computes in this step.

    Tokens `start .. start + len(token_ids)` of the sequence are computed; their keys go to the
    slots `pages[i // PAGE_TOKENS] * PAGE_TOKENS + i % PAGE_TOKENS`.
    """

    rid: str
    token_ids: tuple[int, ...]
    """At least one. Only the last can be PENDING."""
    start: int
    """Position of token_ids[0]; everything before it is in the cache already."""
    pages: tuple[int, ...]
    """Page ids of the whole sequence, enough for start + len(token_ids) tokens."""
    sample: SampleWork | None
    """None while a prompt is only partly computed: nothing is sampled."""

    @property
    def num_kv_tokens(self) -> int:
        """Tokens in the cache after this step."""
        return self.start + len(self.token_ids)


class SampleWork(msgspec.Struct, frozen=True):
    """What the sampler needs to know of one sequence."""

    params: SamplingParams
    seed: int
    """The request's seed, or the one the engine drew for it."""
    num_generated: int
    """Tokens generated so far, pending ones too; with `seed` it fixes this draw, whatever is in
    the batch."""
    history_ids: tuple[int, ...] = ()
    """Prompt and output ids when a penalty needs them, else empty."""
    num_prompt: int = 0
    """How many of `history_ids` are prompt."""
    banned_ids: tuple[int, ...] = ()
    """End tokens that must not be sampled yet (min_new_tokens)."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass: every sequence that computes tokens in it, be it one or a prompt chunk."""

    sequences: tuple[SequenceWork, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.sequences)


class SampledToken(msgspec.Struct, frozen=True):
    """What the step gave one sequence that sampled."""

    rid: str
    token_id: int
    """-1 when `is_finite` is false."""
    is_finite: bool
    """False: the logits held NaN or infinity; the request must fail."""
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry per sequence of the plan that had `sample`, in the plan's order."""

    sampled: tuple[SampledToken, ...]
