"""Routed experts in four bits on both sides, on Blackwell's tensor cores.

A grouped product as in `triton.py`: one program computes one tile of 128 weight rows for one tile
of token rows that all chose the same expert; the weights are the left operand. `tl.dot_scaled`
becomes the instruction that multiplies NVFP4 by NVFP4 with a scale for each 16 values
(kind::mxf4nvf4: tcgen05.mma on capability 10, mma.sync on 12). Nothing is decoded; what is left is
to round rows before each product (`triton_quantize.py`) and to multiply by their global scales
after it.

Compiled for 10.0, 10.3, 12.0 and 12.1, run on none of them.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tetrad.core.hardware import DeviceSnapshot
from tetrad.formats.weights import HoldsTensors
from tetrad.kernels import triton_support
from tetrad.kernels.backend import Backend
from tetrad.kernels.experts import reference
from tetrad.kernels.experts.check_w4a4 import rounding
from tetrad.kernels.experts.fp4_tiles import (
    GROUP_ROWS,
    STEP_COLUMNS,
    TILE_ROWS,
    Fp4Operand,
    Fp4Tile,
    issued_flops,
    operand,
    tile_for,
)
from tetrad.kernels.experts.nvfp4_stacks import NOT_RUN, accepted
from tetrad.kernels.experts.reference import DenseExperts, StoredExperts
from tetrad.kernels.experts.triton_quantize import RoundedRows, quantize_rows
from tetrad.kernels.experts.weights import ExpertWeights
from tetrad.kernels.reduce_experts import triton as reduce_experts
from tetrad.kernels.sort_tokens import triton as sort_tokens
from tetrad.kernels.triton_support import constexpr, jit, tl

CAPABILITIES = ((10, 0), (10, 3), (12, 0), (12, 1))
"""Where the instruction was seen in what Triton compiles."""
FROM_TRITON_3_9 = ((12, 1),)
"""Triton 3.6 ends in an assertion there; 3.9 does not. What lies between was not tried."""


ROWS = constexpr(TILE_ROWS)
STEP = constexpr(STEP_COLUMNS)
GROUP = constexpr(GROUP_ROWS)


@dataclass(frozen=True, eq=False)
class Fp4Experts(HoldsTensors):
    """The experts of one layer, in tiles."""

    gate_up: Fp4Operand
    down: Fp4Operand
    num_experts: int


Prepared = Fp4Experts | DenseExperts | StoredExperts


def why_not(device: DeviceSnapshot) -> str | None:
    """None, or why the kernels cannot run on `device`, and what would cure it."""
    if (reason := triton_support.why_not(device)) is not None:
        return reason
    found = device.compute_capability
    assert found is not None
    if found not in CAPABILITIES:
        *most, last = (f"{a}.{b}" for a, b in CAPABILITIES)
        return (
            f"needs compute capability {', '.join(most)} or {last} (Blackwell), this GPU has "
            f"{found[0]}.{found[1]}; 'triton' is for every GPU from 8.0 on"
        )
    if found in FROM_TRITON_3_9 and _triton_version() < (3, 9):
        return (
            f"Triton {'.'.join(map(str, _triton_version()))} does not compile it for compute "
            f'capability {found[0]}.{found[1]}; `pip install "triton>=3.9,<4"` does'
        )
    return None


def _triton_version() -> tuple[int, int]:
    major, minor = importlib.metadata.version("triton").split(".")[:2]
    return int(major), int(minor)


def prepare(weight: ExpertWeights, dtype: torch.dtype) -> Prepared:
    """Lay out a layer's experts. What is not accepted stays with the plain torch backend."""
    stacks = accepted(weight, dtype, (1, 1))
    if stacks is None:
        return reference.prepare(weight, dtype)
    return Fp4Experts(operand(stacks.gate, stacks.up), operand(stacks.down), weight.num_experts)


