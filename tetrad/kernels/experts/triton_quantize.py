"""Rows of activations in NVFP4, for products whose tensor cores take four bits on both sides.

Every row has a global scale of its own, so that what a token becomes depends on no other token of
the step, and nothing has to be calibrated: `input_scale` of a checkpoint is not needed.

    row_scale = amax(row) / (6 * 448)
    scale     = e4m3(amax(block) / (6 * row_scale))      one per 16 values
    code      = e2m1(value / (scale * row_scale))        nearest, ties to even

This is `formats.nvfp4.quantize` of each row, number for number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tetrad.formats.weights import NVFP4_BLOCK
from tetrad.kernels.triton_support import jit, next_power_of_2, row_warps, tl


@dataclass(frozen=True, eq=False)
class RoundedRows:
    """n rows in NVFP4: value = e2m1(code) * scale * row_scale."""

    codes: Tensor
    """uint8 [n, width / 2]; the even column in the low nibble"""
    scales: Tensor
    """float8_e4m3fn [n, width / 16], row-major"""
    row_scale: Tensor
    """float32 [n]; NaN where a row holds a NaN"""


@jit()
def _code(value):
    """e2m1 of fp32: how many midpoints lie below; a tie goes to the even code."""
    size = tl.abs(value)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32)
    code += (size > 1.25).to(tl.int32) + (size >= 1.75).to(tl.int32)
    code += (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    return tl.where(value < 0, code + 8, code)


@jit()
def _held_by_e4m3(value):
    """fp32 from 2^-9 to 448, rounded to the nearest number that e4m3 has, ties to even.

    The conversion that follows is then exact, also in Triton's interpreter, which rounds wrongly.
    """
    bits = value.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    subnormal = (value + 16384.0) - 16384.0
    return tl.where(value < 0.015625, subnormal, bits.to(tl.float32, bitcast=True))


@jit()
def quantize_kernel(
    x, rows, codes, scales, row_scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One row a program. `rows` may be None; else a position below 0 there is left out.

    Columns from WIDTH to PADDED become zero. Divisions round correctly, as torch's do.
    """
    position = tl.program_id(0).to(tl.int64)
    is_wanted = True
    if rows is not None:
        is_wanted = tl.load(rows + position) >= 0
    if is_wanted:
        block = tl.arange(0, BLOCKS)
        column = block[:, None] * 16 + tl.arange(0, 16)[None, :]
        value = tl.load(x + position * WIDTH + column, mask=column < WIDTH, other=0.0)
        value = value.to(tl.float32)
        block_amax = tl.max(tl.abs(value), axis=1)
        amax = tl.max(block_amax, axis=0)
        whole = tl.where(amax > 0, tl.maximum(tl.div_rn(amax, 2688.0), 1.1754943508222875e-38), 1.0)
        ideal = tl.div_rn(block_amax, tl.zeros_like(block_amax) + 6.0 * whole)
        ideal = tl.where(ideal == 0, 1.0, tl.minimum(tl.maximum(ideal, 0.001953125), 448.0))
        scale = _held_by_e4m3(ideal)
        step = scale * whole
        code = _code(tl.div_rn(value, tl.zeros_like(value) + step[:, None]))
        low, high = code.reshape(BLOCKS, 8, 2).split()
        is_inside = block < PADDED // 16
        byte = block[:, None] * 8 + tl.arange(0, 8)[None, :]
        packed = (low | (high << 4)).to(tl.uint8)
        tl.store(codes + position * (PADDED // 2) + byte, packed, mask=is_inside[:, None])
        tl.store(
            scales + position * (PADDED // 16) + block, scale.to(tl.float8e4nv), mask=is_inside
        )
        num_nan = tl.sum(tl.sum((value != value).to(tl.int32), axis=1), axis=0)
        tl.store(row_scale + position, tl.where(num_nan > 0, float("nan"), whole))


def quantize_rows(
    x: Tensor, padded_width: int | None = None, rows: Tensor | None = None
) -> RoundedRows:
    """Quantise contiguous [n, width]; one launch.

    Columns are filled with zeros up to `padded_width`, a multiple of 16. Positions at which `rows`
    [n] is negative are not written.
    """
    assert x.is_contiguous()
    num_rows, width = x.shape
    padded = width if padded_width is None else padded_width
    assert padded % NVFP4_BLOCK == 0, padded
    codes = torch.empty(num_rows, padded // 2, dtype=torch.uint8, device=x.device)
    scales = codes.new_empty(num_rows, padded // NVFP4_BLOCK, dtype=torch.float8_e4m3fn)
    row_scale = codes.new_empty(num_rows, dtype=torch.float32)
    blocks = next_power_of_2(padded // NVFP4_BLOCK)
    quantize_kernel[(num_rows,)](
        x, rows, codes, scales, row_scale, width, padded, blocks, num_warps=row_warps(blocks * 16)
    )
    return RoundedRows(codes, scales, row_scale)
