"""The kernel of the routed experts: a grouped matrix product over rows gathered by index.

One program computes the output features of one packed weight tile (128 matrix rows) for one tile of
token rows that all chose the same expert. The weights are the left operand and stay in registers
from the moment they are decoded; the token rows come through shared memory. In `packing.py` stands
how the codes lie: a lane's sixteen bytes are exactly the fragments it feeds to the tensor core, on
Hopper (wgmma, register operand) as before and after it (mma.sync).
"""

from __future__ import annotations

from torch import Tensor

from tetrad.kernels import chain
from tetrad.kernels.backend import Backend
from tetrad.kernels.experts import reference
from tetrad.kernels.experts.decode import GATED_PTX, HAS_BF16_MUL, decode_fp8_ptx, decode_ptx
from tetrad.kernels.experts.grouping import Grouping, in_groups
from tetrad.kernels.experts.issued import issued_by_triton, triton_tile
from tetrad.kernels.experts.prepared import GroupedExperts, Operand, Prepared, prepare
from tetrad.kernels.experts.tiles import fitted
from tetrad.kernels.experts.triton_sums import fp8_sums, nvfp4_sums
from tetrad.kernels.triton_support import is_interpreted, jit, tl, why_not


@jit()
def _packed_product(
    words, scales, x_at, first_k, expert, column,
    NUM_COLUMNS: tl.constexpr, IN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """fp32 [128, BM]: an NVFP4 tile times the token rows that `x_at` points to."""
    tile = (expert * NUM_COLUMNS + column) * ((IN + 63) // 64)
    word_at = words + tile * 512 + tl.arange(0, BK * 8)
    scale_at = scales + tile * 128 + tl.arange(0, BK * 2)
    STEPS: tl.constexpr = (IN + BK - 1) // BK
    return nvfp4_sums(word_at, scale_at, x_at, first_k, IN, BM, BK, STEPS, STAGES, PTX)


@jit()
def _fp8_product(
    words, scales, x_at, first_k, expert, column,
    NUM_COLUMNS: tl.constexpr, IN: tl.constexpr, IS_GATE_UP: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The same from an FP8 tile, whose scales are applied."""
    BLOCKS: tl.constexpr = (IN + 127) // 128
    STEPS: tl.constexpr = (IN + BK - 1) // BK
    tile = (expert * NUM_COLUMNS + column) * BLOCKS
    word_at = words + tile * (128 * 16) + tl.arange(0, BK * 16)
    scale_at = scales + tile * (2 if IS_GATE_UP else 1)
    return fp8_sums(word_at, scale_at, x_at, first_k, 0, IN, IS_GATE_UP, BM, BK, STEPS, STAGES, PTX)


@jit()
def _dense_product(
    first, second, x_at, first_k, expert, column,
    OUT: tl.constexpr, IN: tl.constexpr, IS_GATE_UP: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The same from bf16 matrices [E, OUT, IN]; the upper half of each 16 is `second`'s."""
    row = tl.arange(0, 128)
    matrix = tl.where(row % 16 < 8, first, second)
    feature = column * 64 + row // 16 * 8 + row % 8 if IS_GATE_UP else column * 128 + row
    feature = tl.minimum(feature, OUT - 1)
    k = tl.arange(0, BK)
    a_at = (matrix + (expert * OUT + feature) * IN)[:, None] + k[None, :]
    acc = tl.zeros((128, BM), tl.float32)
    for step in tl.range(0, (IN + BK - 1) // BK, num_stages=STAGES):
        if IN % BK == 0:
            a = tl.load(a_at)
            token = tl.load(x_at)
        else:
            a = tl.load(a_at, mask=k[None, :] < IN - step * BK, other=0.0)
            token = tl.load(x_at, mask=first_k < IN - step * BK, other=0.0)
        if PTX == "":
            acc = tl.dot(a.to(tl.float32), token.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, token, acc)
        a_at += BK
        x_at += BK
    return acc


@jit()
def _factors(global_scale, expert, IS_GATE_UP: tl.constexpr, IS_PACKED: tl.constexpr):
    """The global scales of gate and up, or that of down twice; ones for other weights."""
    if not IS_PACKED:
        first = 1.0
        second = 1.0
    elif IS_GATE_UP:
        first = tl.load(global_scale + expert * 2)
        second = tl.load(global_scale + expert * 2 + 1)
    else:
        first = tl.load(global_scale + expert)
        second = first
    return first, second


@jit()
def _gated(gate, up, PTX: tl.constexpr):
    """silu(gate) * up in fp32."""
    if PTX == "":
        y = gate / (1.0 + tl.exp(-gate)) * up
    else:
        y = tl.inline_asm_elementwise(
            GATED_PTX, "=f,f,f", [gate, up], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["tile_expert"],
)
def grouped_product(
    x, first, second, global_scale, rows, tile_expert, out, num_tokens,
    OUT: tl.constexpr, IN: tl.constexpr, SLOTS: tl.constexpr, IS_GATE_UP: tl.constexpr,
    IS_PACKED: tl.constexpr, IS_FP8: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One matrix product of all experts, with what follows it. `TileShape` explains the sizes.

    gate_up: x [T, IN] is read at row // SLOTS; out [positions, OUT] is silu(gate) * up.
    down: x [positions, IN] is read in order; out [T * SLOTS, OUT] is written at the row.

    NVFP4 weights come as words, scales and a global scale; FP8 as words and scales; dense ones as
    gate and up, or as down twice. How many tiles there are is read on the device; a program that
    has none returns at once. OUT and IN are constants of the program because ptxas makes every
    wgmma wait for the last when the loop might not run at all.
    """
    FEATURES: tl.constexpr = 64 if IS_GATE_UP else 128
    NUM_COLUMNS: tl.constexpr = (OUT + FEATURES - 1) // FEATURES
    chain.after_previous()
    tile = tl.program_id(0) // NUM_COLUMNS
    column = tl.program_id(0) % NUM_COLUMNS
    expert = tl.load(tile_expert + tile).to(tl.int64)
    # before the test, so that it need not wait for the expert
    position = tile * BM + tl.arange(0, BM)
    row = tl.load(rows + position)
    chain.before_next()
    if expert >= 0:
        first_factor, second_factor = _factors(global_scale, expert, IS_GATE_UP, IS_PACKED)
        # Padding reads some token or other: if it were always the same, its part of the L2 cache
        # would hold everybody up.
        spread = tl.where(row >= 0, row // SLOTS, position % num_tokens)
        source = spread if IS_GATE_UP else position
        k = tl.arange(0, BK)
        x_at = x + source.to(tl.int64)[None, :] * IN + k[:, None]
        if IS_PACKED:
            acc = _packed_product(
                first, second, x_at, k[:, None], expert, column,
                NUM_COLUMNS, IN, BM, BK, STAGES, PTX,
            )  # fmt: skip
        elif IS_FP8:
            acc = _fp8_product(
                first, second, x_at, k[:, None], expert, column,
                NUM_COLUMNS, IN, IS_GATE_UP, BM, BK, STAGES, PTX,
            )  # fmt: skip
        else:
            acc = _dense_product(
                first, second, x_at, k[:, None], expert, column,
                OUT, IN, IS_GATE_UP, BM, BK, STAGES, PTX,
            )  # fmt: skip
        if IS_GATE_UP:
            gate, up = acc.reshape(8, 2, 8, BM).permute(0, 2, 3, 1).split()
            gate = gate.reshape(64, BM) * first_factor
            y = _gated(gate, up.reshape(64, BM) * second_factor, PTX)
        else:
            y = acc * first_factor
        target = position if IS_GATE_UP else row
        feature = column * FEATURES + tl.arange(0, FEATURES)
        at = out + target.to(tl.int64)[:, None] * OUT + feature[None, :]
        mask = (row >= 0)[:, None] & (feature < OUT)[None, :]
        tl.store(at, y.trans().to(out.dtype.element_ty), mask=mask)


def grouped(
    x: Tensor, weights: Operand, grouping: Grouping, out: Tensor, *, is_gate_up: bool
) -> None:
    """Launch one grouped product; see `grouped_product`."""
    capability = grouping.capability
    tile = fitted(grouping.tile, weights.granules, capability, weights.is_packed)
    # one accumulator for a step and one for the sum: in the largest tile too many for four warps
    is_wide = weights.is_fp8 and tile.rows >= 128
    grouped_product[(len(grouping.tile_expert) * weights.num_columns,)](
        x,
        weights.first,
        weights.second,
        weights.global_scale,
        grouping.rows,
        grouping.tile_expert,
        out,
        len(x),
        OUT=weights.features,
        IN=weights.width,
        SLOTS=grouping.num_slots if is_gate_up else 1,
        IS_GATE_UP=is_gate_up,
        IS_PACKED=weights.is_packed,
        IS_FP8=weights.is_fp8,
        BM=tile.rows,
        BK=tile.columns,
        STAGES=tile.stages,
        PTX=_ptx(weights, capability >= HAS_BF16_MUL),
        num_warps=max(tile.warps, 8) if is_wide else tile.warps,
        **chain.options(),
        maxnreg=tile.max_registers,
    )


def _ptx(weights: Operand, has_bf16_mul: bool) -> str:
    """What decodes the weights."""
    if is_interpreted():
        return ""
    return decode_fp8_ptx(has_bf16_mul) if weights.is_fp8 else decode_ptx(has_bf16_mul)


def run(
    x: Tensor,
    weight: Prepared,
    ids: Tensor,
    slot_weights: Tensor,
    shared: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:
    """Sort, two grouped products, weighted sum: four launches, none of which the host waits for."""
    if not isinstance(weight, GroupedExperts):
        return reference.run(x, weight, ids, slot_weights, shared, residual)
    tile, capability = triton_tile(ids, weight)
    routed = (ids, slot_weights, shared, residual)
    return in_groups(x, weight, routed, tile, capability, grouped)


BACKEND = Backend("triton", run, why_not, prepare, issued_by_triton)
