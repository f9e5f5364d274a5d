"""Weights that are quantised as they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    "int8" (rows). Embeddings, norms and what is never quantised stay as they are."""

    inner: _Stored
    scheme: str

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """As it is."""
        return self.inner.tensor(name, shape)

    def linear(self, module: str, shape: tuple[int, int]) -> Weight:
        """Decoded, and quantised again, but a matrix of logits into nothing smaller than int8.
        Raises ConfigError for a width that NVFP4 cannot have."""
        if module in _LOGITS and self.scheme != "int8":
            return self.inner.linear(module, shape)
        if self.scheme == "nvfp4" and shape[1] % NVFP4_BLOCK:
            raise ConfigError(
                f"--quantization nvfp4: '{module}' has {shape[1]} columns, no multiple of "
                f"{NVFP4_BLOCK}; int8 and fp8 work."
            )
        return _QUANTIZE[self.scheme](self.inner.linear(module, shape).dequantize(torch.float32))

    def linears(self, modules: Sequence[str], shape: tuple[int, int]) -> Weight:
        """Nobody stacks matrices of the models that may be quantised so."""
        raise NotImplementedError


def quantised(weights: _Stored, scheme: str | None) -> _Stored:
    """The same weights, or each linear of them as `RequantizedWeights` has it."""
    return weights if scheme is None else RequantizedWeights(weights, scheme)
