"""Which tile of tokens a step gets: a table of what was measured, and what fits the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tetrad.core.errors import UnsupportedError
from tetrad.kernels.experts.packing import GRANULE_COLUMNS, TILE_ROWS

Capability = tuple[int, int]

SHARED_BYTES: Mapping[Capability, int] = {
    (8, 0): 163 << 10,
    (8, 7): 163 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (10, 3): 227 << 10,
    (11, 0): 227 << 10,
}
"""Shared memory that one program may have, by compute capability (CUDA C++ Programming Guide,
"Technical Specifications per Compute Capability")."""
SMALLEST_SHARED_BYTES = 99 << 10
"""What every other GPU from Ampere on has: 8.6, 8.9, 12.0, 12.1."""
MIN_STAGES = 2
SCRATCH_BYTES = 8 << 10
"""For turning results around while the buffers of the loop are still in use."""
HOPPER = 9


@dataclass(frozen=True, slots=True)
class TileShape:
    """How one program of `grouped_product` works."""

    rows: int
    """Token rows of a tile, all for one expert: a power of two from 16."""
    columns: int
    """Columns of weights and tokens per step of the loop: a multiple of GRANULE_COLUMNS."""
    stages: int
    """Steps in flight between memory and the tensor cores."""
    warps: int = 4
    max_registers: int | None = None
    """Per thread, where fewer registers let another program onto the multiprocessor."""
    in_flight: int = 1
    """Steps whose wgmma go on while the next weights are decoded: 1, or 0 to need fewer registers.
    Always 0 in `triton.py` and 1 in a persistent tile."""
    more_rows: int = 0
    """Rows that a second accumulator adds; none in `triton.py`."""
    smaller: tuple[tuple[int, int], ...] = ()
    """(rows, more_rows) for tiles that an expert fills in part, by rising sum. Every tile takes the
    smallest that holds its rows; in `triton.py` all take the whole."""
    parts: int = 1
    """Programs that share the columns of one tile of weights; not in `triton.py`."""
    down: TileShape | None = None
    """How down is computed, where that is not the way of gate and up; of the same block."""
    rest: TileShape | None = None
    """How experts are computed that would leave too much of their tiles empty: see `sort_tokens`.
    Only for a persistent tile."""
    is_persistent: bool = False
    """One program per multiprocessor takes item after item; not in `triton.py`."""

    @property
    def block(self) -> int:
        """Token rows of a tile, those of the second accumulator included."""
        return self.rows + self.more_rows

    @property
    def small_block(self) -> int:
        """Token rows of a tile of `rest`."""
        return self.block if self.rest is None else self.rest.block

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """(rows, more_rows) that a tile may have, by rising sum."""
        return (*self.smaller, (self.rows, self.more_rows))

    def shared_bytes(self, capability: Capability, is_packed: bool) -> int:
        """Shared memory that Triton takes at most.

        Before and after Hopper the decoded weights pass through shared memory too.
        """
        tokens = self.block * self.columns * 2
        decoded = TILE_ROWS * self.columns * 2
        packed = self.columns * (TILE_ROWS // 2 + TILE_ROWS // 16)
        on_hopper = capability[0] == HOPPER
        if not is_packed:
            pipeline = self.stages * (decoded + tokens)
        elif on_hopper:
            pipeline = self.stages * (packed + tokens) + SCRATCH_BYTES
        else:
            pipeline = (self.stages - 1) * (packed + tokens) + decoded + tokens
        return max(pipeline, TILE_ROWS * self.rows * 4)


def shared_bytes_of(capability: Capability) -> int:
    """Shared memory that one program may have on a device."""
    return SHARED_BYTES.get(capability, SMALLEST_SHARED_BYTES)


Tiles = tuple[tuple[float, TileShape], ...]
"""Mean tokens of an expert up to which a tile is best, by rising mean; the last has no limit."""

TRITON_HOPPER_TILES: Tiles = (
    (13, TileShape(rows=16, columns=128, stages=4)),
    (26, TileShape(rows=32, columns=128, stages=4)),
    (80, TileShape(rows=64, columns=64, stages=4)),
    (math.inf, TileShape(rows=128, columns=64, stages=3)),
)
"""Measured on an H200 with GLM-5's widths, 32 experts and random routing, as GLUON_TILES."""
TRITON_OTHER_TILES: Tiles = (
    (13, TileShape(rows=16, columns=64, stages=4)),
    (26, TileShape(rows=32, columns=64, stages=4)),
    (80, TileShape(rows=64, columns=64, stages=4)),
    (math.inf, TileShape(rows=128, columns=64, stages=3, warps=8)),
)
"""Compiled for compute capability 8.0, 10.0 and 12.0, run on none of them."""
_UP_TO_64 = ((16, 0), (32, 0), (32, 16))
_UP_TO_96 = (*_UP_TO_64, (64, 0), (64, 16))
_TO_144 = TileShape(128, 64, 4, more_rows=16, smaller=((64, 0), (64, 32), (128, 0)))
GLUON_TILES: Tiles = (
    (
        12,
        TileShape(
            16, 128, 4, smaller=((8, 0),),
            down=TileShape(16, 128, 3, smaller=((8, 0),), in_flight=0),
        ),
    ),
    (20, TileShape(32, 128, 3, smaller=((16, 0),))),
    (
        36,
        TileShape(
            32, 128, 3, more_rows=16, smaller=((8, 0), (16, 0), (32, 0)),
            down=TileShape(
                32, 64, 4, more_rows=16, smaller=((16, 0), (32, 0)), in_flight=0, max_registers=128
            ),
        ),
    ),
    (
        56,
        TileShape(
            64, 128, 3, smaller=_UP_TO_64, in_flight=0,
            down=TileShape(64, 64, 4, smaller=_UP_TO_64, in_flight=0, max_registers=128),
        ),
    ),
    (
        96,
        TileShape(
            64, 128, 3, more_rows=32, smaller=_UP_TO_96,
            down=TileShape(
                64, 64, 4, more_rows=32, smaller=_UP_TO_96, in_flight=0, max_registers=168
            ),
        ),
    ),
    (215, _TO_144),
    (math.inf, TileShape(256, 64, 3, warps=8, is_persistent=True, rest=_TO_144)),
)  # fmt: skip
"""Measured on an H200, see docs/log.md: random routing counts, the same number of tokens for every
expert only where both agree. What leaves a third program on a multiprocessor is worth most for
down, whose tiles are short."""

