"""The paged pools that hold every sequence's keys.

A token takes one slot, `page * PAGE_TOKENS + offset`, with the same number in every pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.core.arch import ModelArch
from tetrad.core.architectures import Arch
from tetrad.core.keys import ACTIVATION, FP8, KeyFormat, index_bytes, latent_bytes
from tetrad.core.llama_arch import LlamaArch
from tetrad.core.step import PAGE_TOKENS


class KvCache:
    """Of a model with latent attention the latents of every layer, and index keys of the layers
    that own an indexer; of a model with grouped-query attention keys and values of every layer.

    Pools are not initialised: a slot must be written before it is read, and `poison` lets a test
    prove that it is.
    """

    def __init__(
        self,
        arch: Arch,
        num_pages: int,
        device: torch.device | str,
        dtype: torch.dtype,
        keys: KeyFormat = ACTIVATION,
    ) -> None:
        """`dtype`: of activations, and of keys that are not FP8."""
        kind = torch.uint8 if keys == FP8 else dtype

        def pool(num_bytes: int) -> Tensor:
            width = num_bytes // kind.itemsize
            return torch.empty(num_pages, PAGE_TOKENS, width, device=device, dtype=kind)

        self.num_pages = num_pages
        self.keys_values: list[Tensor] = []
        """Per layer [P, PAGE_TOKENS, 2 G W]: the keys of all heads, then their values."""
        self.latent: list[Tensor] = []
        """Per layer [P, PAGE_TOKENS, C + R]: normed latent, then rotated key; or, as bytes, what
        `formats/fp8_keys.py` makes of them."""
        self.index_keys: dict[int, Tensor] = {}
        """Per full layer [P, PAGE_TOKENS, I], or bytes."""
        if isinstance(arch, LlamaArch):
            width = _key_value_bytes(arch, dtype)
            self.keys_values += [pool(width) for _ in range(arch.num_layers)]
            return
        latent, index = _token_bytes(arch, dtype, keys)
        self.latent += [pool(latent) for _ in range(arch.num_layers)]
        self.index_keys |= {layer: pool(index) for layer in arch.indexer.full_layers}

    @staticmethod
    def bytes_per_page(arch: Arch, dtype: torch.dtype, keys: KeyFormat = ACTIVATION) -> int:
        """Bytes one page takes in all pools together."""
        if isinstance(arch, LlamaArch):
            return PAGE_TOKENS * arch.num_layers * _key_value_bytes(arch, dtype)
        latent, index = _token_bytes(arch, dtype, keys)
        num_indexers = len(arch.indexer.full_layers)
        return PAGE_TOKENS * (arch.num_layers * latent + num_indexers * index)

    def poison(self) -> None:
        """Fill every slot with NaN, for tests: whoever reads an unwritten slot shows it. Bytes of
        0xFF are NaN as codes, as scales and as rotary numbers."""
        for pool in (*self.keys_values, *self.latent, *self.index_keys.values()):
            pool.fill_(torch.nan if pool.is_floating_point() else 0xFF)


def _key_value_bytes(arch: LlamaArch, dtype: torch.dtype) -> int:
    """Of a token in one layer."""
    return 2 * arch.gqa.key_width * dtype.itemsize


def _token_bytes(arch: ModelArch, dtype: torch.dtype, keys: KeyFormat) -> tuple[int, int]:
    """Of a layer's latent, and of an index key."""
    mla, size = arch.mla, dtype.itemsize
    latent = latent_bytes(keys, mla.kv_lora_rank, mla.rope_dim, size)
    return latent, index_bytes(keys, arch.indexer.head_dim, size)
