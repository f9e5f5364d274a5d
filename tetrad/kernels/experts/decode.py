"""PTX that kernels inline: from packed words to weights, and the gated activation.

`packing.py` says where the bits lie.
"""

from __future__ import annotations

import functools

from tetrad.kernels.triton_support import constexpr

HAS_BF16_MUL = (9, 0)
"""From this capability on `mul.bf16x2` exists."""


def _times(target: str, scale: str, has_bf16_mul: bool) -> str:
    """PTX: two bf16 times two scales; exact, subnormals kept."""
    if has_bf16_mul:
        return f"mul.bf16x2 {target}, {target}, {scale};"
    return f"fma.rn.bf16x2 {target}, {target}, {scale}, minus_zero;"


def _left(target: str, source: str, bits: int, by_multiplying: bool) -> str:
    """PTX: target = source << bits. A multiplication when the factors are operands 18 to 20."""
    if by_multiplying:
        return f"mul.lo.u32 {target}, {source}, ${FACTORS.index(1 << bits) + 18};"
    return f"shl.b32 {target}, {source}, {bits};"


def _three_pairs(word: str, first: int, has_bf16_mul: bool, by_multiplying: bool) -> str:
    """PTX: the three code pairs that a mask alone lifts out of a word."""
    lines, source = [], word
    for pair in range(first, first + 3):
        if pair > first:
            lines.append(_left("moved", source, 3, by_multiplying))
            source = "moved"
        lines.append(f"and.b32 pair{pair}, {source}, 0x81C081C0;")
        lines.append(_times(f"pair{pair}", f"scale{first // 2 + pair % 2}", has_bf16_mul))
    return "\n".join(lines)


FACTORS = (2, 8, 16)
"""What `by_multiplying` multiplies by."""


@functools.cache
def decode_ptx(has_bf16_mul: bool, by_multiplying: bool = False) -> str:
    """PTX from one 64-bit word (16 codes) and one 32-bit word (4 scales) to 16 bf16 weights.

    17 integer operations for the busiest unit and 8 multiplications for 16 weights, if ptxas turns
    the 7 shifts to the left into multiplications. It does in small kernels alone; operands 18, 19
    and 20, the FACTORS, which ptxas cannot know, leave it no choice.
    $16 is the word, $17 the scales; `base` adds the upper exponent bits of two bf16 scales.
    `has_bf16_mul`: the target has `mul.bf16x2`.
    """
    stores = "\n".join(f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, pair{i};" for i in range(8))
    return f"""
{{
.reg .b32 word<2>, moved, low, high, tail, both, sign, base, minus_zero, scale<4>, pair<8>;
.reg .b16 half<4>;
mov.b32 minus_zero, 0x80008000;
mov.b32 base, 0x70007000;
mov.b64 {{word0, word1}}, $16;
{_left("low", "$17", 4, by_multiplying)}
lop3.b32 low, low, 0x0FF00FF0, base, 0xEA;
shr.b32 high, $17, 4;
lop3.b32 high, high, 0x0FF00FF0, base, 0xEA;
mov.b32 {{half0, half1}}, low;
mov.b32 {{half2, half3}}, high;
mov.b32 scale0, {{half0, half0}};
mov.b32 scale1, {{half1, half1}};
mov.b32 scale2, {{half2, half2}};
mov.b32 scale3, {{half3, half3}};
{_three_pairs("word0", 0, has_bf16_mul, by_multiplying)}
{_three_pairs("word1", 4, has_bf16_mul, by_multiplying)}
shr.b32 tail, word1, 5;
lop3.b32 both, word0, tail, 0x6C006C00, 0xE4;
{_left("moved", "both", 1, by_multiplying)}
shr.b32 tail, both, 3;
and.b32 sign, moved, 0x80008000;
lop3.b32 pair3, tail, 0x01C001C0, sign, 0xEA;
{_times("pair3", "scale1", has_bf16_mul)}
{_left("sign", "moved", 1, by_multiplying)}
and.b32 sign, sign, 0x80008000;
lop3.b32 sign, both, 0x01000100, sign, 0xEA;
lop3.b32 pair7, moved, 0x00C000C0, sign, 0xEA;
{_times("pair7", "scale3", has_bf16_mul)}
{stores}
}}
"""


@functools.cache
def decode_fp8_ptx(has_bf16_mul: bool) -> str:
    """PTX from one 64-bit word (8 e4m3 codes, as `packing_fp8.py` lays them out) to 8 bf16 weights.

    10 integer operations and 4 multiplications. $8 is the word; `scale0` is 2^120 twice, the factor
    between the exponents of e4m3 and bf16. `has_bf16_mul`: the target has `mul.bf16x2`.
    """
    words = "\n".join(
        f"""
and.b32 pair{2 * half}, word{half}, 0x87F087F0;
shl.b32 up, word{half}, 4;
shr.b32 down, word{half}, 4;
and.b32 down, down, 0x07000700;
lop3.b32 pair{2 * half + 1}, up, 0x80F080F0, down, 0xEA;"""
        for half in range(2)
    )
    products = "\n".join(_times(f"pair{i}", "scale0", has_bf16_mul) for i in range(4))
    stores = "\n".join(f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, pair{i};" for i in range(4))
    return f"""
{{
.reg .b32 word<2>, up, down, minus_zero, scale0, pair<4>;
mov.b32 minus_zero, 0x80008000;
mov.b32 scale0, 0x7B807B80;
mov.b64 {{word0, word1}}, $8;
{words}
{products}
{stores}
}}
"""


GATED_PTX = constexpr("""
{
.reg .f32 power;
mul.ftz.f32 power, $1, 0fBFB8AA3B;
ex2.approx.ftz.f32 power, power;
add.ftz.f32 power, power, 0f3F800000;
rcp.approx.ftz.f32 power, power;
mul.ftz.f32 power, power, $1;
mul.ftz.f32 $0, power, $2;
}
""")
"""silu($1) * $2 = $1 / (1 + 2^(-log2(e) $1)) * $2 within 2^-21. Shorter than what Triton makes of
it, which keeps ptxas from moving the shifts of the loop to the unit that is already the busiest."""
