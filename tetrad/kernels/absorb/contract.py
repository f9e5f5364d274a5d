"""Queries as they meet the latents: keys' up-projection absorbed, rotary part rotated."""

from __future__ import annotations

from tetrad.kernels.contract import Argument, Contract, case

CONTRACT = Contract(
    name="absorb",
    summary="head_linear of the first N columns, then the other R rotated",
    arguments=(
        Argument("queries", "[T, H, N + R]", "activation", "as projected"),
        Argument("weight", "[H, N, C]", "activation", "W_UK of each head"),
        Argument("cos", "[T, R/2]", "float32", "cosine of each pair's angle"),
        Argument("sin", "[T, R/2]", "float32", "sine of it; pairs are (2i, 2i + 1)"),
    ),
    results=(
        Argument("absorbed", "[T, H, C + R]", "activation", "sums in fp32, each rounded once"),
    ),
    cases=(
        case("few rows", T=3, H=3, N=24, C=32, R=8),
        case("too many rows for one launch", T=150, H=2, N=16, C=24, R=8),
        case("one row, odd widths", T=1, H=2, N=37, C=19, R=6),
        case("a larger tile", T=40, H=2, N=70, C=80, R=4),
        case("glm widths", T=5, H=4, N=192, C=512, R=64),
    ),
    flops=lambda c: c["T"] * c["H"] * (2.0 * c["N"] * c["C"] + 3.0 * c["R"]),
    bytes=lambda c, size: (
        c["H"] * (c["T"] * (c["N"] + c["C"] + 2.0 * c["R"]) + c["N"] * c["C"]) * size
        + 4.0 * c["T"] * c["R"]
    ),
    tolerance={"float32": 2e-6, "bfloat16": 4e-3},
)
