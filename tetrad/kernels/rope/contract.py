"""Rotary position embedding."""

from __future__ import annotations

from tetrad.kernels.contract import Argument, Contract, case

CONTRACT = Contract(
    name="rope",
    summary="rotate pairs of columns by each row's angles, in fp32, rounded once",
    arguments=(
        Argument("x", "[T, H, R]", "activation", "columns to rotate; may be a slice of wider ones"),
        Argument("cos", "[T, R/2]", "float32", "cosine of each pair's angle"),
        Argument("sin", "[T, R/2]", "float32", "sine of each pair's angle"),
        Argument(
            "interleaved", "", "bool", "pairs are (2i, 2i + 1); else half-split, (i, i + R/2)"
        ),
    ),
    results=(Argument("rotated", "[T, H, R]", "activation", "columns in the same order as x"),),
    cases=(
        case("interleaved", T=3, H=2, R=8, interleaved=True),
        case("half-split", T=3, H=2, R=8, interleaved=False),
        case("one token", T=1, H=1, R=64, interleaved=True),
        case("odd pairs", T=5, H=3, R=6, interleaved=False),
    ),
    flops=lambda c: 3.0 * c["T"] * c["H"] * c["R"],
    bytes=lambda c, size: c["T"] * c["R"] * (2.0 * c["H"] * size + 4),
    tolerance={"float32": 1e-6, "bfloat16": 4e-3},
)