@jit()
def _decoded(codes, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """fp32 [ROWS, COLUMNS] of codes and scales: what the instruction reads."""
    code = tl.join(codes & 15, codes >> 4).reshape(ROWS, COLUMNS).to(tl.int32)
    exponent = (code >> 1) & 3
    mantissa = code & 1
    halves = tl.where(exponent == 0, mantissa, (2 + mantissa) << tl.maximum(exponent - 1, 0))
    value = tl.where(code < 8, halves, -halves).to(tl.float32) * 0.5
    wide = scales.to(tl.float32)[:, :, None].broadcast_to(ROWS, COLUMNS // 16, 16)
    return value * wide.reshape(ROWS, COLUMNS)


@jit()
def _product(
    codes, scales, x_codes, x_scales, tile, source,
    WIDTH: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, IS_NATIVE: tl.constexpr,
):  # fmt: skip
    """fp32 [128, BM]: a tile of weights times token rows, without their global scales."""
    STEPS: tl.constexpr = WIDTH // STEP
    BYTES: tl.constexpr = STEP // 2
    BLOCKS: tl.constexpr = STEP // 16
    row = tl.arange(0, ROWS)[:, None]
    byte = tl.arange(0, BYTES)[None, :]
    block = tl.arange(0, BLOCKS)[None, :]
    w_at = codes + tile * (STEPS * ROWS * BYTES) + row * BYTES + byte
    s_at = scales + tile * (STEPS * ROWS * BLOCKS) + row * BLOCKS + block
    x_at = x_codes + source[:, None] * (WIDTH // 2) + byte
    f_at = x_scales + source[:, None] * (WIDTH // 16) + block
    acc = tl.zeros((ROWS, BM), tl.float32)
    for _ in tl.range(0, STEPS, num_stages=STAGES):
        w = tl.load(w_at)
        s = tl.load(s_at)
        x = tl.load(x_at)
        f = tl.load(f_at)
        if IS_NATIVE:
            acc = tl.dot_scaled(w, s, "e2m1", x.trans(), f, "e2m1", acc)
        else:
            right = _decoded(x, f, BM, STEP).trans()
            acc = tl.dot(_decoded(w, s, ROWS, STEP), right, acc, input_precision="ieee")
        w_at += ROWS * BYTES
        s_at += ROWS * BLOCKS
        x_at += BYTES
        f_at += BLOCKS
    return acc


@jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["tile_expert"])
def fp4_product(
    x_codes, x_scales, x_factor, codes, scales, global_scale, rows, tile_expert, out, num_rows,
    OUT: tl.constexpr, WIDTH: tl.constexpr, NUM_COLUMNS: tl.constexpr, SLOTS: tl.constexpr,
    IS_GATE_UP: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, IS_NATIVE: tl.constexpr,
):  # fmt: skip
    """One product of all experts, with what follows it.

    gate_up: rounded rows [T] are read at row // SLOTS; out [positions, OUT] is silu(gate) * up.
    down: rounded rows [positions] are read in order; out [T * SLOTS, OUT] is written at the row.
    """
    FEATURES: tl.constexpr = ROWS // 2 if IS_GATE_UP else ROWS
    item = tl.program_id(0)
    token_tile = item // NUM_COLUMNS
    column = item % NUM_COLUMNS
    expert = tl.load(tile_expert + token_tile).to(tl.int64)
    position = token_tile * BM + tl.arange(0, BM)
    row = tl.load(rows + position)
    if expert >= 0:
        # padding reads some token or other
        spread = tl.where(row >= 0, row // SLOTS, position % num_rows)
        source = (spread if IS_GATE_UP else position).to(tl.int64)
        factor = tl.load(x_factor + source)[None, :]
        tile = expert * NUM_COLUMNS + column
        acc = _product(
            codes, scales, x_codes, x_scales, tile, source, WIDTH, BM, STAGES, IS_NATIVE
        )  # fmt: skip
        if IS_GATE_UP:
            groups = acc.reshape(FEATURES // GROUP, 2, GROUP, BM)
            gate, up = groups.permute(0, 2, 3, 1).split()
            gate = gate.reshape(FEATURES, BM) * (tl.load(global_scale + expert * 2) * factor)
            up = up.reshape(FEATURES, BM) * (tl.load(global_scale + expert * 2 + 1) * factor)
            y = gate / (1.0 + tl.exp(-gate)) * up
        else:
            y = acc * (tl.load(global_scale + expert) * factor)
        target = position if IS_GATE_UP else row
        feature = column * FEATURES + tl.arange(0, FEATURES)
        at = out + target.to(tl.int64)[:, None] * OUT + feature[None, :]
        mask = (row >= 0)[:, None] & (feature < OUT)[None, :]
        tl.store(at, y.trans().to(out.dtype.element_ty), mask=mask)


def launch(
    x: RoundedRows,
    weights: Fp4Operand,
    grouped: tuple[Tensor, Tensor],
    out: Tensor,
    tile: Fp4Tile,
    *,
    num_slots: int | None,
    is_native: bool,
) -> None:
    """Launch one product; `grouped` is rows and tile_expert of `sort_tokens`.

    With `num_slots` it is that of gate and up. Where not native, codes are decoded and multiplied
    in fp32.
    """
    rows, tile_expert = grouped
    fp4_product[(len(tile_expert) * weights.num_columns,)](
        x.codes,
        x.scales,
        x.row_scale,
        weights.codes,
        weights.scales,
        weights.global_scale,
        rows,
        tile_expert,
        out,
        len(x.codes),
        OUT=weights.features,
        WIDTH=weights.width,
        NUM_COLUMNS=weights.num_columns,
        SLOTS=num_slots or 1,
        IS_GATE_UP=num_slots is not None,
        BM=tile.rows,
        STAGES=tile.stages,
        IS_NATIVE=is_native,
        num_warps=tile.warps,
    )


def in_four_bits(
    x: Tensor,
    weight: Fp4Experts,
    routed: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    tile: Fp4Tile,
    *,
    is_native: bool = True,
) -> Tensor:
    """The experts' output [T, D]; `routed` is ids, slot weights, shared and residual."""
    ids, slot_weights, *added = routed
    num_tokens, num_slots = ids.shape
    ids = ids.contiguous()
    rows, tile_expert, _ = sort_tokens.run(ids, weight.num_experts, tile.rows, tile.rows)
    grouped = (rows, tile_expert)
    hidden = x.new_empty(len(rows), weight.gate_up.features)
    four_bit = quantize_rows(x.contiguous(), weight.gate_up.width)
    launch(
        four_bit, weight.gate_up, grouped, hidden, tile, num_slots=num_slots, is_native=is_native
    )
    by_slot = x.new_empty(num_tokens * num_slots, weight.down.features)
    four_bit = quantize_rows(hidden, weight.down.width, rows)
    launch(four_bit, weight.down, grouped, by_slot, tile, num_slots=None, is_native=is_native)
    shared, residual = (rows if rows is None else rows.contiguous() for rows in added)
    return reduce_experts.run(by_slot, ids, slot_weights.contiguous(), shared, residual)


def run(
    x: Tensor,
    weight: Prepared,
    ids: Tensor,
    slot_weights: Tensor,
    shared: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:
    """Sort, round, product, round, product, weighted sum: six launches."""
    if not isinstance(weight, Fp4Experts):
        return reference.run(x, weight, ids, slot_weights, shared, residual)
    routed = (ids, slot_weights, shared, residual)
    return in_four_bits(x, weight, routed, _tile(ids, weight))


def _tile(ids: Tensor, weight: Fp4Experts) -> Fp4Tile:
    capability = torch.cuda.get_device_capability(ids.device)
    return tile_for(ids.numel(), weight.num_experts, capability)


def issued(arguments: Mapping[str, Any]) -> float | None:
    """Of a call with these arguments; None where plain torch computes it."""
    ids, weight = arguments["ids"], arguments["weight"]
    if not isinstance(weight, Fp4Experts):
        return None
    tile = _tile(ids, weight)
    return issued_flops(ids, (weight.gate_up, weight.down), weight.num_experts, tile)


BACKEND = Backend(
    "triton_fp4", run, why_not, prepare, issued, rounding=rounding(None), note=NOT_RUN
)
