"""One step's input, ragged: S sequences with T tokens together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from tetrad.core.keys import num_expanded
from tetrad.kernels.ragged import Ragged


@dataclass(frozen=True)
class WholePrompts:
    """The sequences at the end of a step of which nothing was cached before."""

    first_row: int
    """Their tokens are the rows from there on."""
    starts: Tensor
    """[P + 1] int32: where each begins, counted from `first_row`; the end of the last."""
    lens: tuple[int, ...]
    """Host twin: tokens of each."""
    before: Ragged
    """The other sequences, of rows up to `first_row`."""


@dataclass(frozen=True)
class ForwardBatch:
    """What a model computes in one step. Decodes and prompt chunks are not told apart.

    The tokens of sequence s are rows `query_start[s] .. query_start[s + 1]`; they are its last
    `query_lens[s]` tokens, at positions `kv_lens[s] - query_lens[s] .. kv_lens[s] - 1`.
    """

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, counted from 0 in each sequence."""
    slots: Tensor
    """[T] int64, page * PAGE_TOKENS + offset: where each token's keys are written."""
    query_start: Tensor
    """[S + 1] int32."""
    kv_lens: Tensor
    """[S] int32, tokens in the cache after this step."""
    page_table: Tensor
    """[S, max_pages] int32, padded with 0."""
    logit_rows: Tensor
    """[R] int64, the rows of T whose logits are wanted."""
    query_lens: tuple[int, ...]
    """Host twin of query_start, at least 1 each, so that nothing waits for the device."""
    kv_lens_host: Sequence[int]
    """Host twin of kv_lens, or numbers that these will never exceed."""
    num_real: Tensor | None = None
    """[1] int64: rows from there on are padding. None: there is none."""
    _whole: dict[int, WholePrompts | None] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def is_padding(self) -> Tensor | None:
        """[T, 1] bool, or None if no row is."""
        if self.num_real is None:
            return None
        rows = torch.arange(len(self.token_ids), device=self.token_ids.device)
        return (rows >= self.num_real).unsqueeze(1)

    @cached_property
    def ragged(self) -> Ragged:
        """The part the attention ops read; built once for all layers."""
        return Ragged(
            self.query_start, self.kv_lens, self.page_table, self.query_lens, self.kv_lens_host
        )

    def whole_prompts(self, longest: int) -> WholePrompts | None:
        """Those whose keys and values are expanded, of at most `longest` tokens; None if there are
        none. Found once for all layers, on the host."""
        if longest not in self._whole:
            self._whole[longest] = self._find_whole(longest)
        return self._whole[longest]

    def _find_whole(self, longest: int) -> WholePrompts | None:
        count = num_expanded(self.query_lens, self.kv_lens_host, longest)
        if not count:
            return None
        first = len(self.query_lens) - count
        lens = self.query_lens[first:]
        starts = self.query_start[first:]
        before = Ragged(
            self.query_start[: first + 1],
            self.kv_lens[:first],
            self.page_table[:first],
            self.query_lens[:first],
            self.kv_lens_host[:first],
        )
        first_row = sum(self.query_lens) - sum(lens)
        return WholePrompts(first_row, starts - first_row if first else starts, lens, before)
