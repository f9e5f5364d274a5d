"""What a step does with one sequence of which there is more to say than that it decodes.

They are structs: a frozen dataclass takes four times as long to make. `plan.py` has the step.
"""

from __future__ import annotations

from array import array

import msgspec

from tetrad.core.request import SamplingParams

PAGE_TOKENS = 64
"""Tokens per cache page, a power of two. One constant: kernels, scheduler and cache layout agree on
it."""
IN_PAGE = PAGE_TOKENS - 1
"""`position & IN_PAGE` is a position's place in its page. Of a column, % takes numpy five times as
long,"""
PAGE_BITS = IN_PAGE.bit_length()
"""and // four times as long as `position >> PAGE_BITS`."""


class SequenceWork(msgspec.Struct, frozen=True):
    """The tokens one sequence computes in this step.

    Tokens `start .. start + len(token_ids)` of the sequence are computed; their keys go to the
    slots `pages[i // PAGE_TOKENS] * PAGE_TOKENS + i % PAGE_TOKENS`.
    """

    rid: str
    token_ids: array[int]
    """int32, at least one. The last may be *pending*, -1 - r: what row r of the step planned just
    before samples. The host may not know it yet, the device does."""
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
