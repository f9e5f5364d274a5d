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
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tetrad.core.hardware import DeviceSnapshot
from tetrad.kernels import chain, triton_support
from tetrad.kernels.backend import Backend
from tetrad.kernels.experts import triton as portable
from tetrad.kernels.experts.decode import FACTORS, decode_ptx
from tetrad.kernels.experts.gluon_parts import (
    arrival,
    barrier,
    copy,
    decode,
    factors_of,
    gl,
    gluon,
    hopper,
    in_turn,
    is_last_part,
    item_of,
    jit,
    refill,
    rows_of,
    size_of,
    store,
    sum_of_parts,
    token_at,
    token_ring,
    wait,
    weight_rings,
)
from tetrad.kernels.experts.gluon_persistent import persistent_product
from tetrad.kernels.experts.grouping import Grouping, in_groups
from tetrad.kernels.experts.issued import issued_by_triton, issued_flops
from tetrad.kernels.experts.packing import GRANULE_COLUMNS, TILE_ROWS
from tetrad.kernels.experts.prepared import GroupedExperts, Operand, Prepared, prepare
from tetrad.kernels.experts.tiles import (
    GLUON_TILES,
    HOPPER,
    TileShape,
    experts_used,
    fitted,
    parts_for,
    tile_for,
)
from tetrad.kernels.sort_tokens.contract import max_small_tiles, max_tiles


@jit()
def _multiply(
    slot, ring, by, acc, acc_more,
    BM: gl.constexpr, MORE: gl.constexpr, PTX: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Decode the weights in a slot of the ring and start wgmma on them. Returns them too."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    a = decode(ring[0].index(slot), ring[1].index(slot), by, OPERAND, PTX, num_warps)
    tokens = ring[2].index(slot).permute([1, 0])
    acc = hopper.warpgroup_mma(a, tokens, acc, is_async=True)
    if MORE > 0:
        MMA_MORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, MORE, 16])
        tokens = ring[3].index(slot).permute([1, 0])
        again = gl.convert_layout(a, gl.DotOperandLayout(0, MMA_MORE, 2))
        acc_more = hopper.warpgroup_mma(again, tokens, acc_more, is_async=True)
    return a, acc, acc_more


