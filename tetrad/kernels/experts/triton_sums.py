"""Loops over packed weights that the kernels of experts and linear layers share.

Each gives fp32 [128, BM]: the rows of one packed tile times BM tokens, over STEPS steps of BK
columns. `word_at`, `scale_at` and `x_at` [BK, BM] point to what the first step reads; `first_k`
[BK, 1] are its columns, of which IN exist.
"""

from __future__ import annotations

from tetrad.kernels.experts.triton_weights import fp8_weights, nvfp4_weights
from tetrad.kernels.triton_support import jit, tl


@jit()
def nvfp4_sums(
    word_at, scale_at, x_at, first_k,
    IN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr,
    STAGES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Without the global scale. `word_at` [BK * 8] and `scale_at` [BK * 2] are `packing.py`'s."""
    acc = tl.zeros((128, BM), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        w = tl.load(word_at)
        s = tl.load(scale_at)
        if IN % BK == 0:
            token = tl.load(x_at)
        else:
            token = tl.load(x_at, mask=first_k < IN - step * BK, other=0.0)
        a = nvfp4_weights(w, s, BK, PTX)
        if PTX == "":
            acc = tl.dot(a, token.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, token, acc)
            # Triton 3.6 lets the next step overwrite registers that a wgmma still reads (its issue
            # 9433). Touching the accumulator makes it wait for them first.
            acc = tl.inline_asm_elementwise(
                "", "=r,0", [acc], dtype=tl.float32, is_pure=False, pack=1
            )
        word_at += BK * 8
        scale_at += BK * 2
        x_at += BK
    return acc


@jit()
def _fp8_scale(scale_at, column, IS_JOINED: tl.constexpr):
    """The scale of the block that `column` lies in: of gate's rows and of up's where joined."""
    IN_BLOCK: tl.constexpr = 128
    if IS_JOINED:
        first = tl.load(scale_at + column // IN_BLOCK * 2)
        second = tl.load(scale_at + column // IN_BLOCK * 2 + 1)
    else:
        first = tl.load(scale_at + column // IN_BLOCK)
        second = first
    return first, second


@jit()
def fp8_sums(
    word_at, scale_at, x_at, first_k, first_column,
    IN: tl.constexpr, IS_JOINED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    STEPS: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Scales included. `word_at` [BK * 16] is `packing_fp8.py`'s, `scale_at` the first scale of the
    tile, `first_column` the first of the first step.

    A step lies in one block of columns; its sum meets the scale in fp32, which also makes Triton
    wait for the wgmma (see `nvfp4_sums`).
    """
    LAST: tl.constexpr = IN - 1
    acc = tl.zeros((128, BM), tl.float32)
    first, second = _fp8_scale(scale_at, first_column, IS_JOINED)
    is_first = (tl.arange(0, 128) % 16 < 8)[:, None]
    for step in tl.range(0, STEPS, num_stages=STAGES):
        w = tl.load(word_at)
        # read a step ahead, so that nothing waits for it
        following = tl.minimum(first_column + (step + 1) * BK, LAST)
        next_first, next_second = _fp8_scale(scale_at, following, IS_JOINED)
        if IN % BK == 0:
            token = tl.load(x_at)
        else:
            token = tl.load(x_at, mask=first_k < IN - step * BK, other=0.0)
        a = fp8_weights(w, BK, PTX)
        if PTX == "":
            part = tl.dot(a, token.to(tl.float32), input_precision="ieee")
        else:
            part = tl.dot(a, token)
        if IS_JOINED:
            acc += part * tl.where(is_first, first, second)
        else:
            acc += part * first
        first = next_first
        second = next_second
        word_at += BK * 16
        x_at += BK
    return acc
