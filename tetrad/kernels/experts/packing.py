"""NVFP4 stacks in the order in which tensor cores eat them.

A tile is 128 matrix rows; a granule is 64 columns of a tile, and granules of a tile follow one
another. Inside a granule lie eight blocks of 16 rows. In each, lane l = 4 g + t of a warp owns rows
g and g + 8 and, of every 16 columns, 2t, 2t + 1, 2t + 8 and 2t + 9: the left fragment of wgmma
m64k16 and of mma.sync m16n8k16. Its 32 codes of one granule are 16 consecutive bytes:

    words[expert, tile, granule, block of 16 rows, g, t, k32]      int64, 16 codes: two k16 steps
    scales[expert, tile, granule, block of 16 rows, g, k32]        int32, 4 scales

The low and high 32 bits of a word belong to the even and odd k16 step, the low and high 16 bits of
each to columns 2t and 2t + 1. In those 16 bits, with s the sign and m2 m1 m0 the magnitude of a
code, and with the code of row g + 8 and the far columns (2t + 8, 2t + 9) called a in the even step
and b in the odd one:

    bit          15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    even step     s as bs  s a2 a1  s  m2 m1 m0 m2 m1 m0 m2 m1 m0
    odd step      s a0 b2  s b1 b0  s  m2 m1 m0 m2 m1 m0 m2 m1 m0

The three pairs at 15 and 8..6, 12 and 5..3, 9 and 2..0 are (row g, near columns), (row g + 8, near)
and (row g, far). A shift by 0, 3 or 6 and the mask 0x81C0 leave a bfloat16 worth value * 2^-126,
subnormals included; the fourth pair takes a few operations more, and both steps share them.

A scale is a byte E5M3 with a bias that suits bfloat16: the byte at bits 11..4 under the constant
bits 14..12 is worth scale * 2^119. Bytes from low to high: (row g, even step), (row g, odd step),
(row g + 8, even), (row g + 8, odd). Products of code and scale are exact in bfloat16 and come out
times 2^-7; the fp32 global scale makes up for that. A zero scale has no such byte: its codes become
zero instead. A negative scale flips the signs of its codes. NaN stays NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tetrad.formats.weights import NVFP4_BLOCK, HoldsTensors, Nvfp4Weight

TILE_ROWS = 128
"""Matrix rows of a tile; half gate and half up rows where both are joined."""
BLOCK_ROWS = 16
"""Matrix rows of one fragment."""
GRANULE_COLUMNS = 64
WORDS_PER_GRANULE = TILE_ROWS * GRANULE_COLUMNS // 16
SCALES_PER_GRANULE = TILE_ROWS * GRANULE_COLUMNS // (4 * NVFP4_BLOCK)
UNSCALE = 128.0
"""What a product of decoded code and scale lacks."""
CHUNK_BYTES = 64 << 20
"""Codes converted at a time: bounds what conversion needs beside its input and its output."""
SIGN, HIGH, MIDDLE, LOW = 3, 2, 1, 0
"""Bit numbers of an e2m1 code."""
SCALE_NAN = 0xFF


@dataclass(frozen=True, eq=False)
class PackedMatrix(HoldsTensors):
    """A stack of experts' matrices, one tile order for all devices."""

    words: Tensor
    """int64 [E, tiles, granules, WORDS_PER_GRANULE]"""
    scales: Tensor
    """int32 [E, tiles, granules, SCALES_PER_GRANULE]"""
    global_scale: Tensor
    """float32 [E, parts], times UNSCALE; two parts (gate, up) or one"""


def _moves(places: dict[int, int], device: torch.device) -> Tensor:
    """int32 [256]: for a byte of two codes, bit b of each at `places[b]` of its own 16 bits."""
    code = torch.arange(16, dtype=torch.int64)
    moved = torch.zeros_like(code)
    for bit, place in places.items():
        moved |= ((code >> bit) & 1) << place
    pair = moved[None, :] | (moved[:, None] << 16)
    return pair.flatten().to(torch.int32).to(device)


PLAIN_PLACES = (
    {SIGN: 15, HIGH: 8, MIDDLE: 7, LOW: 6},
    {SIGN: 12, HIGH: 5, MIDDLE: 4, LOW: 3},
    {SIGN: 9, HIGH: 2, MIDDLE: 1, LOW: 0},
)
"""Where the bits of (row g, near), (row g + 8, near) and (row g, far) go, in either word."""
TAIL_PLACES = (
    ({SIGN: 14, HIGH: 11, MIDDLE: 10}, {LOW: 14}),
    ({SIGN: 13}, {HIGH: 13, MIDDLE: 11, LOW: 10}),
)
"""Where the bits of (row g + 8, far) of the even and the odd step go: in the even, the odd word."""


def scale_bytes(device: torch.device) -> Tensor:
    """int32 [256]: E5M3 byte of each e4m3 byte; the sign is dropped, zero gives any byte."""
    table = []
    for stored in range(256):
        exponent, mantissa = (stored >> 3) & 15, stored & 7
        if (exponent, mantissa) == (15, 7):
            table.append(SCALE_NAN)
        elif exponent:
            table.append((exponent + 15) << 3 | mantissa)
        else:
            leading = max(mantissa.bit_length() - 1, 0)
            table.append((13 + leading) << 3 | (mantissa << (3 - leading)) & 7)
    return torch.tensor(table, dtype=torch.int32, device=device)


