"""The router's product with what is joined to it, and other products that stay in fp32."""

from __future__ import annotations

from tetrad.kernels.contract import BITS_PER_WEIGHT, Argument, Contract, case

CONTRACT = Contract(
    name="router",
    summary="x @ weight^T in fp32: neither x nor weight is rounded, and the result is not",
    arguments=(
        Argument("x", "[T, in]", "activation", "rows"),
        Argument("weight", "[out, in]", "weight", "one matrix, or several, one above the other"),
    ),
    results=(Argument("y", "[T, out]", "float32", "x @ weight^T"),),
    cases=(
        case("dense", T=3, out=48, width=64, format="bf16"),
        case("dense odd sizes", T=5, out=37, width=51, format="bf16"),
        case("nvfp4", T=3, out=48, width=64, format="nvfp4"),
        case("one token", T=1, out=256, width=320, format="bf16"),
    ),
    flops=lambda c: 2.0 * c["T"] * c["out"] * c["width"],
    bytes=lambda c, size: (
        c["T"] * (c["width"] * size + 4 * c["out"])
        + c["out"] * c["width"] * BITS_PER_WEIGHT[c["format"]] / 8
    ),
    tolerance={"float32": 2e-6, "bfloat16": 3e-5},
    prepared="weight",
)
