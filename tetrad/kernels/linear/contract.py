"""Linear layer over a weight in any stored format."""

from __future__ import annotations

from tetrad.kernels.contract import BITS_PER_WEIGHT, Argument, Contract, case

CONTRACT = Contract(
    name="linear",
    summary="x @ weight^T, accumulated in fp32, rounded once",
    arguments=(
        Argument("x", "[T, in]", "activation", "rows"),
        Argument("weight", "[out, in]", "weight", "one matrix, in any format as stored"),
    ),
    results=(Argument("y", "[T, out]", "activation", "x @ weight^T"),),
    cases=(
        case("nvfp4 in parts", T=3, out=200, width=1024, format="nvfp4"),
        case("fp8 ragged blocks", T=3, out=200, width=136, format="fp8_block"),
        case("nvfp4", T=3, out=48, width=64, format="nvfp4"),
        case("nvfp4 one token", T=1, out=96, width=160, format="nvfp4"),
        case("nvfp4 several tiles of tokens", T=70, out=136, width=192, format="nvfp4"),
        case("fp8 per tensor", T=3, out=40, width=72, format="fp8_tensor"),
        case("fp8 odd sizes", T=17, out=37, width=51, format="fp8_block"),
        case("int4", T=3, out=96, width=128, format="int4"),
        case("int4 odd sizes", T=2, out=37, width=64, format="int4"),
        case("int4 many tokens", T=33, out=64, width=96, format="int4"),
        case("int8", T=1, out=96, width=128, format="int8"),
        case("int8 odd sizes", T=2, out=37, width=51, format="int8"),
        case("int8 many tokens", T=33, out=64, width=96, format="int8"),
        case("int8 blocks", T=2, out=96, width=128, format="int8_block"),
        case("int8 blocks many tokens", T=33, out=64, width=96, format="int8_block"),
        case("dense", T=3, out=48, width=64, format="bf16"),
        case("dense odd sizes", T=5, out=37, width=51, format="bf16"),
    ),
    flops=lambda c: 2.0 * c["T"] * c["out"] * c["width"],
    bytes=lambda c, size: (
        c["T"] * (c["out"] + c["width"]) * size
        + c["out"] * c["width"] * BITS_PER_WEIGHT[c["format"]] / 8
    ),
    tolerance={"float32": 2e-6, "bfloat16": 4e-3},
    prepared="weight",
)
