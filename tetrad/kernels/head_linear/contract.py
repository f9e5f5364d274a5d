"""A linear layer of each head's own."""

from __future__ import annotations

from tetrad.kernels.contract import Argument, Contract, case

CONTRACT = Contract(
    name="head_linear",
    summary="each head's row times the head's matrix, summed in fp32, rounded once",
    arguments=(
        Argument("x", "[T, H, W]", "activation", "may be a slice of wider ones"),
        Argument("weight", "[H, W, O]", "activation", "a matrix for each head"),
    ),
    results=(Argument("y", "[T, H, O]", "activation", "contiguous"),),
    cases=(
        case("few rows", T=3, H=3, W=24, O=32),
        case("too many rows for one launch", T=150, H=2, W=16, O=24),
        case("one row, odd widths", T=1, H=2, W=37, O=19),
        case("a larger tile", T=30, H=2, W=130, O=80),
        case("the largest tile", T=64, H=2, W=128, O=70),
        case("glm widths", T=5, H=4, W=512, O=256),
    ),
    flops=lambda c: 2.0 * c["T"] * c["H"] * c["W"] * c["O"],
    bytes=lambda c, size: float(c["H"]) * (c["T"] * (c["W"] + c["O"]) + c["W"] * c["O"]) * size,
    tolerance={"float32": 2e-6, "bfloat16": 4e-3},
)
