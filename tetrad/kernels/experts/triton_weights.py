"""Packed words to [128, BK] weights inside a Triton kernel: NVFP4 and FP8.

`packing.py` and `packing_fp8.py` say where the bits lie, `decode.py` has the PTX. An empty PTX
means the interpreter, which knows none: the same is then done by arithmetic in fp32.
"""

from __future__ import annotations

from tetrad.kernels.triton_support import jit, tl


@jit()
def _decode_in_ptx(words, scales, PTX: tl.constexpr):
    """Sixteen bf16 tensors from words and scales, in the order of its operands."""
    return tl.inline_asm_elementwise(
        PTX,
        "=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,l,r",
        [words, scales],
        dtype=(
            tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
            tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
            tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
        ),
        is_pure=True,
        pack=1,
    )  # fmt: skip


@jit()
def _number(sign, magnitude, scale):
    """fp32 of an e2m1 code in two parts, times its scale."""
    exponent = magnitude >> 1
    mantissa = magnitude & 1
    halves = tl.where(exponent == 0, mantissa, (2 + mantissa) << tl.maximum(exponent - 1, 0))
    value = halves.to(tl.float32) * 0.5
    return tl.where(sign == 0, value, -value) * scale


@jit()
def _scale(scales, PLACE: tl.constexpr):
    """fp32 of one E5M3 byte, at 2^-7 of its worth as the PTX leaves it (the factor is 2^-126)."""
    bits = (((scales >> (8 * PLACE)) & 0xFF) << 4 | 0x7000) << 16
    return bits.to(tl.float32, bitcast=True) * 1.1754943508222875e-38


@jit()
def _plain(word, SHIFT: tl.constexpr, scale):
    """One of the three code pairs that lie in one piece."""
    moved = word << SHIFT
    return _number((moved >> 15) & 1, (moved >> 6) & 7, scale)


@jit()
def _decode_by_arithmetic(words, scales):
    """What `decode_ptx` does, in fp32 and in steps that the interpreter knows."""
    first = words.to(tl.int32)
    second = (words >> 32).to(tl.int32)
    s0, s1, s2, s3 = _scale(scales, 0), _scale(scales, 2), _scale(scales, 1), _scale(scales, 3)
    f_high, s_high = first >> 16, second >> 16
    return (
        _plain(first, 0, s0), _plain(f_high, 0, s0), _plain(first, 3, s1), _plain(f_high, 3, s1),
        _plain(first, 6, s0), _plain(f_high, 6, s0),
        _tail_of_first(first, second, s1), _tail_of_first(f_high, s_high, s1),
        _plain(second, 0, s2), _plain(s_high, 0, s2), _plain(second, 3, s3), _plain(s_high, 3, s3),
        _plain(second, 6, s2), _plain(s_high, 6, s2),
        _tail_of_second(first, second, s3), _tail_of_second(f_high, s_high, s3),
    )  # fmt: skip


@jit()
def _tail_of_first(first, second, scale):
    """The first word's fourth pair, of which one bit lies in the second word."""
    return _number((first >> 14) & 1, ((first >> 9) & 6) | ((second >> 14) & 1), scale)


@jit()
def _tail_of_second(first, second, scale):
    """The second word's fourth pair, whose sign lies in the first word."""
    magnitude = ((second >> 11) & 4) | ((second >> 10) & 3)
    return _number((first >> 13) & 1, magnitude, scale)


@jit()
def nvfp4_weights(words, scales, BK: tl.constexpr, PTX: tl.constexpr):
    """[128, BK] weights from one packed tile of 128 rows and BK columns."""
    w = words.reshape(BK // 64, 8, 8, 4, 2)
    s = scales.reshape(BK // 64, 8, 8, 1, 2).broadcast_to(BK // 64, 8, 8, 4, 2)
    p = _decode_by_arithmetic(w, s) if PTX == "" else _decode_in_ptx(w, s, PTX)
    q0 = tl.join(tl.join(p[0], p[1]), tl.join(p[2], p[3]))
    q1 = tl.join(tl.join(p[4], p[5]), tl.join(p[6], p[7]))
    q2 = tl.join(tl.join(p[8], p[9]), tl.join(p[10], p[11]))
    q3 = tl.join(tl.join(p[12], p[13]), tl.join(p[14], p[15]))
    # axes: k granule, 16-row block, row in 8, lane pair, k32 | k parity, row half, k half, k16
    a = tl.join(tl.join(q0, q1), tl.join(q2, q3))
    return a.permute(1, 6, 2, 0, 4, 8, 7, 3, 5).reshape(128, BK)


@jit()
def _fp8_number(code):
    """fp32 of the seven low bits and the sign (bit 7) of an e4m3 code that is a number."""
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@jit()
def _fp8_pair(piece):
    """Rows g and g + 8 of the 16 bits of one column."""
    near = ((piece >> 8) & 0x80) | ((piece >> 4) & 0x7F)
    far = ((piece >> 4) & 0x80) | ((piece >> 8) & 0x70) | (piece & 0x0F)
    return _fp8_number(near), _fp8_number(far)


@jit()
def _decode_fp8_by_arithmetic(words):
    """What `decode_fp8_ptx` does."""
    first = words.to(tl.int32)
    second = (words >> 32).to(tl.int32)
    a0, b0 = _fp8_pair(first)
    a1, b1 = _fp8_pair(first >> 16)
    a2, b2 = _fp8_pair(second)
    a3, b3 = _fp8_pair(second >> 16)
    return a0, a1, b0, b1, a2, a3, b2, b3


@jit()
def fp8_weights(words, BK: tl.constexpr, PTX: tl.constexpr):
    """[128, BK] weights without their scale, from one packed tile of 128 rows and BK columns."""
    w = words.reshape(BK // 32, 8, 8, 4, 2)
    if PTX == "":
        p = _decode_fp8_by_arithmetic(w)
    else:
        p = tl.inline_asm_elementwise(
            PTX,
            "=h,=h,=h,=h,=h,=h,=h,=h,l",
            [w],
            dtype=(
                tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
            ),
            is_pure=True,
            pack=1,
        )  # fmt: skip
    q0 = tl.join(tl.join(p[0], p[1]), tl.join(p[2], p[3]))
    q1 = tl.join(tl.join(p[4], p[5]), tl.join(p[6], p[7]))
    # axes: k granule, 16-row block, row in 8, lane pair, k16 | k parity, row half, k half
    a = tl.join(q0, q1)
    return a.permute(1, 6, 2, 0, 4, 7, 3, 5).reshape(128, BK)
