"""The producer of `gluon.py` for FP8 keys: it decodes them into the buffers that others read.

A tile is decoded in groups of columns that share a scale. Codes of the next two groups are loaded
into registers meanwhile, also while a buffer is waited for.
"""

from __future__ import annotations

from typing import Any

from tetrad.kernels.e4m3 import BLOCK, SCALED_PTX
from tetrad.kernels.experts.gluon_parts import (
    constant,
    copy,
    gl,
    jit,
    mbarrier,
    start_copy,
)
from tetrad.kernels.mla.gluon_parts import pages_of, positions, slots_of


@constant
def _group_layout(each: int) -> Any:
    """A group [key, column], or with `each` 4 its words: a thread has 8 codes of each half of four
    keys, and 8 threads store 128 bytes of a row."""
    near = [[0, n // each] for n in (1, 2, 4, 64) if n >= each]
    lanes = [[0, 8 // each], [0, 16 // each], [0, 32 // each], [1, 0], [2, 0]]
    keys, warps = [[16, 0], [32, 0]], [[4, 0], [8, 0]]
    return gl.DistributedLinearLayout(near + keys, lanes, warps, [], [64, 128 // each])


@jit()
def decode(words, scales, LAYOUT: gl.constexpr):
    """bf16 numbers [key, column] of e4m3 codes, four in each of `words` [key, column / 4]; `scales`
    [key] are powers of two."""
    even, odd = gl.join(words, words >> 16), gl.join(words >> 8, words >> 24)
    codes = gl.join(even, odd).reshape([words.shape[0], 4 * words.shape[1]]).to(gl.uint8)
    codes = gl.convert_layout(codes, LAYOUT, assert_trivial=True)
    scales = gl.convert_layout(scales, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    codes, scales = gl.broadcast(codes, scales.to(gl.bfloat16).expand_dims(1))
    return gl.inline_asm_elementwise(
        SCALED_PTX, "=r,=r,r,r,r", [codes, scales], dtype=gl.bfloat16, is_pure=True, pack=4
    )


@jit()
def _load_group(
    pool, slot, GROUP: gl.constexpr, C: gl.constexpr, R: gl.constexpr, LAYOUT: gl.constexpr
):
    """Codes of a group, four in a word [key, word], which keeps them in few registers, and their
    scales [key]. Zeros where there is no key, whatever the pool has there."""
    GROUPS: gl.constexpr = C // BLOCK
    slot = gl.convert_layout(slot, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    key = pool + slot.to(gl.int64) * (C + GROUPS * 4 + 2 * R)
    scales = (key + C).to(gl.pointer_type(gl.float32)) + GROUP
    column = gl.arange(0, BLOCK // 4, layout=gl.SliceLayout(0, LAYOUT)).expand_dims(0)
    is_key = (slot >= 0).expand_dims(1) & (column >= 0)
    group = (key + GROUP * BLOCK).to(gl.pointer_type(gl.int32)).expand_dims(1)
    words = gl.load(group + column, mask=is_key, other=0)
    return words, gl.load(scales, mask=slot >= 0, other=0.0)


@jit()
def _start_rotary(target, pool, slot, C: gl.constexpr, R: gl.constexpr, LAYOUT: gl.constexpr):
    """Start the copy of a tile's rotary numbers, bf16 [key, R]; zeros where there is no key."""
    BEHIND: gl.constexpr = C + C // BLOCK * 4
    rotary = (pool + slot.to(gl.int64) * (BEHIND + 2 * R) + BEHIND).expand_dims(1)
    column = gl.arange(0, R, layout=gl.SliceLayout(0, LAYOUT)).expand_dims(0)
    is_key = (slot >= 0).expand_dims(1) & (column >= 0)
    start_copy(target, rotary.to(gl.pointer_type(gl.bfloat16)) + column, mask=is_key)
    copy.commit_group()


@jit()
def decode_keys(
    slot, entry, pool, chosen, pages, seen, end_key, num_tiles, keys, here, free,
    C: gl.constexpr, R: gl.constexpr, TOPK: gl.constexpr, BT: gl.constexpr, PAGE: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """As `gluon._copy_keys`; the copies of queries are on their way.

    What is stored is fenced by those who read it: a fence here would wait for the codes that are on
    their way.
    """
    GROUPS: gl.constexpr = C // BLOCK
    WORDS: gl.constexpr = _group_layout(4)
    CODES: gl.constexpr = _group_layout(1)
    words, scales = _load_group(pool, slot, 0, C, R, WORDS)
    next_words, next_scales = _load_group(pool, slot, 1, C, R, WORDS)
    copy.wait_group(0)
    for tile in range(num_tiles):
        stage = tile % 2
        entry += BT
        position = positions(chosen, entry, end_key, seen, TOPK)
        mbarrier.wait(free.index(stage), (tile // 2 + 1) % 2, pred=tile > 1)
        _start_rotary(keys[2].index(stage), pool, slot, C, R, LAYOUT)
        page = pages_of(pages, position, PAGE)
        for group in gl.static_range(GROUPS):
            half = keys[group // (GROUPS // 2)].index(stage)
            numbers = decode(words, scales, CODES)
            half.slice(group % (GROUPS // 2) * BLOCK, BLOCK, 1).store(numbers)
            words, scales = next_words, next_scales
            if group == GROUPS - 2:
                slot = slots_of(position, page, PAGE)
            next_words, next_scales = _load_group(pool, slot, (group + 2) % GROUPS, C, R, WORDS)
            if group == GROUPS // 2 - 1:
                mbarrier.arrive(here.index(stage), count=1)
        copy.wait_group(0)
        mbarrier.arrive(here.index(2 + stage), count=1)
