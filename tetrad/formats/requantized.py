"""Weights that are quantised as they are loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tetrad.core.errors import ConfigError
from tetrad.formats import fp8, integers, nvfp4
from tetrad.formats.weights import NVFP4_BLOCK, Weight

_QUANTIZE: Mapping[str, Callable[[Tensor], Weight]] = {
    "nvfp4": nvfp4.quantize,
    "fp8": fp8.quantize_block,
    "int8": integers.quantize_int8,
}


_LOGITS = ("lm_head", "model.embed_tokens")
"""Of a tied model the embedding."""


class _Stored(Protocol):
    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor: ...

    def linear(self, module: str, shape: tuple[int, int]) -> Weight: ...

    def linears(self, modules: Sequence[str], shape: tuple[int, int]) -> Weight: ...


@dataclass(frozen=True)
class RequantizedWeights:
    """Another's weights, each linear in the format named: "nvfp4", "fp8" (blocks of 128 x 128) or
    "int8" (rows); None leaves them as they are, as embeddings, norms and what is never quantised
    are."""

    inner: _Stored
    scheme: str | None = None
    made: dict[str, str] = field(default_factory=dict)
    """Modules whose weight was quantised, and the format that it came into."""
    saved: Counter[str] = field(default_factory=Counter)
    """By such a format, how many bytes fewer its weights have than `inner` gave them."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """As it is."""
        return self.inner.tensor(name, shape)

    def linear(self, module: str, shape: tuple[int, int]) -> Weight:
        """Decoded, and quantised again, but a matrix of logits into nothing smaller than int8.
        Raises ConfigError for a width that NVFP4 cannot have."""
        if self.scheme is None or (module in _LOGITS and self.scheme != "int8"):
            return self.inner.linear(module, shape)
        if self.scheme == "nvfp4" and shape[1] % NVFP4_BLOCK:
            raise ConfigError(
                f"--quantization nvfp4: '{module}' has {shape[1]} columns, no multiple of "
                f"{NVFP4_BLOCK}; int8 and fp8 work."
            )
        given = self.inner.linear(module, shape)
        weight = _QUANTIZE[self.scheme](given.dequantize(torch.float32))
        self.made[module] = weight.format_name
        self.saved[weight.format_name] += given.nbytes - weight.nbytes
        return weight

    def linears(self, modules: Sequence[str], shape: tuple[int, int]) -> Weight:
        """As they are: nobody stacks matrices of the models that may be quantised so."""
        return self.inner.linears(modules, shape)
