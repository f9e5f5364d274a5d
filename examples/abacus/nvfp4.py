"""NVFP4 in plain torch, once for fake-quantised training and once for packing.

Sixteen neighbours along a row share an e4m3 scale, a matrix shares one fp32 scale, and each weight
is one of the e2m1 values. Gate and up of an expert share the fp32 scale, as in ModelOpt's exports.
Training rounds the master weights to bf16 first, because the bf16 checkpoint is what is quantised.
"""

import torch
from torch import Tensor

BLOCK = 16
E2M1_MAX, E4M3_MAX, E4M3_SMALLEST = 6.0, 448.0, 2.0**-9
# Halfway between neighbours; an exact half goes to the neighbour with an even code.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def global_scale(*matrices: Tensor) -> Tensor:
    """One scale for matrices [..., out, in], over all but the leading dimensions."""
    amax = torch.stack([matrix.abs().amax((-2, -1)) for matrix in matrices]).amax(0)
    return amax.float() / (E2M1_MAX * E4M3_MAX)


def block_scales(weight: Tensor, scale_2: Tensor) -> Tensor:
    """E4M3 scales [..., out, in / 16]; a block of zeros gets scale one."""
    amax = weight.float().unflatten(-1, (-1, BLOCK)).abs().amax(-1)
    scales = (amax / (E2M1_MAX * scale_2[..., None, None])).clamp(E4M3_SMALLEST, E4M3_MAX)
    return torch.where(amax == 0, 1.0, scales).to(torch.float8_e4m3fn)


def codes_of(scaled: Tensor) -> Tensor:
    """Nearest e2m1 magnitude, as its code 0 to 7; ties to the even code."""
    bounds = torch.tensor(E2M1_BOUNDS, device=scaled.device)
    magnitude = scaled.abs()
    code = torch.bucketize(magnitude, bounds)
    on_odd_bound = (magnitude[..., None] == bounds[1::2]).any(-1)
    return code + on_odd_bound


def quantise(weight: Tensor, scale_2: Tensor) -> tuple[Tensor, Tensor]:
    """Packed codes (even column in the low nibble) and block scales."""
    scales = block_scales(weight, scale_2)
    step = scales.float() * scale_2[..., None, None]
    scaled = (weight.float().unflatten(-1, (-1, BLOCK)) / step[..., None]).flatten(-2)
    codes = (codes_of(scaled) + 8 * scaled.signbit()).to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def dequantise(packed: Tensor, scales: Tensor, scale_2: Tensor) -> Tensor:
    """The fp32 weights that packed codes stand for."""
    values = torch.tensor(E2M1_VALUES, device=packed.device)
    table = torch.cat((values, -values))
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    step = scales.float() * scale_2[..., None, None]
    return (table[codes].unflatten(-1, (-1, BLOCK)) * step[..., None]).flatten(-2)


def rounded(weight: Tensor, scale_2: Tensor) -> Tensor:
    """`weight` as NVFP4 stores it, with gradients passing straight through."""
    with torch.no_grad():
        step = (block_scales(weight, scale_2).float() * scale_2[..., None, None])[..., None]
        scaled = weight.unflatten(-1, (-1, BLOCK)) / step
        magnitude = scaled.abs()
        # Spacing is 0.5 below 2, 1 below 4, 2 above; torch.round breaks ties to even as e2m1 does.
        spacing = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
        nearest = (torch.round(scaled / spacing) * spacing).clamp(-E2M1_MAX, E2M1_MAX)
        change = (nearest * step).flatten(-2) - weight
    return weight + change


def as_bf16(weight: Tensor) -> Tensor:
    """`weight` as bf16 stores it, with gradients passing straight through."""
    stored = weight.detach()
    return weight + (stored.bfloat16().float() - stored)


def fake_quantise_experts(gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Experts [E, out, in] as the shipped checkpoint will hold them."""
    gate, up, down = (as_bf16(weight) for weight in (gate, up, down))
    first = global_scale(gate.detach(), up.detach())
    return rounded(gate, first), rounded(up, first), rounded(down, global_scale(down.detach()))
