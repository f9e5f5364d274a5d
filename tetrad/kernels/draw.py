"""Draws inputs for checks: seeded, on the CPU first, so that every device gets the same numbers.

Large cases are drawn on the device: a real model's experts would take minutes to quantise.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tetrad.core.step import PAGE_TOKENS
from tetrad.formats import fp8, integers, nvfp4
from tetrad.formats.weights import DenseWeight, Weight, stack
from tetrad.kernels import quick_weights
from tetrad.kernels.contract import Case
from tetrad.kernels.ragged import Ragged

Lens = tuple[tuple[int, int], ...]
"""(query_len, kv_len) of each sequence of a step."""


@dataclass(frozen=True)
class Draw:
    """A seeded source of tensors for one case."""

    generator: torch.Generator
    dtype: torch.dtype
    device: torch.device
    is_quick: bool = False

    @classmethod
    def of(cls, case: Case, dtype: torch.dtype, device: torch.device) -> Draw:
        """The same case always draws the same numbers."""
        seed = zlib.crc32(case.name.encode())
        place = device if case.is_large else torch.device("cpu")
        return cls(torch.Generator(place).manual_seed(seed), dtype, device, case.is_large)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, std: float = 1.0) -> Tensor:
        """Gaussian numbers in `dtype` (default: the activations')."""
        values = self._on_its_device(torch.randn, *shape) * std
        return values.to(self.device, dtype or self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        """fp32 in [0, 1)."""
        return self._on_its_device(torch.rand, *shape).to(self.device)

    def permutation(self, size: int) -> Tensor:
        """0 .. size - 1 in random order, int64."""
        return self._on_its_device(torch.randperm, size).to(self.device)

    def choices(self, num_rows: int, size: int, num: int) -> Tensor:
        """[num_rows, num] int64: in each row `num` different numbers below `size`."""
        return self.uniform(num_rows, size).argsort(dim=-1)[:, :num].contiguous()

    def dealt(self, counts: Sequence[int]) -> Tensor:
        """[sum(counts), 1] int64: number i stands in counts[i] rows, in random order."""
        owners = torch.repeat_interleave(torch.tensor(counts)).to(self.device)
        return owners[self.permutation(len(owners))].unsqueeze(1)

    def weight(self, format_name: str, out: int, width: int) -> Weight:
        """A random matrix stored in a format; gain near 1."""
        if self.is_quick:
            return quick_weights.draw(self.generator, self.dtype, format_name, (out, width))
        matrix = torch.randn(out, width, generator=self.generator) * width**-0.5
        stored: Weight
        if format_name == "nvfp4":
            stored = nvfp4.quantize(matrix)
        elif format_name == "fp8_tensor":
            stored = fp8.quantize_tensor(matrix)
        elif format_name == "fp8_block":
            stored = fp8.quantize_block(matrix)
        elif format_name == "int4":
            stored = integers.quantize_int4(matrix)
        elif format_name == "int8_block":
            stored = integers.quantize_int8_block(matrix)
        elif format_name == "int8":
            stored = integers.quantize_int8(matrix)
        else:
            stored = DenseWeight(matrix.to(self.dtype))
        return stored.to(self.device)

    def weights(self, format_name: str, num: int, out: int, width: int) -> Weight:
        """A stack of them, [num, out, width]."""
        if self.is_quick:
            return quick_weights.draw(self.generator, self.dtype, format_name, (num, out, width))
        return stack([self.weight(format_name, out, width) for _ in range(num)])

    def _on_its_device(self, draw: Callable[..., Tensor], *shape: int) -> Tensor:
        return draw(*shape, generator=self.generator, device=self.generator.device)

    def ragged(self, lens: Lens) -> Ragged:
        """Sequences whose pages lie scattered in a pool twice as large as needed."""
        num_pages = [-(-kv_len // PAGE_TOKENS) for _, kv_len in lens]
        order = self.permutation(2 * sum(num_pages)).int()
        table = torch.zeros(len(lens), max(num_pages), dtype=torch.int32, device=self.device)
        ends = list(accumulate(num_pages))
        for row, (end, count) in enumerate(zip(ends, num_pages, strict=True)):
            table[row, :count] = order[end - count : end]
        query_lens = tuple(query_len for query_len, _ in lens)
        kv_lens = tuple(kv_len for _, kv_len in lens)
        return Ragged(
            query_start=torch.tensor([0, *accumulate(query_lens)]).to(self.device, torch.int32),
            kv_lens=torch.tensor(kv_lens).to(self.device, torch.int32),
            page_table=table,
            query_lens=query_lens,
            kv_lens_host=kv_lens,
        )

    def pool(self, lens: Lens, ragged: Ragged, width: int) -> Tensor:
        """[P, PAGE_TOKENS, width]: random keys where a sequence has some, NaN everywhere else."""
        num_pages = 2 * sum(-(-kv_len // PAGE_TOKENS) for _, kv_len in lens)
        pool = self.normal(num_pages, PAGE_TOKENS, width)
        written = torch.zeros(num_pages * PAGE_TOKENS, dtype=torch.bool, device=self.device)
        for sequence in range(len(lens)):
            written[sequence_slots(ragged, sequence)] = True
        pool.view(-1, width)[~written] = torch.nan
        return pool


def sequence_slots(ragged: Ragged, sequence: int) -> Tensor:
    """[kv_len] int64: the cache slots of one sequence in order, one by one from the page table."""
    pages = ragged.page_table[sequence].tolist()
    return torch.tensor(
        [
            pages[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS
            for position in range(ragged.kv_lens_host[sequence])
        ],
        dtype=torch.int64,
    )


def rows_of(ragged: Ragged) -> list[tuple[int, int, int]]:
    """(row, sequence, number of keys it sees) of every row of a step."""
    found: list[tuple[int, int, int]] = []
    lens = zip(ragged.query_lens, ragged.kv_lens_host, strict=True)
    for sequence, (query_len, kv_len) in enumerate(lens):
        found += [(len(found) + i, sequence, kv_len - query_len + i + 1) for i in range(query_len)]
    return found
