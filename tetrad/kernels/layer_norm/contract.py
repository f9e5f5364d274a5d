"""Layer norm with bias."""

from __future__ import annotations

from tetrad.kernels.contract import Argument, Contract, case

CONTRACT = Contract(
    name="layer_norm",
    summary="(x - mean) / sqrt(variance + eps) * weight + bias, in fp32, rounded once",
    arguments=(
        Argument("x", "[T, W]", "activation", "rows to normalise"),
        Argument("weight", "[W]", "float32", "scale of each column"),
        Argument("bias", "[W]", "float32", "added to each column"),
        Argument("eps", "", "float", "added to the (biased) variance"),
    ),
    results=(Argument("normed", "[T, W]", "activation", "normalised rows"),),
    cases=(
        case("few rows", T=3, W=48),
        case("one row", T=1, W=128),
        case("odd width", T=5, W=37),
    ),
    flops=lambda c: 7.0 * c["T"] * c["W"],
    bytes=lambda c, size: 2.0 * c["T"] * c["W"] * size + 8.0 * c["W"],
    tolerance={"float32": 1e-6, "bfloat16": 4e-3},
)