GLUON_PARTS = ((240, 4), (300, 2))
"""Programs that whole tiles of gate and up would keep busy, up to which parts are better, and how
many. Measured on an H200: 192 programs take 49 µs, and 31 in four parts; 256 take 42, and 39 in
two; from 512 on parts cost 3 to 5 %."""


def triton_tiles(capability: Capability) -> Tiles:
    """The table of `triton.py` for a device."""
    return TRITON_HOPPER_TILES if capability[0] == HOPPER else TRITON_OTHER_TILES


def fitted(shape: TileShape, granules: int, capability: Capability, is_packed: bool) -> TileShape:
    """`shape` with as many stages as the device has room for, and columns that divide the matrix.

    Raises UnsupportedError when even MIN_STAGES do not fit.
    """
    if granules * GRANULE_COLUMNS % shape.columns:
        shape = replace(shape, columns=GRANULE_COLUMNS)
    limit = shared_bytes_of(capability)
    for stages in range(shape.stages, MIN_STAGES - 1, -1):
        shape = replace(shape, stages=stages)
        if shape.shared_bytes(capability, is_packed) <= limit:
            return shape
    needed = shape.shared_bytes(capability, is_packed)
    raise UnsupportedError(
        f"A tile of {shape.rows} tokens by {shape.columns} columns needs {needed} bytes of shared "
        f"memory, and a GPU of capability {capability[0]}.{capability[1]} has {limit}; a smaller "
        f"tile fits."
    )


def tile_for(num_slots: int, num_routed: int, tiles: Tiles) -> TileShape:
    """The tile for a step whose `num_slots` token slots spread over `num_routed` experts."""
    mean = num_slots / num_routed
    return next(tile for limit, tile in tiles if mean <= limit)


def experts_used(num_slots: int, num_experts: int, num_routed: int) -> float:
    """Experts of a rank's `num_experts` that random choices among `num_routed` use, on average."""
    return num_experts * (1 - (1 - 1 / num_routed) ** num_slots)


def parts_for(num_programs: float) -> int:
    """TileShape.parts for gate and up, whose whole tiles would keep so many programs busy."""
    return next((parts for limit, parts in GLUON_PARTS if num_programs <= limit), 1)