def num_tiles(rows: int, parts: int) -> int:
    """Tiles of a matrix joined of `parts` that have `rows` rows each."""
    return -(-rows // (TILE_ROWS // parts))


def pack(parts: tuple[Nvfp4Weight, ...]) -> PackedMatrix:
    """One stack, or gate and up joined: rows g of a block are then gate's, rows g + 8 up's.

    So both halves of a feature end in one thread, whatever the tensor core instruction.

    Rows and columns are filled up with zeros to whole tiles and granules. Works on the device of
    the weights, a few experts at a time.
    """
    num_experts, rows, columns = parts[0].shape
    device = parts[0].device
    tiles, granules = num_tiles(rows, len(parts)), -(-columns // GRANULE_COLUMNS)
    shape = (num_experts, tiles, granules)
    words = torch.empty(*shape, WORDS_PER_GRANULE, dtype=torch.int64, device=device)
    scales = torch.empty(*shape, SCALES_PER_GRANULE, dtype=torch.int32, device=device)
    step = max(1, CHUNK_BYTES // (len(parts) * rows * columns // 2))
    for start in range(0, num_experts, step):
        chunk = slice(start, start + step)
        codes, bytes_ = _joined(parts, chunk, tiles, granules)
        _pack_words(codes, words[chunk])
        _pack_scales(bytes_, scales[chunk])
    together = torch.stack([part.global_scale for part in parts], dim=1)
    return PackedMatrix(words, scales, together * UNSCALE)


def _joined(
    parts: tuple[Nvfp4Weight, ...], chunk: slice, tiles: int, granules: int
) -> tuple[Tensor, Tensor]:
    """Codes [e, tiles * 128, bytes] and e4m3 bytes [e, tiles * 128, groups] of some experts.

    Codes are ready to go: zero under a zero scale, signs flipped under a negative one.
    """
    blocks, share = tiles * TILE_ROWS // BLOCK_ROWS, BLOCK_ROWS // len(parts)
    width = granules * GRANULE_COLUMNS
    all_codes, all_scales = [], []
    for part in parts:
        codes, scales = part.codes[chunk], part.scales[chunk].view(torch.uint8)
        codes = _filled_up(_signs_applied(codes, scales), blocks * share, width // 2)
        scales = _filled_up(scales, blocks * share, width // NVFP4_BLOCK)
        all_codes.append(codes.view(-1, blocks, share, width // 2))
        all_scales.append(scales.view(-1, blocks, share, width // NVFP4_BLOCK))
    return torch.cat(all_codes, dim=2).flatten(1, 2), torch.cat(all_scales, dim=2).flatten(1, 2)


def _signs_applied(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes times the sign (1, 0 or -1) of their scale."""
    by_group = codes.view(*scales.shape, NVFP4_BLOCK // 2)
    flips = (scales >> 7) * 0x88
    keeps = ((scales & 0x7F) != 0).to(torch.uint8) * 0xFF
    return ((by_group ^ flips[..., None]) & keeps[..., None]).view(codes.shape)


def _filled_up(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Zeros added below and to the right."""
    return functional.pad(matrix, (0, columns - matrix.shape[2], 0, rows - matrix.shape[1]))


def _pack_words(codes: Tensor, words: Tensor) -> None:
    """uint8 [e, rows, columns / 2] into int64 [e, tiles, granules, 512]."""
    experts, tiles, granules, _ = words.shape
    # e, tile, 16-row block, row half, g | granule, k32, k16, k half; the four t in each number
    fields = codes.view(torch.int32).view(experts, tiles, 8, 2, 8, granules, 2, 2, 2)
    # k16, k half, row half | e, tile, granule, block, g, k32: one plane a fragment register
    planes = fields.permute(7, 8, 3, 0, 1, 5, 2, 4, 6).contiguous()
    # ... and t
    planes = planes.view(torch.uint8).view(*planes.shape, 4)
    plain = [_moves(places, codes.device) for places in PLAIN_PLACES]
    tails = [[_moves(places, codes.device) for places in both] for both in TAIL_PLACES]
    # e, tile, granule, block, g, t, k32, word
    target = words.view(torch.int32).view(experts, tiles, granules, 8, 8, 4, 2, 2)
    far = [planes[k16, 1, 1].int() for k16 in (0, 1)]
    for word in (0, 1):
        packed = tails[0][word][far[0]]
        packed |= tails[1][word][far[1]]
        near = (planes[word, 0, 0], planes[word, 0, 1], planes[word, 1, 0])
        for table, plane in zip(plain, near, strict=True):
            packed |= table[plane.int()]
        target[..., word] = packed.transpose(-1, -2)


def _pack_scales(stored: Tensor, scales: Tensor) -> None:
    """uint8 [e, rows, columns / 16] into int32 [e, tiles, granules, 128]."""
    experts, tiles, granules, _ = scales.shape
    table = scale_bytes(stored.device)
    # e, tile, 16-row block, row half, g | granule, k32, k16
    fields = table[stored.int()].view(experts, tiles, 8, 2, 8, granules, 2, 2)
    packed = torch.zeros_like(fields[:, :, :, 0, :, :, :, 0])
    for place, (row_half, k16) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):
        packed |= fields[:, :, :, row_half, :, :, :, k16] << (8 * place)
    in_order = packed.permute(0, 1, 4, 2, 3, 5)
    scales.view(experts, tiles, granules, 8, 8, 2).copy_(in_order)