@jit()
def _steps(
    x_at, at, ring, by,
    STEPS: gl.constexpr, BM: gl.constexpr, MORE: gl.constexpr, UNIT: gl.constexpr,
    STAGES: gl.constexpr, IN_FLIGHT: gl.constexpr, PTX: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The loop over columns. Returns both accumulators, [128, BM] and [128, MORE]."""
    MORE_OR_8: gl.constexpr = MORE if MORE > 0 else 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BM, 16])
    MMA_MORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, MORE_OR_8, 16])
    acc = gl.zeros([128, BM], gl.float32, MMA)
    acc_more = gl.zeros([128, MORE_OR_8], gl.float32, MMA_MORE)
    odd = gl.zeros([128, 64], gl.bfloat16, gl.DotOperandLayout(0, MMA, 2))
    for ready in gl.static_range(STAGES - 1):
        refill(ready * UNIT, ready, x_at, at, ring, STEPS, UNIT, MORE > 0)
    stage = 0
    for pair in range(0, STEPS, 2):
        for half in gl.static_range(2):
            if half % UNIT == 0:
                arrival(STAGES - 2)
            slot = stage * UNIT + half % UNIT
            a, acc, acc_more = _multiply(slot, ring, by, acc, acc_more, BM, MORE, PTX, num_warps)
            if IN_FLIGHT == 0:
                acc, acc_more, a = wait(0, acc, acc_more, a, MORE)
            elif half == 0:
                acc, acc_more, odd = wait(1, acc, acc_more, odd, MORE)
                even = a
            else:
                acc, acc_more, even = wait(1, acc, acc_more, even, MORE)
                odd = a
            if half % UNIT == UNIT - 1:
                barrier()
                free = stage - 1 if stage > 0 else STAGES - 1
                ahead = pair + half + 1 + (STAGES - 2) * UNIT
                refill(ahead, free, x_at, at, ring, STEPS, UNIT, MORE > 0)
                stage = stage + 1 if stage < STAGES - 1 else 0
    acc, acc_more, odd = wait(0, acc, acc_more, odd, MORE)
    copy.wait_group(0)
    return acc, acc_more


@jit()
def _tile(
    x_at, num_tokens, at, rows, first, factors, out, column, by, part, sums, arrived,
    OUT: gl.constexpr, IN: gl.constexpr, SLOTS: gl.constexpr, IS_GATE_UP: gl.constexpr,
    PARTS: gl.constexpr, ROWS: gl.constexpr, BM: gl.constexpr, MORE: gl.constexpr,
    UNIT: gl.constexpr, STAGES: gl.constexpr, IN_FLIGHT: gl.constexpr, PTX: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """One item of BM + MORE rows, or one of its PARTS, from the first copy to the last store.

    `x_at` is where x has the first columns; `at`, where words, scales and ROWS token rows begin.
    """
    gl.static_assert(PARTS == 1 or MORE == 0)
    POSITION: gl.constexpr = gl.SliceLayout(1, rows_of(64, num_warps))
    w_ring, s_ring = weight_rings(STAGES * UNIT)
    first_ring = token_ring(STAGES * UNIT, BM)
    more_ring, first_at = first_ring, at[2]
    if BM < ROWS:
        position = first + gl.arange(0, BM, layout=POSITION)
        first_at = token_at(num_tokens, rows, position, IN, SLOTS, IS_GATE_UP)
    more_at = first_at
    if MORE > 0:
        more_ring = token_ring(STAGES * UNIT, MORE)
        position = first + BM + gl.arange(0, MORE, layout=POSITION)
        more_at = token_at(num_tokens, rows, position, IN, SLOTS, IS_GATE_UP)
    acc, acc_more = _steps(
        x_at, (at[0], at[1], first_at, more_at), (w_ring, s_ring, first_ring, more_ring), by,
        IN // 64 // PARTS, BM, MORE, UNIT, STAGES, IN_FLIGHT, PTX, num_warps,
    )  # fmt: skip
    if PARTS == 1:
        store(acc, rows, first, factors, out, column, OUT, IS_GATE_UP, BM, num_warps)
    elif is_last_part(acc, sums, arrived, part, PARTS, BM, num_warps):
        acc = sum_of_parts(sums, PARTS, BM, num_warps)
        store(acc, rows, first, factors, out, column, OUT, IS_GATE_UP, BM, num_warps)
    if MORE > 0:
        store(acc_more, rows, first + BM, factors, out, column, OUT, IS_GATE_UP, MORE, num_warps)


@jit(
    do_not_specialize=["num_tokens", "two", "eight", "sixteen"],
    do_not_specialize_on_alignment=["tile_expert", "num_tiles"],
)
def grouped_product(
    x, words, scales, global_scale, rows, tile_expert, num_tiles, out, num_tokens,
    two, eight, sixteen, sums, arrived,
    OUT: gl.constexpr, IN: gl.constexpr, SLOTS: gl.constexpr, IS_GATE_UP: gl.constexpr,
    PARTS: gl.constexpr, BLOCK: gl.constexpr, SIZES: gl.constexpr, IS_REST: gl.constexpr,
    UNIT: gl.constexpr, STAGES: gl.constexpr, IN_FLIGHT: gl.constexpr, PTX: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """`triton.grouped_product` for packed weights, PARTS programs for each item.

    Each takes its share of the matrix's columns, and the last to end adds up what all left in
    `sums`, fp32 [items, PARTS, 128, ROWS]; `arrived`, int32 [items], counts them from 0.

    SIZES are those of a `TileShape`: the last is the whole tile, each tile takes the smallest that
    holds its rows. Tiles lie BLOCK positions apart; with IS_REST, those of more than small_block
    rows are left to others. Copies bring UNIT granules at a time, 1 or 2. `two, eight, sixteen` are
    FACTORS.
    """
    NUM_COLUMNS: gl.constexpr = OUT // (64 if IS_GATE_UP else 128)
    STEPS: gl.constexpr = IN // 64 // PARTS
    gl.static_assert(STEPS * PARTS * 64 == IN and STEPS % 2 == 0)
    ROWS: gl.constexpr = SIZES[-1][0]
    chain.after_previous()
    item = gl.program_id(0) // PARTS
    part = gl.program_id(0) % PARTS
    tile, column, expert = item_of(item, tile_expert, num_tiles, NUM_COLUMNS, IS_REST)
    TOKENS: gl.constexpr = rows_of(64, num_warps)
    x_at = x + gl.arange(0, 64, layout=gl.SliceLayout(0, TOKENS)).expand_dims(0)
    x_at += part * (STEPS * 64)
    token = gl.arange(0, ROWS, layout=gl.SliceLayout(1, TOKENS))
    first = tile * BLOCK
    # before the tests, so that most tiles need not wait for the expert and their size
    first_at = token_at(num_tokens, rows, first + token, IN, SLOTS, IS_GATE_UP)
    size = size_of(rows, first, SIZES)
    chain.before_next()
    if expert >= 0:
        start = (expert * NUM_COLUMNS + column) * (IN // 64) + part * STEPS
        w_at = words + start * 512 + gl.arange(0, 512, layout=in_turn(2, num_warps))
        s_at = scales + start * 128 + gl.arange(0, 128, layout=in_turn(1, num_warps))
        factors = factors_of(global_scale, expert, IS_GATE_UP)
        for each in gl.static_range(len(SIZES)):
            if size == each:
                _tile(
                    x_at, num_tokens, (w_at, s_at, first_at), rows, first, factors, out, column,
                    (two, eight, sixteen), part, sums + item * (PARTS * 128 * ROWS), arrived + item,
                    OUT, IN, SLOTS, IS_GATE_UP, PARTS, ROWS, SIZES[each][0], SIZES[each][1], UNIT,
                    STAGES, IN_FLIGHT, PTX, num_warps,
                )  # fmt: skip


def grouped(
    x: Tensor, weights: Operand, grouping: Grouping, out: Tensor, *, is_gate_up: bool
) -> None:
    """Launch one grouped product."""
    tile = grouping.tile
    if not is_gate_up:
        tile = tile.down or replace(tile, parts=1)
    num_items = len(grouping.tile_expert) * weights.num_columns
    if not tile.is_persistent:
        sizes = _sizes(tile) | {"BLOCK": tile.block, "IS_REST": False}
        sizes |= _in_parts(x, weights, tile, num_items)
        programs = num_items * tile.parts
        _launch(grouped_product, programs, x, weights, grouping, tile, out, is_gate_up, sizes)
        return
    programs = min(num_items, grouping.num_cores)
    sizes = {"BM": tile.rows, "HAS_REST": tile.rest is not None}
    _launch(persistent_product, programs, x, weights, grouping, tile, out, is_gate_up, sizes)
    if tile.rest is not None:
        sizes = _sizes(tile.rest) | {"BLOCK": tile.block, "IS_REST": True}
        sizes |= _in_parts(x, weights, tile.rest, num_items)
        most = max_small_tiles(len(weights.global_scale), tile.block, tile.small_block)
        programs = min(num_items, most * weights.num_columns)
        _launch(grouped_product, programs, x, weights, grouping, tile.rest, out, is_gate_up, sizes)


def _sizes(tile: TileShape) -> dict[str, Any]:
    unit = tile.columns // GRANULE_COLUMNS
    return {"SIZES": tile.sizes, "UNIT": unit, "IN_FLIGHT": tile.in_flight}


def _in_parts(x: Tensor, weights: Operand, tile: TileShape, num_items: int) -> dict[str, Any]:
    """What the programs of one item share; without parts, nothing that they read."""
    if tile.parts == 1:
        return {"PARTS": 1, "sums": weights.global_scale, "arrived": weights.global_scale}
    assert weights.arrived is not None
    assert num_items <= len(weights.arrived)
    size = num_items * tile.parts * TILE_ROWS * tile.rows
    sums = x.new_empty(size, dtype=torch.float32)
    return {"PARTS": tile.parts, "sums": sums, "arrived": weights.arrived}


def _launch(
    kernel: Any,
    num_programs: int,
    x: Tensor,
    weights: Operand,
    grouping: Grouping,
    tile: TileShape,
    out: Tensor,
    is_gate_up: bool,
    sizes: dict[str, Any],
) -> None:
    tile = fitted(tile, weights.granules, grouping.capability, weights.is_packed)
    kernel[(num_programs,)](
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
        STAGES=tile.stages,
        PTX=decode_ptx(has_bf16_mul=True, by_multiplying=True),
        num_warps=tile.warps,
        **chain.options(),
        maxnreg=tile.max_registers,
        **sizes,
    )


def is_whole(operand: Operand, tile: TileShape) -> bool:
    """Can the loops take it: packed, whole tiles, an even number of steps that fill the ring?"""
    if any(other and not is_whole(operand, other) for other in (tile.down, tile.rest)):
        return False
    ahead = tile.stages if tile.is_persistent else tile.stages - 1
    return (
        operand.is_packed
        and operand.features % operand.features_per_tile == 0
        and operand.width % (2 * GRANULE_COLUMNS * tile.parts) == 0
        and operand.width >= ahead * tile.columns * tile.parts
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
    num_slots = ids.numel()
    tile = tile_for(num_slots, weight.num_routed, GLUON_TILES)
    if not (is_whole(weight.gate_up, tile) and is_whole(weight.down, tile)):
        return None
    in_parts = replace(tile, parts=_parts(num_slots, weight, tile))
    return in_parts if is_whole(weight.gate_up, in_parts) else tile


def _parts(num_slots: int, weight: GroupedExperts, tile: TileShape) -> int:
    """How many programs share a tile of gate and up: several where too few tiles are in use."""
    columns, arrived = weight.gate_up.num_columns, weight.gate_up.arrived
    num_tiles = max_tiles(num_slots, weight.num_experts, tile.small_block)
    if tile.more_rows or arrived is None or num_tiles * columns > len(arrived):
        return 1
    return parts_for(experts_used(num_slots, weight.num_experts, weight.num_routed) * columns)


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
