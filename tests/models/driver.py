"""Drives a model step by step as the engine would, over scattered pages of a poisoned cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from tetrad.core.keys import ACTIVATION, KeyFormat
from tetrad.core.step import PAGE_TOKENS
from tetrad.layers.batch import ForwardBatch
from tetrad.layers.cache import KvCache
from tetrad.models.base import Model

Step = list[tuple[int, int]]
"""(sequence, number of its next tokens) pairs computed together."""


@dataclass
class Driver:
    """Token ids per sequence, computed by the steps of a schedule."""

    model: Model
    token_ids: list[Tensor]
    """Per sequence int64 [n], on the CPU."""
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    keys: KeyFormat = ACTIVATION
    computed: list[int] = field(init=False)
    pages: list[list[int]] = field(init=False)
    cache: KvCache = field(init=False)

    def __post_init__(self) -> None:
        needed = [-(-len(ids) // PAGE_TOKENS) for ids in self.token_ids]
        num_pages = 2 * sum(needed) + 1
        order = list(range(num_pages))
        random.Random(0).shuffle(order)
        ends = list(accumulate(needed))
        self.pages = [order[end - n : end] for n, end in zip(needed, ends, strict=True)]
        self.computed = [0] * len(self.token_ids)
        self.cache = KvCache(self.model.arch, num_pages, self.device, self.dtype, self.keys)
        self.cache.poison()

    def run(self, schedule: Sequence[Step]) -> list[Tensor]:
        """Logits of every token, per sequence fp32 [n, V] on the CPU."""
        logits: list[list[Tensor]] = [[] for _ in self.token_ids]
        for step in schedule:
            out = self.model(self.batch(step), self.cache).cpu()
            for (sequence, count), rows in zip(step, out.split([c for _, c in step]), strict=True):
                self.computed[sequence] += count
                logits[sequence].append(rows)
        assert self.computed == [len(ids) for ids in self.token_ids]
        return [torch.cat(rows) for rows in logits]

    def batch(self, step: Step) -> ForwardBatch:
        """The next `count` tokens of each sequence of `step`, all their logits wanted."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for sequence, count in step:
            start = self.computed[sequence]
            tokens += self.token_ids[sequence][start : start + count].tolist()
            positions += range(start, start + count)
            pages = self.pages[sequence]
            slots += [
                pages[p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS
                for p in range(start, start + count)
            ]
        query_lens = tuple(count for _, count in step)
        kv_lens = tuple(self.computed[sequence] + count for sequence, count in step)
        # Only pages that hold tokens by now: what lies behind is the scheduler's business.
        tables = [
            self.pages[s][: -(-kv // PAGE_TOKENS)] for (s, _), kv in zip(step, kv_lens, strict=True)
        ]
        width = max(map(len, tables))
        padded = [table + [0] * (width - len(table)) for table in tables]

        def tensor(values: Sequence[object], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        return ForwardBatch(
            token_ids=tensor(tokens, torch.int64),
            positions=tensor(positions, torch.int64),
            slots=tensor(slots, torch.int64),
            query_start=tensor([0, *accumulate(query_lens)], torch.int32),
            kv_lens=tensor(kv_lens, torch.int32),
            page_table=tensor(padded, torch.int32),
            logit_rows=tensor(range(len(tokens)), torch.int64),
            query_lens=query_lens,
            kv_lens_host=kv_lens,
        )
