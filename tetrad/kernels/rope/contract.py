"""Rotary position embedding."""

from __future__ import annotations

from tetrad.kernels.contract import Argument, Contract, case

CONTRACT = Contract(
    name="rope",
    summary="rotate pairs of the first R columns by each row's angles, in fp32, rounded once",
    arguments=(
        Argument("x", "[T, H, W]", "activation", "W at least R; may be a slice of wider ones"),
        Argument("cos", "[T, R/2]", "float32", "cosine of each pair's angle"),
        Argument("sin", "[T, R/2]", "float32", "sine of each pair's angle"),
        Argument(
            "interleaved", "", "bool", "pairs are (2i, 2i + 1); else half-split, (i, i + R/2)"
        ),
    ),
    results=(
        Argument(
            "rotated", "[T, H, W]", "activation", "in the order of x; behind R columns x itself"
        ),
    ),
    cases=(
        case("interleaved", T=3, H=2, R=8, W=13, interleaved=True),
        case("half-split", T=3, H=2, R=8, W=8, interleaved=False),
        case("one token", T=1, H=1, R=64, W=128, interleaved=True),
        case("odd pairs", T=5, H=3, R=6, W=7, interleaved=False),
        case("more heads than a program takes", T=2, H=70, R=64, W=128, interleaved=False),
    ),
    flops=lambda c: 3.0 * c["T"] * c["H"] * c["R"],
    bytes=lambda c, size: c["T"] * (2.0 * c["H"] * c["W"] * size + 4 * c["R"]),
    tolerance={"float32": 1e-6, "bfloat16": 4e-3},
)
