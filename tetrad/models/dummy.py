"""A model without a checkpoint: random weights of the right formats, made on the device.

Experts are NVFP4, everything else has the activations' type. Matrices have gain near 1 and norms
weight 1, so that each block adds about as much to the residual as the embedding brings: over L
layers its size grows with the root of L.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tetrad.core.arch import ModelArch
from tetrad.core.architectures import Arch
from tetrad.core.errors import ConfigError
from tetrad.core.quantization import check_scheme
from tetrad.core.ranks import Ranks
from tetrad.distributed.collectives import Collectives
from tetrad.formats.requantized import RequantizedWeights
from tetrad.formats.weights import NVFP4_BLOCK, Weight
from tetrad.kernels import quick_weights
from tetrad.kernels.device import snapshot
from tetrad.kernels.select import OpSet
from tetrad.layers.source import WeightLedger, WeightSource
from tetrad.models.base import Model
from tetrad.models.registry import build

SKEW = 0.2
"""Standard deviation of the router's bias where routing is skewed: that of its scores."""


@dataclass(frozen=True)
class DummyWeights:
    """`StoredWeights` that answer every name; the same for a name, a shape and a seed each time."""

    device: torch.device
    dtype: torch.dtype
    seed: int = 0
    is_skewed: bool = False
    """Do some experts get more tokens than others?"""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A norm's weight is 1, a bias 0 but the router's, an embedding Gaussian."""
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self.device, dtype=self.dtype)
        std = 1.0 if name.endswith("embed_tokens.weight") else 0.0
        if name.endswith("e_score_correction_bias") and self.is_skewed:
            std = SKEW
        return torch.randn(shape, generator=self._seeded(name), device=self.device) * std

    def linear(self, module: str, shape: tuple[int, int]) -> Weight:
        """In the activations' type."""
        return quick_weights.draw(self._seeded(module), self.dtype, "bf16", shape)

    def linears(self, modules: Sequence[str], shape: tuple[int, int]) -> Weight:
        """NVFP4."""
        if shape[1] % NVFP4_BLOCK:
            raise ConfigError(
                f"--load-format dummy: experts with {shape[1]} columns cannot be NVFP4, that takes "
                f"a multiple of {NVFP4_BLOCK}; a layout that splits experts less has them wider."
            )
        whole = (len(modules), *shape)
        return quick_weights.draw(self._seeded(modules[0]), self.dtype, "nvfp4", whole)

    def _seeded(self, name: str) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed + zlib.crc32(name.encode()))


def dummy_model(
    arch: Arch,
    *,
    device: torch.device,
    dtype: torch.dtype,
    ops: OpSet,
    others: Collectives,
    seed: int = 0,
    is_skewed: bool = False,
    quantization: str | None = None,
) -> Model:
    """`arch`, or what the rank of `others` holds of it; linears quantised as `quantization` says,
    where it says something. Raises ConfigError for a model with experts where it does, and when a
    CPU's memory cannot hold the model: there an allocation beyond it would end in the process being
    killed."""
    check_scheme(quantization, arch, is_drawn=True)
    if device.type == "cpu" and isinstance(arch, ModelArch):
        _check_memory(arch, others.ranks, dtype, device)
    weights = RequantizedWeights(DummyWeights(device, dtype, seed, is_skewed), quantization)
    source = WeightSource(weights, ops, dtype, WeightLedger(), others=others)
    return build(arch, source)


def _check_memory(arch: ModelArch, ranks: Ranks, dtype: torch.dtype, device: torch.device) -> None:
    """By the routed experts alone, which a CPU holds decoded."""
    mine, num_experts = ranks.arch_of(arch), len(ranks.held(arch.moe.num_experts))
    num_layers = max(0, mine.num_layers - mine.moe.first_dense_layers)
    numbers = num_layers * num_experts * 3 * arch.hidden * mine.moe.intermediate
    needed, there = numbers * dtype.itemsize, snapshot(device).memory_bytes
    if needed > there:
        raise ConfigError(
            f"The experts of {num_layers} layers take {needed / 1e9:.0f} GB on a CPU, which holds "
            f"them decoded, and there are {there / 1e9:.0f} GB; a lower --num-layers, a layout "
            f"with more ep or a GPU would do."
        )
