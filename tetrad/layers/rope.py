"""Rotary angles."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tetrad.core.arch import Llama3Arch, RopeArch, YarnArch


class Rotation(NamedTuple):
    """Cosine and sine of every angle of a step, shared by all layers."""

    cos: Tensor
    """fp32 [T, R/2]."""
    sin: Tensor
    """fp32 [T, R/2]."""


class Rope:
    """Angle of pair i at position p: p * frequency[i]. Frequencies and angles are fp32, as the
    models were trained."""

    def __init__(self, arch: RopeArch, device: torch.device | str) -> None:
        frequencies = inverse_frequencies(arch)
        self.frequencies = frequencies.to(device)
        self.scale = arch.yarn.rotation_scale if arch.yarn else 1.0

    def __call__(self, positions: Tensor) -> Rotation:
        """[T] int64 to cos and sin."""
        angles = positions.unsqueeze(1).float() * self.frequencies
        return Rotation(angles.cos() * self.scale, angles.sin() * self.scale)


class HalfRope(Rope):
    """Of whole heads whose pairs are (i, i + W/2): cos and sin of each number's pair, fp32 [T, W],
    sin negative for the first of a pair."""

    def __call__(self, positions: Tensor) -> Rotation:
        """[T] int64 to cos and sin."""
        cos, sin = super().__call__(positions)
        return Rotation(torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1))


def inverse_frequencies(arch: RopeArch) -> Tensor:
    """fp32 [R/2]: theta^(-2i/R), bent by yarn when the model asks for it."""
    exponents = torch.arange(0, arch.dim, 2, dtype=torch.float32) / arch.dim
    plain = 1.0 / arch.theta**exponents
    if arch.llama3 is not None:
        return _llama3(plain, arch.llama3)
    return plain if arch.yarn is None else _yarn(plain, arch, arch.yarn)


def _llama3(plain: Tensor, bent: Llama3Arch) -> Tensor:
    """Keep pairs that turn often within the original context, slow down by `factor` those that
    turn seldom, blend in between (Llama 3.1)."""
    turns = bent.original_max_position * plain / (2 * math.pi)
    fastness = (turns - bent.low_freq_factor) / (bent.high_freq_factor - bent.low_freq_factor)
    fastness = fastness.clamp(0.0, 1.0)
    return plain * fastness + plain / bent.factor * (1.0 - fastness)


def _yarn(plain: Tensor, arch: RopeArch, yarn: YarnArch) -> Tensor:
    """Keep fast pairs, slow down slow pairs by `factor`, blend in between (YaRN, section 3.2).

    A pair is fast when it turns more than beta_fast times within the original context, slow when it
    turns fewer than beta_slow times.
    """

    def pair_turning(times: float) -> float:
        turns_of_first = yarn.original_max_position / (times * 2 * math.pi)
        return arch.dim * math.log(turns_of_first) / (2 * math.log(arch.theta))

    low = max(math.floor(pair_turning(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_turning(yarn.beta_slow)), arch.dim - 1)
    pairs = torch.arange(arch.dim // 2, dtype=torch.float32)
    slowness = ((pairs - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
    return plain * (1.0 - slowness) + plain / yarn.factor * slowness
