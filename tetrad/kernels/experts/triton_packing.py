"""`packing.py` in one launch: a program reads one granule's codes and scales and writes its words.

The plain version moves every code several times through memory.
"""

from __future__ import annotations

import torch

from tetrad.formats.weights import Nvfp4Weight
from tetrad.kernels.experts import packing
from tetrad.kernels.experts.packing import (
    BLOCK_ROWS,
    GRANULE_COLUMNS,
    HIGH,
    LOW,
    MIDDLE,
    PLAIN_PLACES,
    SCALE_NAN,
    SCALES_PER_GRANULE,
    SIGN,
    TAIL_PLACES,
    UNSCALE,
    WORDS_PER_GRANULE,
    PackedMatrix,
)
from tetrad.kernels.triton_support import constexpr, jit, tl

_BOTH_PLACES = (*PLAIN_PLACES, *(places for both in TAIL_PLACES for places in both))
PLACES = tuple(places.get(bit, -1) for places in _BOTH_PLACES for bit in (SIGN, HIGH, MIDDLE, LOW))
"""Four to a table: three plain ones, then even and odd word of the even, of the odd step's tail."""
NAN_BYTE = constexpr(SCALE_NAN)


@jit()
def _spread(code_bytes):
    """int32: the two codes of a byte at bits 0 and 16."""
    code = code_bytes.to(tl.int32)
    return (code & 15) | ((code >> 4) << 16)


@jit()
def _moved(
    codes, SIGN: tl.constexpr, HIGH: tl.constexpr, MIDDLE: tl.constexpr, LOW: tl.constexpr
):  # fmt: skip
    """Both codes with their bits at other places of each half; -1: the bit is left out."""
    moved = codes * 0
    if SIGN >= 0:
        moved |= ((codes >> 3) & 0x00010001) << SIGN
    if HIGH >= 0:
        moved |= ((codes >> 2) & 0x00010001) << HIGH
    if MIDDLE >= 0:
        moved |= ((codes >> 1) & 0x00010001) << MIDDLE
    if LOW >= 0:
        moved |= (codes & 0x00010001) << LOW
    return moved


@jit()
def _signed(code_bytes, scale):
    """Two codes times the sign (1, 0 or -1) of their scale."""
    flipped = code_bytes ^ ((scale >> 7) * 0x88)
    return tl.where((scale & 0x7F) != 0, flipped, 0)


@jit()
def _scale_byte(scale):
    """E5M3 of an e4m3 byte, see `packing.scale_bytes`."""
    size = scale & 0x7F
    small = tl.where(size < 4, 112 | ((size << 2) & 7), 120 | ((size << 1) & 7))
    small = tl.where(size < 2, 104, small)
    return tl.where(size == 0x7F, NAN_BYTE, tl.where(size < 8, small, size + 120))


