"""The routed experts on Hopper, scheduled by hand.

The product of `triton.py` over the same packed weights, with what that language cannot say: token
tiles of 8, a second accumulator on the same decoded weights for tiles of 24, 48, 80 or 96, wgmma
left in flight while the next weights are decoded, and copies that run ahead over the border between
two tiles.

A step of the loop: wait for its copies, decode weights from shared memory to registers, start wgmma
on them, wait for the wgmma of the step before, refill the buffers which that one read. Decoded
weights alternate between two sets of registers and the wait names the set that it frees; otherwise
a later step could overwrite registers that a wgmma still reads. The barrier after the wait makes it
hold for all warps before any of them refills.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tetrad.core.hardware import DeviceSnapshot
from tetrad.kernels import triton_support
from tetrad.kernels.backend import Backend
from tetrad.kernels.experts import triton as portable
from tetrad.kernels.experts.decode import FACTORS, decode_ptx
from tetrad.kernels.experts.gluon_parts import (
    barrier,
    copy,
    decode,
    factors_of,
    gl,
    gluon,
    hopper,
    in_turn,
    item_of,
    jit,
    place,
    refill,
    rows_of,
    start_copy,
    store,
    token_at,
    token_ring,
    weight_rings,
)
from tetrad.kernels.experts.grouping import Grouping, in_groups
from tetrad.kernels.experts.issued import issued_by_triton, issued_flops
from tetrad.kernels.experts.packing import GRANULE_COLUMNS
from tetrad.kernels.experts.prepared import GroupedExperts, Operand, Prepared, prepare
from tetrad.kernels.experts.tiles import GLUON_TILES, HOPPER, TileShape, fitted, tile_for


@jit()
def _wait(STEPS: gl.constexpr, acc, acc_more, weights, MORE: gl.constexpr):
    """Wait until wgmma of at most STEPS steps is in flight; `weights` are then free."""
    if MORE > 0:
        acc, acc_more, weights = hopper.warpgroup_mma_wait(2 * STEPS, deps=[acc, acc_more, weights])
    else:
        acc, weights = hopper.warpgroup_mma_wait(STEPS, deps=[acc, weights])
    return acc, acc_more, weights


@jit()
def _tile(
    at, ring, rows, first, factors, out, column, by,
    OUT: gl.constexpr, IS_GATE_UP: gl.constexpr, STEPS: gl.constexpr, BM: gl.constexpr,
    MORE: gl.constexpr, UNIT: gl.constexpr, STAGES: gl.constexpr, FENCE: gl.constexpr,
    PTX: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """One item from the first copy to the last store; MORE is 0 when the expert has no more."""
    MORE_OR_8: gl.constexpr = MORE if MORE > 0 else 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BM, 16])
    MMA_MORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, MORE_OR_8, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    for ready in gl.static_range(STAGES - 1):
        refill(ready * UNIT, ready, at, ring, STEPS, UNIT, MORE > 0)
    stage = 0
    acc = gl.zeros([128, BM], gl.float32, MMA)
    acc_more = gl.zeros([128, MORE_OR_8], gl.float32, MMA_MORE)
    odd = gl.zeros([128, 64], gl.bfloat16, OPERAND)
    for pair in range(0, STEPS, 2):
        for half in gl.static_range(2):
            if half % UNIT == 0:
                copy.wait_group(STAGES - 2)
                if FENCE:
                    hopper.fence_async_shared()
            slot = stage * UNIT + half % UNIT
            a = decode(ring[0].index(slot), ring[1].index(slot), by, OPERAND, PTX, num_warps)
            tokens = ring[2].index(slot).permute([1, 0])
            acc = hopper.warpgroup_mma(a, tokens, acc, is_async=True)
            if MORE > 0:
                tokens = ring[3].index(slot).permute([1, 0])
                again = gl.convert_layout(a, gl.DotOperandLayout(0, MMA_MORE, 2))
                acc_more = hopper.warpgroup_mma(again, tokens, acc_more, is_async=True)
            if half == 0:
                acc, acc_more, odd = _wait(1, acc, acc_more, odd, MORE)
                even = a
            else:
                acc, acc_more, even = _wait(1, acc, acc_more, even, MORE)
                odd = a
            if half % UNIT == UNIT - 1:
                barrier()
                free = stage - 1 if stage > 0 else STAGES - 1
                ahead = pair + half + 1 + (STAGES - 2) * UNIT
                refill(ahead, free, at, ring, STEPS, UNIT, MORE > 0)
                stage = stage + 1 if stage < STAGES - 1 else 0
    acc, acc_more, odd = _wait(0, acc, acc_more, odd, MORE)
    copy.wait_group(0)
    store(acc, rows, first, factors, out, column, OUT, IS_GATE_UP, BM, num_warps)
    if MORE > 0:
        store(acc_more, rows, first + BM, factors, out, column, OUT, IS_GATE_UP, MORE, num_warps)


@jit(
    do_not_specialize=["num_tokens", "two", "eight", "sixteen"],
    do_not_specialize_on_alignment=["tile_expert", "num_tiles"],
)
def grouped_product(
    x, words, scales, global_scale, rows, tile_expert, num_tiles, out, num_tokens,
    two, eight, sixteen,
    OUT: gl.constexpr, IN: gl.constexpr, SLOTS: gl.constexpr, IS_GATE_UP: gl.constexpr,
    BM: gl.constexpr, MORE: gl.constexpr, UNIT: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, FENCE: gl.constexpr, PTX: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """`triton.grouped_product` for packed weights, one item a program.

    A tile has BM + MORE rows; the second accumulator rests where the expert has at most BM.
    Copies bring UNIT granules at a time, 1 or 2. `two, eight, sixteen` are FACTORS.
    """
    NUM_COLUMNS: gl.constexpr = OUT // (64 if IS_GATE_UP else 128)
    gl.static_assert(IN // 64 % 2 == 0)
    tile, column, expert = item_of(gl.program_id(0), tile_expert, num_tiles, NUM_COLUMNS, GROUP)
    TOKENS: gl.constexpr = rows_of(64, num_warps)
    k = gl.arange(0, 64, layout=gl.SliceLayout(0, TOKENS)).expand_dims(0)
    token = gl.arange(0, BM, layout=gl.SliceLayout(1, TOKENS))
    first = tile * (BM + MORE)
    # before the test, so that it need not wait for the expert
    x_at = token_at(x, num_tokens, rows, first + token, k, IN, SLOTS, IS_GATE_UP)
    if expert >= 0:
        start = (expert * NUM_COLUMNS + column) * (IN // 64)
        w_at = words + start * 512 + gl.arange(0, 512, layout=in_turn(2, num_warps))
        s_at = scales + start * 128 + gl.arange(0, 128, layout=in_turn(1, num_warps))
        factors = factors_of(global_scale, expert, IS_GATE_UP)
        SLOTS_OF_RING: gl.constexpr = STAGES * UNIT
        w_ring, s_ring = weight_rings(SLOTS_OF_RING)
        x_ring = token_ring(SLOTS_OF_RING, BM)
        if MORE > 0:
            MORE_OR_8: gl.constexpr = MORE if MORE > 0 else 8
            more = first + BM + gl.arange(0, MORE_OR_8, layout=gl.SliceLayout(1, TOKENS))
            more_at = token_at(x, num_tokens, rows, more, k, IN, SLOTS, IS_GATE_UP)
            ring = (w_ring, s_ring, x_ring, token_ring(SLOTS_OF_RING, MORE_OR_8))
            at = (w_at, s_at, x_at, more_at)
            if gl.load(rows + first + BM) >= 0:
                _tile(
                    at, ring, rows, first, factors, out, column, (two, eight, sixteen),
                    OUT, IS_GATE_UP, IN // 64, BM, MORE, UNIT, STAGES, FENCE, PTX, num_warps,
                )  # fmt: skip
            else:
                _tile(
                    at, ring, rows, first, factors, out, column, (two, eight, sixteen),
                    OUT, IS_GATE_UP, IN // 64, BM, 0, UNIT, STAGES, FENCE, PTX, num_warps,
                )  # fmt: skip
        else:
            _tile(
                (w_at, s_at, x_at), (w_ring, s_ring, x_ring), rows, first, factors, out, column,
                (two, eight, sixteen),
                OUT, IS_GATE_UP, IN // 64, BM, 0, UNIT, STAGES, FENCE, PTX, num_warps,
            )  # fmt: skip


@jit(
    do_not_specialize=["num_tokens", "two", "eight", "sixteen"],
    do_not_specialize_on_alignment=["tile_expert", "num_tiles"],
)
def persistent_product(
    x, words, scales, global_scale, rows, tile_expert, num_tiles, out, num_tokens,
    two, eight, sixteen,
    OUT: gl.constexpr, IN: gl.constexpr, SLOTS: gl.constexpr, IS_GATE_UP: gl.constexpr,
    BM: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, FENCE: gl.constexpr,
    PTX: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """`grouped_product` for large tiles: every program takes each num_programs-th item.

    Copies run STAGES - 1 granules ahead, over the end of an item into the next.
    """
    gl.static_assert(IN // 64 % 2 == 0)
    gl.static_assert(IN // 64 >= STAGES)
    TOKENS: gl.constexpr = rows_of(64, num_warps)
    w_ring, s_ring = weight_rings(STAGES)
    ring = (w_ring, s_ring, token_ring(STAGES, BM))
    tiles = gl.load(num_tiles)
    if gl.program_id(0) < tiles * (OUT // (64 if IS_GATE_UP else 128)):
        lanes = (
            gl.arange(0, 512, layout=in_turn(2, num_warps)),
            gl.arange(0, 128, layout=in_turn(1, num_warps)),
            gl.arange(0, BM, layout=gl.SliceLayout(1, TOKENS)),
            gl.arange(0, 64, layout=gl.SliceLayout(0, TOKENS)).expand_dims(0),
        )
        _items(
            (x, words, scales, global_scale, rows, tile_expert, out, num_tokens),
            tiles, ring, lanes,
            (two, eight, sixteen),
            OUT, IN, SLOTS, IS_GATE_UP, BM, GROUP, STAGES, FENCE, PTX, num_warps,
        )  # fmt: skip


@jit()
def _locate(
    item, tiles, tensors, lanes,
    OUT: gl.constexpr, IN: gl.constexpr, SLOTS: gl.constexpr, IS_GATE_UP: gl.constexpr,
    BM: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Where the first step of an item reads words, scales and tokens; past the end, of the last."""
    x, words, scales, _global_scale, rows, tile_expert, _out, num_tokens = tensors
    NUM_COLUMNS: gl.constexpr = OUT // (64 if IS_GATE_UP else 128)
    item = gl.minimum(item, tiles * NUM_COLUMNS - 1)
    tile, column = place(item, tiles, NUM_COLUMNS, GROUP)
    start = (gl.load(tile_expert + tile).to(gl.int64) * NUM_COLUMNS + column) * (IN // 64)
    x_at = token_at(x, num_tokens, rows, tile * BM + lanes[2], lanes[3], IN, SLOTS, IS_GATE_UP)
    return words + start * 512 + lanes[0], scales + start * 128 + lanes[1], x_at


@jit()
def _copy_step(slot, w_at, s_at, x_at, ring, here):
    """Start the copies of one step into a slot of the ring."""
    start_copy(ring[0].index(slot), w_at, mask=here)
    start_copy(ring[1].index(slot), s_at, mask=here)
    start_copy(ring[2].index(slot), x_at, mask=here)
    copy.commit_group()


@jit()
def _items(
    tensors, tiles, ring, lanes, by,
    OUT: gl.constexpr, IN: gl.constexpr, SLOTS: gl.constexpr, IS_GATE_UP: gl.constexpr,
    BM: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, FENCE: gl.constexpr,
    PTX: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """All items of a program."""
    NUM_COLUMNS: gl.constexpr = OUT // (64 if IS_GATE_UP else 128)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    items = tiles * NUM_COLUMNS
    stride = gl.num_programs(0)
    ahead = gl.program_id(0)
    w_at, s_at, x_at = _locate(ahead, tiles, tensors, lanes, OUT, IN, SLOTS, IS_GATE_UP, BM, GROUP)
    for step in gl.static_range(STAGES - 1):
        _copy_step(step, w_at, s_at, x_at, ring, ahead < items)
        w_at, s_at, x_at = w_at + 512, s_at + 128, x_at + 64
    ahead_step = STAGES - 1
    slot = 0
    for item in range(gl.program_id(0), items, stride):
        acc = gl.zeros([128, BM], gl.float32, MMA)
        odd = gl.zeros([128, 64], gl.bfloat16, OPERAND)
        for _pair in range(0, IN // 64, 2):
            for half in gl.static_range(2):
                copy.wait_group(STAGES - 2)
                if FENCE:
                    hopper.fence_async_shared()
                a = decode(ring[0].index(slot), ring[1].index(slot), by, OPERAND, PTX, num_warps)
                tokens = ring[2].index(slot).permute([1, 0])
                acc = hopper.warpgroup_mma(a, tokens, acc, is_async=True)
                if half == 0:
                    acc, odd = hopper.warpgroup_mma_wait(1, deps=[acc, odd])
                    even = a
                else:
                    acc, even = hopper.warpgroup_mma_wait(1, deps=[acc, even])
                    odd = a
                barrier()
                free = slot - 1 if slot > 0 else STAGES - 1
                _copy_step(free, w_at, s_at, x_at, ring, ahead < items)
                w_at, s_at, x_at = w_at + 512, s_at + 128, x_at + 64
                slot = slot + 1 if slot < STAGES - 1 else 0
                ahead_step += 1
                if ahead_step == IN // 64:
                    ahead_step, ahead = 0, ahead + stride
                    w_at, s_at, x_at = _locate(
                        ahead, tiles, tensors, lanes, OUT, IN, SLOTS, IS_GATE_UP, BM, GROUP
                    )
        acc, odd = hopper.warpgroup_mma_wait(0, deps=[acc, odd])
        tile, column = place(item, tiles, NUM_COLUMNS, GROUP)
        factors = factors_of(tensors[3], gl.load(tensors[5] + tile).to(gl.int64), IS_GATE_UP)
        store(
            acc, tensors[4], tile * BM, factors, tensors[6], column,
            OUT, IS_GATE_UP, BM, num_warps,
        )  # fmt: skip
    copy.wait_group(0)


def grouped(
    x: Tensor, weights: Operand, grouping: Grouping, out: Tensor, *, is_gate_up: bool
) -> None:
    """Launch one grouped product."""
    if grouping.tile.is_portable:
        portable.grouped(x, weights, grouping, out, is_gate_up=is_gate_up)
        return
    tile = fitted(grouping.tile, weights.granules, grouping.capability, weights.is_packed)
    num_items = len(grouping.tile_expert) * weights.num_columns
    sizes: dict[str, Any] = {"BM": tile.rows}
    kernel, programs = persistent_product, min(num_items, grouping.num_cores)
    if not tile.is_persistent:
        kernel, programs = grouped_product, num_items
        sizes |= {"MORE": tile.more_rows, "UNIT": tile.columns // GRANULE_COLUMNS}
    kernel[(programs,)](
        x,
        weights.first,
        weights.second,
        weights.global_scale,
        grouping.rows,
        grouping.tile_expert,
        grouping.num_tiles,
        out,
        len(x),
        *FACTORS,
        OUT=weights.features,
        IN=weights.width,
        SLOTS=grouping.num_slots if is_gate_up else 1,
        IS_GATE_UP=is_gate_up,
        GROUP=tile.group,
        STAGES=tile.stages,
        FENCE=tile.has_fence,
        PTX=decode_ptx(has_bf16_mul=True, by_multiplying=True),
        num_warps=tile.warps,
        maxnreg=tile.max_registers,
        **sizes,
    )


def is_whole(operand: Operand, tile: TileShape) -> bool:
    """Can the loops take it: packed, whole tiles, an even number of steps that fill the ring?"""
    ahead = tile.stages if tile.is_persistent else tile.stages - 1
    return (
        operand.is_packed
        and operand.features % operand.features_per_tile == 0
        and operand.width % (2 * GRANULE_COLUMNS) == 0
        and operand.width >= ahead * tile.columns
    )


def run(
    x: Tensor,
    weight: Prepared,
    ids: Tensor,
    slot_weights: Tensor,
    shared: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:
    """As `triton.run`, which computes what has no whole tiles here."""
    tile = tile_of(ids, weight)
    if tile is None or not isinstance(weight, GroupedExperts):
        return portable.run(x, weight, ids, slot_weights, shared, residual)
    return in_groups(x, weight, (ids, slot_weights, shared, residual), tile, (9, 0), grouped)


def tile_of(ids: Tensor, weight: Prepared) -> TileShape | None:
    """The tile for a step, or None where its loops cannot take the weights."""
    if not isinstance(weight, GroupedExperts):
        return None
    tile = tile_for(ids.numel(), weight.num_experts, GLUON_TILES)
    parts = (weight.gate_up, weight.down)
    return tile if all(is_whole(part, tile) for part in parts) else None


def issued(arguments: Mapping[str, Any]) -> float | None:
    """Operations of a call with these arguments, padding included."""
    ids, weight = arguments["ids"], arguments["weight"]
    tile = tile_of(ids, weight)
    return issued_by_triton(arguments) if tile is None else issued_flops(ids, weight, tile)


def why_not(device: DeviceSnapshot) -> str | None:
    """None, or why Gluon kernels cannot run on `device`, and what would."""
    if (reason := triton_support.why_not(device)) is not None:
        return reason
    if device.compute_capability is not None and device.compute_capability[0] != HOPPER:
        return "its instructions exist on Hopper (capability 9.0) alone; use 'triton'"
    if gluon is None:
        return 'this Triton has no Gluon; `pip install "triton>=3.6,<4"` installs one that has'
    return None


BACKEND = Backend("gluon", run, why_not, prepare, issued)
