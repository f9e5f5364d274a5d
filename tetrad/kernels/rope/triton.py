"""Rotary embedding: a program per token and group of heads."""

from __future__ import annotations

from torch import Tensor

from tetrad.kernels.backend import Backend
from tetrad.kernels.triton_support import cdiv, jit, next_power_of_2, tl, why_not

MAX_ELEMENTS = 1024
"""Elements of one program: eight for each thread."""


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
    """Tiles are [HEADS, PAIRS]. Strides are those of `x`."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    is_inside = (head < NUM_HEADS) & (pair < NUM_PAIRS)
    if INTERLEAVED:
        first = 2 * pair
        second = first + 1
    else:
        first = pair
        second = pair + NUM_PAIRS
    source = x + token * token_stride + head * head_stride
    target = rotated + (token * NUM_HEADS + head) * (2 * NUM_PAIRS)
    a = tl.load(source + first, mask=is_inside, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=is_inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * NUM_PAIRS + pair, mask=pair < NUM_PAIRS, other=0.0)
    s = tl.load(sin + token * NUM_PAIRS + pair, mask=pair < NUM_PAIRS, other=0.0)
    dtype = rotated.dtype.element_ty
    tl.store(target + first, (a * c - b * s).to(dtype), mask=is_inside)
    tl.store(target + second, (b * c + a * s).to(dtype), mask=is_inside)


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