@jit()
def _codes_at(codes, scales, expert, row, group, byte, rows, COLUMNS: tl.constexpr):
    """int32, signed and spread: a byte of a row's 16-column group."""
    here = (row < rows) & (group * 16 < COLUMNS)
    at = (expert * rows + row) * (COLUMNS // 16) + group
    code = tl.load(codes + at * 8 + byte, mask=here, other=0)
    scale = tl.load(scales + at, mask=here, other=0)
    return _spread(_signed(code.to(tl.int32), scale.to(tl.int32)))


@jit()
def _store_scales(
    target, first_scales, second_scales, expert, first_row, first_group, rows,
    COLUMNS: tl.constexpr, ROWS_OF_BLOCK: tl.constexpr,
):  # fmt: skip
    """The scales of a granule: block, g, k32."""
    lane = tl.arange(0, 128)
    near_row = first_row + lane // 16 * ROWS_OF_BLOCK + lane // 2 % 8
    packed = lane * 0
    for place in tl.static_range(4):
        group = first_group + lane % 2 * 2 + place % 2
        row = near_row + place // 2 * (ROWS_OF_BLOCK - 8)
        at = (expert * rows + row) * (COLUMNS // 16) + group
        here = (row < rows) & (group * 16 < COLUMNS)
        if place < 2:
            scale = tl.load(first_scales + at, mask=here, other=0)
        else:
            scale = tl.load(second_scales + at, mask=here, other=0)
        packed |= _scale_byte(scale.to(tl.int32)) << (8 * place)
    tl.store(target + lane, packed)


@jit()
def pack_kernel(
    first_codes,
    second_codes,
    first_scales,
    second_scales,
    words,
    packed_scales,
    rows,
    COLUMNS: tl.constexpr,
    GRANULES: tl.constexpr,
    ROWS_OF_BLOCK: tl.constexpr,
    P: tl.constexpr,
):
    """Program (granule, tile, expert). ROWS_OF_BLOCK of every matrix go into a block of 16: 8 where
    `second` is another matrix than `first`. P is PLACES."""
    granule, tile, expert = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    number = (expert * tl.num_programs(1) + tile) * GRANULES + granule

    # word: block, g, t, k32
    lane = tl.arange(0, 512)
    t, k32 = lane // 2 % 4, lane % 2
    first_row = tile * 8 * ROWS_OF_BLOCK
    near_row = first_row + lane // 64 * ROWS_OF_BLOCK + lane // 8 % 8
    far_row = near_row + (ROWS_OF_BLOCK - 8)
    low = lane * 0
    high = low
    for k16 in tl.static_range(2):
        group = granule * 4 + k32 * 2 + k16
        for pair in tl.static_range(4):
            # (row g, near), (row g + 8, near), (row g, far), (row g + 8, far)
            byte = t + 4 * (pair // 2)
            if pair % 2 == 0:
                codes = _codes_at(
                    first_codes, first_scales, expert, near_row, group, byte, rows, COLUMNS
                )
            else:
                codes = _codes_at(
                    second_codes, second_scales, expert, far_row, group, byte, rows, COLUMNS
                )
            if pair == 3:
                low |= _moved(
                    codes, P[12 + 8 * k16], P[13 + 8 * k16], P[14 + 8 * k16], P[15 + 8 * k16]
                )
                high |= _moved(
                    codes, P[16 + 8 * k16], P[17 + 8 * k16], P[18 + 8 * k16], P[19 + 8 * k16]
                )
            elif k16 == 0:
                low |= _moved(codes, P[4 * pair], P[4 * pair + 1], P[4 * pair + 2], P[4 * pair + 3])
            else:
                high |= _moved(
                    codes, P[4 * pair], P[4 * pair + 1], P[4 * pair + 2], P[4 * pair + 3]
                )
    both = low.to(tl.uint32).to(tl.int64) | (high.to(tl.uint32).to(tl.int64) << 32)
    tl.store(words + number * 512 + lane, both)

    _store_scales(
        packed_scales + number * 128, first_scales, second_scales, expert, first_row, granule * 4,
        rows, COLUMNS, ROWS_OF_BLOCK,
    )  # fmt: skip


def pack(parts: tuple[Nvfp4Weight, ...]) -> PackedMatrix:
    """`packing.pack`, and that function itself where Triton cannot run."""
    if parts[0].device.type != "cuda":
        return packing.pack(parts)
    return launch(parts)


def launch(parts: tuple[Nvfp4Weight, ...]) -> PackedMatrix:
    """One stack, or gate and up joined."""
    num_experts, rows, columns = parts[0].shape
    device, first, second = parts[0].device, parts[0], parts[-1]
    tiles, granules = packing.num_tiles(rows, len(parts)), -(-columns // GRANULE_COLUMNS)
    shape = (num_experts, tiles, granules)
    words = torch.empty(*shape, WORDS_PER_GRANULE, dtype=torch.int64, device=device)
    scales = torch.empty(*shape, SCALES_PER_GRANULE, dtype=torch.int32, device=device)
    pack_kernel[(granules, tiles, num_experts)](
        first.codes.contiguous(),
        second.codes.contiguous(),
        first.scales.contiguous().view(torch.uint8),
        second.scales.contiguous().view(torch.uint8),
        words,
        scales,
        rows,
        columns,
        granules,
        BLOCK_ROWS // len(parts),
        PLACES,
    )
    together = torch.stack([part.global_scale for part in parts], dim=1)
    return PackedMatrix(words, scales, together * UNSCALE)
