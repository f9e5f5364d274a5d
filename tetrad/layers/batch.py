"""One step's input, ragged: S sequences with T tokens together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tetrad.kernels.ragged import Ragged


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
    kv_lens_host: tuple[int, ...]
    """Host twin of kv_lens, or numbers that these will never exceed."""
    num_real: Tensor | None = None
    """[1] int64: rows from there on are padding. None: there is none."""

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
