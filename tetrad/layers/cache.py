"""The paged pools that hold every sequence's keys.

A token takes one slot, `page * PAGE_TOKENS + offset`, with the same number in every pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.core.arch import ModelArch
from tetrad.core.step import PAGE_TOKENS


class KvCache:
    """Latents of every layer, and index keys of the layers that own an indexer.

    Pools are not initialised: a slot must be written before it is read, and `poison` lets a test
    prove that it is.
    """

    def __init__(
        self, arch: ModelArch, num_pages: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        def pool(width: int) -> Tensor:
            return torch.empty(num_pages, PAGE_TOKENS, width, device=device, dtype=dtype)

        self.num_pages = num_pages
        self.latent: list[Tensor] = [pool(arch.mla.latent_dim) for _ in range(arch.num_layers)]
        """Per layer [P, PAGE_TOKENS, C + R]: normed latent, then rotated key."""
        self.index_keys: dict[int, Tensor] = {
            layer: pool(arch.indexer.head_dim) for layer in arch.indexer.full_layers
        }
        """Per full layer [P, PAGE_TOKENS, I]."""

    @staticmethod
    def bytes_per_page(arch: ModelArch, dtype: torch.dtype) -> int:
        """Bytes one page takes in all pools together."""
        latent = arch.num_layers * arch.mla.latent_dim
        index = len(arch.indexer.full_layers) * arch.indexer.head_dim
        return PAGE_TOKENS * (latent + index) * dtype.itemsize

    def poison(self) -> None:
        """Fill every slot with NaN, for tests: whoever reads an unwritten slot shows it."""
        for pool in (*self.latent, *self.index_keys.values()):
            pool.fill_(torch.nan)
