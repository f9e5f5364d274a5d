"""Rotary embedding: a program per token and group of heads."""

from __future__ import annotations

from torch import Tensor

from tetrad.kernels import chain
from tetrad.kernels.backend import Backend
from tetrad.kernels.triton_support import cdiv, jit, next_power_of_2, tl, why_not

MAX_ELEMENTS = 4096
"""Elements of one program: 32 for each thread, read 16 bytes at a time."""


@jit()
def column_of(
    place, NUM_PAIRS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """Column at each of the 2 * PAIRS places of a tile, both of a pair in memory's order, and
    whether there is one."""
    if not INTERLEAVED and NUM_PAIRS < PAIRS:
        column = place // PAIRS * NUM_PAIRS + place % PAIRS
        is_pair = place % PAIRS < NUM_PAIRS
    else:
        column = place
        is_pair = place < 2 * NUM_PAIRS
    return column, is_pair


@jit()
def angles_of(cos, sin, token, NUM_PAIRS: tl.constexpr, PAIRS: tl.constexpr):
    """cos and sin [PAIRS] of a token."""
    pair = tl.arange(0, PAIRS)
    at = token * NUM_PAIRS + pair
    c = tl.load(cos + at, mask=pair < NUM_PAIRS, other=0.0)
    s = tl.load(sin + at, mask=pair < NUM_PAIRS, other=0.0)
    return c, s


@jit()
def turn(values, c, s, ROWS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """fp32 [ROWS, 2 * PAIRS], at the places of `column_of`, by angles that broadcast to
    [ROWS, PAIRS]. Taken apart in registers, so that memory is read and written in one piece."""
    if INTERLEAVED:
        a, b = tl.split(values.reshape([ROWS, PAIRS, 2]))
        turned = tl.join(a * c - b * s, b * c + a * s)
    else:
        a, b = tl.split(values.reshape([ROWS, 2, PAIRS]).permute([0, 2, 1]))
        turned = tl.join(a * c - b * s, b * c + a * s).permute([0, 2, 1])
    return turned.reshape([ROWS, 2 * PAIRS])


@jit()
def rope_kernel(
    x, cos, sin, rotated, token_stride, head_stride, out_token_stride, out_head_stride,
    NUM_HEADS: tl.constexpr, NUM_PAIRS: tl.constexpr, REST: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, REST_COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Tiles are [HEADS, 2 * PAIRS] to rotate, and [HEADS, REST_COLUMNS] to copy."""
    chain.after_previous()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    is_head = head < NUM_HEADS
    source = x + token * token_stride + head * head_stride
    target = rotated + token * out_token_stride + head * out_head_stride
    column, is_pair = column_of(tl.arange(0, 2 * PAIRS)[None, :], NUM_PAIRS, PAIRS, INTERLEAVED)
    values = tl.load(source + column, mask=is_head & is_pair, other=0.0).to(tl.float32)
    c, s = angles_of(cos, sin, token, NUM_PAIRS, PAIRS)
    turned = turn(values, c[None, :], s[None, :], HEADS, PAIRS, INTERLEAVED)
    tl.store(target + column, turned.to(rotated.dtype.element_ty), mask=is_head & is_pair)
    chain.before_next()
    if REST > 0:
        behind = tl.arange(0, REST_COLUMNS)[None, :]
        column = 2 * NUM_PAIRS + behind
        is_rest = is_head & (behind < REST)
        tl.store(target + column, tl.load(source + column, mask=is_rest), mask=is_rest)


def rotate_to(rotated: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Write to `rotated`, like `x` a slice whose columns lie side by side; `cos` and `sin` must be
    contiguous."""
    num_tokens, num_heads, width = x.shape
    num_pairs = cos.shape[1]
    rest = width - 2 * num_pairs
    pairs, rest_columns = next_power_of_2(num_pairs), next_power_of_2(rest)
    most = max(1, MAX_ELEMENTS // (2 * pairs + rest_columns))
    heads = min(next_power_of_2(num_heads), next_power_of_2(most + 1) // 2)
    rope_kernel[(num_tokens, cdiv(num_heads, heads))](
        x, cos, sin, rotated, x.stride(0), x.stride(1), rotated.stride(0), rotated.stride(1),
        num_heads, num_pairs, rest, heads, pairs, rest_columns, interleaved,
        num_warps=4, **chain.options(),
    )  # fmt: skip


def run(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Columns of `x` must lie side by side; `cos` and `sin` must be contiguous."""
    rotated = x.new_empty(x.shape)
    rotate_to(rotated, x, cos, sin, interleaved)
    return rotated


BACKEND = Backend("triton", run, why_not)
