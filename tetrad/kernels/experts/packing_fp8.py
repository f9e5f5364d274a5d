"""FP8 stacks in the order in which tensor cores eat them.

Tiles of 128 matrix rows, blocks of 16 and lanes are those of `packing.py`, but a granule has 32
columns, so that it takes as many bytes. A lane's 8 codes of 16 columns are one 64-bit word:

    words[expert, tile, granule, block of 16 rows, g, t, k16]    int64, 8 codes
    scales[expert, tile, block of 128 columns, part]             float32

The low and high 32 bits of a word belong to columns 2t, 2t + 1 and to 2t + 8, 2t + 9, the low and
high 16 bits of each to the even and the odd of the two. In those 16 bits, with s the sign, e the
exponent and m the mantissa of an e4m3 code, a of row g and b of row g + 8:

    bit   15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
          as b3 b2 b1 bs a7 a6 a5 a4 a3 a2 a1 b0 bm bm bm      a7..a1 = e3..e0 m2..m0 of row g
                                                               b3..b0 = e3..e0 of row g + 8

A mask alone leaves row g as a bfloat16 worth value * 2^-120, subnormals included; two shifts and
two masks leave row g + 8. A NaN has no such pattern: it makes the scale of its block NaN instead.

The scale of a block belongs to the accumulator, in fp32. A scale for a whole matrix becomes one for
each of its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tetrad.formats.weights import (
    FP8_BLOCK,
    Fp8BlockWeight,
    Fp8TensorWeight,
    HoldsTensors,
    block_grid,
)
from tetrad.kernels.experts.packing import BLOCK_ROWS, TILE_ROWS, num_tiles

GRANULE_COLUMNS = 32
WORDS_PER_GRANULE = TILE_ROWS * GRANULE_COLUMNS // 8
NAN = 0x7F
"""Magnitude bits of the codes that are no numbers."""

Fp8Weight = Fp8BlockWeight | Fp8TensorWeight


@dataclass(frozen=True, eq=False)
class PackedFp8(HoldsTensors):
    """A stack of experts' matrices, one tile order for all devices."""

    words: Tensor
    """int64 [E, tiles, granules, WORDS_PER_GRANULE]; columns are filled up to whole scale blocks"""
    scales: Tensor
    """float32 [E, tiles, blocks of columns, parts]; two parts (gate, up) or one"""


def pack_fp8(parts: tuple[Fp8Weight, ...]) -> PackedFp8:
    """One stack, or gate and up joined: rows g of a block are then gate's, rows g + 8 up's.

    Rows and columns are filled up with zeros to whole tiles and scale blocks. Works on the device
    of the weights, one expert at a time.
    """
    num_experts, rows, columns = parts[0].shape
    tiles, blocks = num_tiles(rows, len(parts)), block_grid(rows, columns)[1]
    granules = blocks * FP8_BLOCK // GRANULE_COLUMNS
    device = parts[0].device
    words = torch.empty(
        num_experts, tiles, granules, WORDS_PER_GRANULE, dtype=torch.int64, device=device
    )
    scales = torch.empty(num_experts, tiles, blocks, len(parts), device=device)
    for expert in range(num_experts):
        _pack_words([part.data[expert] for part in parts], words[expert])
        for number, part in enumerate(parts):
            scales[expert, ..., number] = _tile_scales(part, expert, tiles, len(parts))
    return PackedFp8(words, scales)


def _pack_words(parts: list[Tensor], words: Tensor) -> None:
    """e4m3 [rows, columns] of each part into int64 [tiles, granules, 512]."""
    tiles, granules, _ = words.shape
    blocks, share = tiles * TILE_ROWS // BLOCK_ROWS, BLOCK_ROWS // len(parts)
    rows, width = blocks * share, granules * GRANULE_COLUMNS
    filled = [
        functional.pad(part.view(torch.uint8), (0, width - part.shape[1], 0, rows - part.shape[0]))
        for part in parts
    ]
    joined = torch.cat([part.view(blocks, share, width) for part in filled], dim=1)
    # tile, 16-row block, row half, g | granule, k16, k half, t, parity
    fields = joined.view(tiles, 8, 2, 8, granules, 2, 2, 4, 2)
    # tile, granule, block, g, t, k16, k half, parity; one tensor a row half
    near, far = fields.permute(2, 0, 4, 1, 3, 7, 5, 6, 8).to(torch.int16)
    packed = (near & 0x80) << 8 | (near & 0x7F) << 4
    packed |= (far & 0x80) << 4 | (far & 0x70) << 8 | far & 0x0F
    words.copy_(packed.reshape(-1).view(torch.int64).view_as(words))


def _tile_scales(stack: Fp8Weight, expert: int, tiles: int, num_parts: int) -> Tensor:
    """float32 [tiles, blocks of columns]: the scale that each tile meets in each block."""
    codes = stack.data[expert].view(torch.uint8)
    rows, columns = codes.shape
    grid = block_grid(rows, columns)
    filled = functional.pad(codes, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    by_block = (filled & NAN).view(grid[0], FP8_BLOCK, grid[1], FP8_BLOCK)
    is_nan = by_block.amax(dim=(1, 3)) == NAN
    if isinstance(stack, Fp8BlockWeight):
        scales = stack.scale_inv[expert]
    else:
        scales = stack.scale[expert].expand(grid)
    return scales.masked_fill(is_nan, torch.nan).repeat_interleave(num_parts, dim=0)[:tiles]
