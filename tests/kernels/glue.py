"""What the tests of the small Triton kernels share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tetrad.core.keys import ACTIVATION, FP8
from tetrad.kernels.contract import Case, case

GLUE_OPS = (
    "rms_norm",
    "add_rms_norm",
    "latents",
    "rope",
    "activation",
    "route",
    "route_activate",
    "sort_tokens",
    "reduce_experts",
    "head_linear",
    "absorb",
    "finite_rows",
    "sample",
)


def sampling_inputs(seed: int, rows: int, vocabulary: int) -> tuple[Tensor, ...]:
    """Arguments of `sample`: each row has another mixture of rules, some are greedy."""
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> Tensor:
        return torch.rand(rows, generator=generator)

    def sometimes(value: Tensor, other: float) -> Tensor:
        return torch.where(uniform() > 0.5, value, other)

    logits = torch.randn(rows, vocabulary, generator=generator) * (0.1, 1.0, 3.0, 10.0)[seed % 4]
    if seed % 3 == 0:
        logits = (logits * 2).round() / 2
    if seed % 5 == 0:
        logits[:, ::3] = -torch.inf
    top_k = torch.randint(1, vocabulary + 5, (rows,), generator=generator)
    return (
        logits,
        uniform().mul(2) * (uniform() > 0.1),
        torch.where(uniform() > 0.5, top_k, 0),
        sometimes(uniform().clamp(min=1e-4), 1.0),
        sometimes(uniform() * 0.3, 0.0),
        uniform(),
    )


def fp8_latents(num_tokens: int) -> Case:
    """Numbers that lie between two codes may become either, so this is no case of the contract."""
    case = glm_case("latents", num_tokens)
    return Case(f"{case.name}, fp8", {**case.values, "keys": FP8})


def glm_case(name: str, num_tokens: int) -> Case:
    """GLM-5's sizes: hidden 6144, 256 experts of which 8 are chosen, 154880 tokens."""
    values: dict[str, dict[str, Any]] = {
        "rms_norm": {"W": 6144, "eps": 1e-5},
        "add_rms_norm": {"W": 6144, "eps": 1e-5, "more": True},
        "latents": {
            "P": 80,
            "Q": 2048,
            "C": 512,
            "R": 64,
            "I": 128,
            "interleaved": True,
            "joined": True,
            "keys": ACTIVATION,
        },
        "rope": {"H": 32, "R": 64, "W": 128, "interleaved": True},
        "head_linear": {"H": 64, "W": 512, "O": 256},
        "absorb": {"H": 64, "N": 192, "C": 512, "R": 64},
        "activation": {"F": 12288},
        "route": {
            "E": 256,
            "K": 8,
            "groups": 1,
            "chosen": 1,
            "normalise": True,
            "held": (0, 256),
        },
        "route_activate": {
            "E": 256,
            "K": 8,
            "F": 2048,
            "groups": 1,
            "chosen": 1,
            "normalise": True,
            "held": (32, 64),
        },
        "sort_tokens": {
            "E": 256,
            "K": 8,
            "block": 16,
            "small_block": 16,
            "used": 256,
            "dropped": 0.1,
        },
        "reduce_experts": {"K": 8, "D": 6144, "shared": True, "residual": True, "dropped": 0.1},
        "finite_rows": {"R": num_tokens, "V": 154880, "spoiled": False},
        "sample": {"R": num_tokens, "V": 154880, "rules": False},
    }
    return case(f"{name} of {num_tokens}", T=num_tokens, **values[name])
