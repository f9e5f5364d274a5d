"""Rotary embedding: a program per token and group of heads."""

from __future__ import annotations

from torch import Tensor

from tetrad.kernels.backend import Backend
from tetrad.kernels.triton_support import cdiv, jit, next_power_of_2, tl, why_not

MAX_ELEMENTS = 4096
"""Elements of one program: 32 for each thread, read 16 bytes at a time."""


@jit()
def rope_kernel(
    x,
    cos,
    sin,
    rotated,
    token_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Tiles are [HEADS, 2 * PAIRS], both columns of a pair in the order of `x`, whose strides these
    are. They are taken apart in registers, so that memory is read and written in one piece."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    place = tl.arange(0, 2 * PAIRS)[None, :]
    column = place
    if not INTERLEAVED and NUM_PAIRS < PAIRS:
        column = place // PAIRS * NUM_PAIRS + place % PAIRS
        is_pair = place % PAIRS < NUM_PAIRS
    else:
        is_pair = place < 2 * NUM_PAIRS
    is_inside = (head < NUM_HEADS) & is_pair
    source = x + token * token_stride + head * head_stride
    values = tl.load(source + column, mask=is_inside, other=0.0).to(tl.float32)
    pair = tl.arange(0, PAIRS)[None, :]
    c = tl.load(cos + token * NUM_PAIRS + pair, mask=pair < NUM_PAIRS, other=0.0)
    s = tl.load(sin + token * NUM_PAIRS + pair, mask=pair < NUM_PAIRS, other=0.0)
    if INTERLEAVED:
        a, b = tl.split(values.reshape([HEADS, PAIRS, 2]))
        turned = tl.join(a * c - b * s, b * c + a * s)
    else:
        a, b = tl.split(values.reshape([HEADS, 2, PAIRS]).permute([0, 2, 1]))
        turned = tl.join(a * c - b * s, b * c + a * s).permute([0, 2, 1])
    turned = turned.reshape([HEADS, 2 * PAIRS]).to(rotated.dtype.element_ty)
    target = rotated + (token * NUM_HEADS + head) * (2 * NUM_PAIRS)
    tl.store(target + column, turned, mask=is_inside)


def run(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Columns of `x` must lie side by side; `cos` and `sin` must be contiguous."""
    num_tokens, num_heads, width = x.shape
    rotated = x.new_empty(num_tokens, num_heads, width)
    num_pairs = width // 2
    pairs = next_power_of_2(num_pairs)
    heads = min(next_power_of_2(num_heads), max(1, MAX_ELEMENTS // (2 * pairs)))
    rope_kernel[(num_tokens, cdiv(num_heads, heads))](
        x,
        cos,
        sin,
        rotated,
        x.stride(0),
        x.stride(1),
        num_heads,
        num_pairs,
        heads,
        pairs,
        interleaved,
        num_warps=4,
    )
    return rotated


BACKEND = Backend("triton", run, why_not)
