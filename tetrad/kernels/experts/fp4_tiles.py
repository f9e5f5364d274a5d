"""Experts' weights in the tiles of `triton_fp4.py`, and how many tokens a tile of rows has."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tetrad.core.errors import UnsupportedError
from tetrad.formats.weights import NVFP4_BLOCK, HoldsTensors, Nvfp4Weight
from tetrad.kernels.experts.tiles import Capability, shared_bytes_of

TILE_ROWS = 128
"""Matrix rows of a tile. Fewer, and Triton multiplies in bfloat16 on capability 10."""
STEP_COLUMNS = 256
"""Columns of a step: 128 bytes of codes a row, the width that shared memory is built for."""
GROUP_ROWS = 8
"""Gate and up alternate by so many rows, as in `packing.py`: both halves of a feature meet in a
thread."""
MIN_STAGES = 2
SLACK_BYTES = 64
"""Barriers."""


@dataclass(frozen=True, eq=False)
class Fp4Operand(HoldsTensors):
    """The weights of one product of all experts; sizes are filled up with zeros to whole tiles."""

    codes: Tensor
    """uint8 [E, columns of tiles, steps, 128, 128]: two codes a byte"""
    scales: Tensor
    """float8_e4m3fn [E, columns of tiles, steps, 128, 16], none negative"""
    global_scale: Tensor
    """float32 [E, parts]"""
    features: int
    """Output features of a row: F for gate and up together, D for down."""

    @property
    def num_columns(self) -> int:
        """Weight tiles of one expert."""
        return self.codes.shape[1]

    @property
    def width(self) -> int:
        """Columns, filled up to whole steps."""
        return self.codes.shape[2] * STEP_COLUMNS


@dataclass(frozen=True, slots=True)
class Fp4Tile:
    """How one program works."""

    rows: int
    """Token rows, all for one expert: a power of two from 16."""
    stages: int = 3
    warps: int = 4

    @property
    def shared_bytes(self) -> int:
        """Shared memory that Triton takes at most: the steps in flight but one, or the results
        while they are turned around."""
        a_row = STEP_COLUMNS // 2 + STEP_COLUMNS // NVFP4_BLOCK
        pipeline = (self.stages - 1) * (TILE_ROWS + self.rows) * a_row
        return max(pipeline, TILE_ROWS * self.rows * 4) + SLACK_BYTES


TILES: tuple[tuple[float, Fp4Tile], ...] = (
    (13, Fp4Tile(rows=16)),
    (26, Fp4Tile(rows=32)),
    (80, Fp4Tile(rows=64)),
    (math.inf, Fp4Tile(rows=128, warps=8)),
)
"""Mean tokens of an expert up to which a tile serves. Compiled for capability 10 and 12, measured
nowhere: the limits are those of `TRITON_OTHER_TILES`."""


def tile_for(num_slots: int, num_experts: int, capability: Capability) -> Fp4Tile:
    """The tile for a step whose `num_slots` token slots spread over `num_experts` experts."""
    mean = num_slots / num_experts
    return fitted(next(tile for limit, tile in TILES if mean <= limit), capability)


def fitted(tile: Fp4Tile, capability: Capability) -> Fp4Tile:
    """`tile` with as many stages as the device has room for.

    Raises UnsupportedError when even MIN_STAGES do not fit.
    """
    limit = shared_bytes_of(capability)
    for stages in range(tile.stages, MIN_STAGES - 1, -1):
        if (found := replace(tile, stages=stages)).shared_bytes <= limit:
            return found
    raise UnsupportedError(
        f"A tile of {tile.rows} tokens in four bits needs {found.shared_bytes} bytes of shared "
        f"memory, and a GPU of capability {capability[0]}.{capability[1]} has {limit}; a smaller "
        f"tile fits."
    )


def issued_flops(
    ids: Tensor, operands: tuple[Fp4Operand, ...], num_experts: int, tile: Fp4Tile
) -> float:
    """Floating-point operations of the products of a step, padding included."""
    counts = ids[ids >= 0].bincount(minlength=num_experts)
    num_rows = int((-(-counts // tile.rows) * tile.rows).sum())
    return num_rows * sum(2.0 * part.num_columns * TILE_ROWS * part.width for part in operands)


def operand(*parts: Nvfp4Weight) -> Fp4Operand:
    """Gate and up, or down alone, in tiles."""
    features = parts[0].shape[1]
    codes = _rows_of_tiles([part.codes for part in parts])
    scales = _rows_of_tiles([part.scales.view(torch.uint8) for part in parts])
    return Fp4Operand(
        _in_steps(codes, STEP_COLUMNS // 2),
        _in_steps(scales, STEP_COLUMNS // NVFP4_BLOCK).view(torch.float8_e4m3fn),
        torch.stack([part.global_scale for part in parts], dim=1),
        features,
    )


def _rows_of_tiles(parts: list[Tensor]) -> Tensor:
    """Parts [E, M, n] as [E, tiles, 128, n], rows of two parts alternating by GROUP_ROWS."""
    per_tile = TILE_ROWS // len(parts)
    missing = -parts[0].shape[1] % per_tile
    whole = [torch.nn.functional.pad(part, (0, 0, 0, missing)) for part in parts]
    experts, _, columns = whole[0].shape
    groups = [part.view(experts, -1, GROUP_ROWS, columns) for part in whole]
    return torch.stack(groups, dim=2).view(experts, -1, TILE_ROWS, columns)


def _in_steps(rows: Tensor, columns: int) -> Tensor:
    """[E, tiles, 128, n] as [E, tiles, steps, 128, columns]."""
    whole = torch.nn.functional.pad(rows, (0, -rows.shape[3] % columns))
    steps = whole.view(*rows.shape[:3], -1, columns)
    return steps.transpose(2, 3).contiguous()
