"""Experts drawn at random, and what they give in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tetrad.formats.weights import DenseWeight, Nvfp4Weight, Weight
from tetrad.kernels import quick_weights
from tetrad.kernels.experts.grouping import Routed
from tetrad.kernels.experts.prepared import GroupedExperts, prepare
from tetrad.kernels.experts.weights import ExpertWeights


@dataclass(frozen=True)
class Drawn:
    """One call of the op and its weights, as stored and as prepared."""

    x: Tensor
    weight: ExpertWeights
    prepared: GroupedExperts
    routed: Routed

    def expected(self) -> Tensor:
        """[T, D] float64, expert by expert on the device."""
        ids, slot_weights, *added = self.routed
        out = torch.zeros_like(self.x, dtype=torch.float64)
        for rows in added:
            if rows is not None:
                out += rows.double()
        for expert in range(self.weight.num_experts):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            if len(token):
                rows = expert_rows(self.weight, expert, self.x[token])
                out.index_add_(0, token, slot_weights[token, slot, None].double() * rows)
        return out


def one_matrix(stack: Weight, expert: int) -> Tensor:
    """float64 [out, in] of one expert."""
    parts = {name: tensor[expert] for name, tensor in stack.tensors().items()}
    if isinstance(stack, Nvfp4Weight):
        exact = Nvfp4Weight(parts["codes"], parts["scales"], torch.ones_like(parts["global_scale"]))
        return exact.dequantize(torch.float64) * parts["global_scale"].double()
    return type(stack)(**parts).dequantize(torch.float64)


def expert_rows(weight: ExpertWeights, expert: int, rows: Tensor) -> Tensor:
    """float64: one expert's MLP."""
    x = rows.double()
    gate = x @ one_matrix(weight.gate, expert).T
    hidden = gate / (1 + (-gate).exp()) * (x @ one_matrix(weight.up, expert).T)
    return hidden @ one_matrix(weight.down, expert).T


def random_stack(
    format_name: str, experts: int, out: int, width: int, generator: torch.Generator
) -> Weight:
    """Random codes and scales, or Gaussian numbers, drawn on the generator's device."""
    device = generator.device
    if format_name == "bf16":
        values = torch.randn(experts, out, width, generator=generator, device=device)
        return DenseWeight((values * width**-0.5).bfloat16())
    if format_name.startswith("fp8"):
        return quick_weights.draw(generator, torch.bfloat16, format_name, (experts, out, width))

    def number(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(
            low, high, shape, generator=generator, device=device, dtype=torch.uint8
        )

    # scales from 2^-9 (subnormal) and exactly 0 up to 3.75
    scales = number(0x28, 0x48, experts, out, width // 16)
    scales[:, ::7, ::3] = 5
    scales[:, ::5, 1::4] = 0
    uniform = torch.rand(experts, generator=generator, device=device)
    return Nvfp4Weight(
        number(0, 256, experts, out, width // 2),
        scales.view(torch.float8_e4m3fn),
        (uniform + 0.5) * 0.4 * width**-0.5,
    )


def draw_experts(
    device: torch.device,
    *,
    experts: int = 5,
    used: int | None = None,
    tokens: int = 9,
    slots: int = 2,
    hidden: int = 128,
    width: int = 64,
    format_name: str = "nvfp4",
    down_format_name: str | None = None,
    dropped: float = 0.0,
    seed: int = 0,
) -> Drawn:
    """Tokens choose among the first `used` experts; a share of slots is dropped (id -1).

    On a GPU in bf16; on a CPU, for the interpreter, the activations are fp32.
    """
    generator = torch.Generator(device).manual_seed(seed)
    weight = ExpertWeights(
        random_stack(format_name, experts, width, hidden, generator),
        random_stack(format_name, experts, width, hidden, generator),
        random_stack(down_format_name or format_name, experts, hidden, width, generator),
    )
    prepared = prepare(weight, torch.bfloat16)
    assert isinstance(prepared, GroupedExperts)
    scores = torch.rand(tokens, experts, generator=generator, device=device)
    scores[:, used or experts :] = -1
    ids = scores.topk(slots).indices
    ids[torch.rand(tokens, slots, generator=generator, device=device) < dropped] = -1
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, shared, residual = (
        torch.randn(tokens, hidden, generator=generator, device=device).to(dtype) for _ in range(3)
    )
    slot_weights = torch.rand(tokens, slots, generator=generator, device=device) + 0.1
    return Drawn(x, weight, prepared, (ids, slot_weights, shared, residual))
