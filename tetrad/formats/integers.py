"""Integer weights: quantising to them, and ggml's blocks as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.formats.weights import INT_BLOCK, Int4Weight, Int8BlockWeight, Int8Weight

_INT8_MAX = 127
_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
GGML_INTEGERS = tuple(_BLOCK_BYTES)
"""ggml's types that `from_ggml` takes."""


def quantize_int8(matrix: Tensor) -> Int8Weight:
    """[out, in] with the row's largest value at ±127, rounded to nearest."""
    values = matrix.float()
    scale = values.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny) / _INT8_MAX
    data = (values / scale[:, None]).round().clamp(-_INT8_MAX, _INT8_MAX).to(torch.int8)
    return Int8Weight(data, scale)


def quantize_int4(matrix: Tensor) -> Int4Weight:
    """[out, in] with each block's least value at code 0 and its greatest at 15. `in` must be a
    multiple of 32."""
    blocks = matrix.float().reshape(len(matrix), -1, INT_BLOCK)
    low, high = blocks.aminmax(dim=-1)
    scales = ((high - low) / 15).clamp(min=torch.finfo(torch.float32).tiny)
    codes = ((blocks - low[..., None]) / scales[..., None]).round().clamp(0, 15).to(torch.uint8)
    return Int4Weight(_packed(codes), scales, low)


def quantize_int8_block(matrix: Tensor) -> Int8BlockWeight:
    """[out, in] with each block's largest value at ±127. `in` must be a multiple of 32."""
    rows = quantize_int8(matrix.reshape(-1, INT_BLOCK))
    return Int8BlockWeight(rows.data.view(matrix.shape), rows.scale.view(len(matrix), -1))


def from_ggml(rows: Tensor, type_name: str) -> Int4Weight | Int8BlockWeight:
    """Rows of ggml's blocks, uint8 [out, bytes], without changing a value.

    A block is a scale and, in Q4_1, a minimum, both fp16; then 32 bytes of Q8_0, or 16 whose low
    nibbles are the first 16 codes and whose high nibbles are the others.
    """
    blocks = rows.view(len(rows), -1, _BLOCK_BYTES[type_name])
    scales = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1).float()
    if type_name == "Q8_0":
        data = blocks[..., 2:].contiguous().view(torch.int8)
        return Int8BlockWeight(data.view(len(rows), -1), scales)
    if type_name == "Q4_1":
        minimums = blocks[..., 2:4].contiguous().view(torch.float16).squeeze(-1).float()
    else:
        minimums = -8 * scales
    halves = blocks[..., -16:]
    codes = torch.cat([halves & 15, halves >> 4], dim=-1)
    return Int4Weight(_packed(codes), scales, minimums)


def _packed(codes: Tensor) -> Tensor:
    """uint8 [out, blocks, 32] to [out, in / 2]."""
    even, odd = codes.view(len(codes), -1, 2).unbind(-1)
    return even | odd << 4
