"""FP8 keys in kernels: codes to numbers and back, on GPUs that have no instruction for it too."""

from __future__ import annotations

from tetrad.core.keys import SCALE_BLOCK
from tetrad.formats.fp8_keys import LEAST_RATIO
from tetrad.formats.weights import E4M3_MAX
from tetrad.kernels.triton_support import constexpr, jit, tl

EXPONENT_STEP = constexpr(2.0**120)
"""Between the exponents of e4m3 (bias 7) and of bf16 and fp32 (bias 127)."""
BLOCK = constexpr(SCALE_BLOCK)
RATIO = constexpr(1.0 / E4M3_MAX)
LEAST = constexpr(LEAST_RATIO)


def _decode_ptx(is_scaled: bool) -> str:
    """PTX from four codes in a word, $2, to four bf16 numbers in two, $0 and $1; times the bf16
    scales in $3 and $4 where `is_scaled`.

    A code's bits, moved, are a bf16 number that is 2^120 times too small; subnormals are kept. The
    sign gets there since a code is widened to 16 bits by it.
    The code of NaN becomes 480: what is not finite has to show in the scale. A product is an fma
    with -0, which Ampere has too.
    """
    pairs = "\n".join(
        f"""
prmt.b32 pair, $2, 0, {order};
shl.b32 pair, pair, 4;
and.b32 pair, pair, 0x87F087F0;
fma.rn.bf16x2 {"pair" if is_scaled else f"${i}"}, pair, step, minus_zero;
{f"fma.rn.bf16x2 ${i}, pair, ${i + 3}, minus_zero;" if is_scaled else ""}"""
        for i, order in enumerate(("0x9180", "0xB3A2"))
    )
    return f"""
{{
.reg .b32 pair, step, minus_zero;
mov.b32 step, 0x7B807B80;
mov.b32 minus_zero, 0x80008000;
{pairs}
}}
"""


PTX = constexpr(_decode_ptx(is_scaled=False))
SCALED_PTX = constexpr(_decode_ptx(is_scaled=True))


@jit()
def _by_arithmetic(codes):
    bits = codes.to(tl.int32)
    bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * EXPONENT_STEP


@jit()
def decode(codes, BY_PTX: tl.constexpr):
    """Numbers of uint8 codes without their scales: bf16, or fp32 not BY_PTX."""
    if not BY_PTX:
        return _by_arithmetic(codes)
    return tl.inline_asm_elementwise(
        PTX, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
    )


@jit()
def decode_scaled(codes, scales, BY_PTX: tl.constexpr):
    """Numbers of uint8 codes times fp32 `scales`, which are powers of two."""
    if not BY_PTX:
        return _by_arithmetic(codes) * scales
    return tl.inline_asm_elementwise(
        SCALED_PTX, "=r,=r,r,r,r", [codes, scales.to(tl.bfloat16)],
        dtype=tl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip


@jit()
def load_latents(rows, is_row, WIDTH: tl.constexpr, PADDED: tl.constexpr, BY_PTX: tl.constexpr):
    """[row, column]: WIDTH decoded numbers of the FP8 latents at each address, zeros where there is
    no row; scales stand right behind the codes."""
    GROUP: tl.constexpr = PADDED if PADDED < BLOCK else BLOCK
    GROUPS: tl.constexpr = PADDED // GROUP
    SCALES: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    group = tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = is_row[:, None, None]
    if WIDTH < PADDED:
        mask = mask & (column < WIDTH)[None, :, :]
    codes = tl.load(rows[:, None, None] + column[None, :, :], mask=mask, other=0)
    at = (rows + WIDTH).to(tl.pointer_type(tl.float32))
    mask = is_row[:, None] & (group < SCALES)[None, :]
    scales = tl.load(at[:, None] + group[None, :], mask=mask, other=0.0)
    return decode_scaled(codes, scales[:, :, None], BY_PTX).reshape(rows.shape[0], PADDED)


@jit()
def measure(values, axis: tl.constexpr):
    """The largest of some numbers by size, and whether all are finite."""
    size = tl.abs(values)
    is_finite = size < float("inf")
    return tl.max(tl.where(is_finite, size, 0.0), axis), tl.min(is_finite.to(tl.int32), axis)


@jit()
def scale_for(largest, is_finite):
    """As `formats.fp8_keys.scales`."""
    ratio = tl.maximum(largest * RATIO, LEAST)
    bits = (ratio.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return tl.where(is_finite != 0, bits.to(tl.float32, bitcast=True), float("nan"))


@jit()
def encode(values, scales):
    """uint8 codes of fp32 numbers, rounded to the nearest, ties to even; scales are powers of two.

    By integers, as Ampere cannot convert. Numbers below 2^-6 are multiples of 2^-9, which adding
    2^23 rounds to.
    """
    inverse = ((254 << 23) - scales.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    size = tl.abs(values) * inverse
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.minimum(tl.where(size < 0.015625, small, normal), 126)
    return (code | tl.where(values < 0, 128, 0)).to(tl.uint8)
