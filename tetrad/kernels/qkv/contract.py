"""What lies between the joined projection of queries, keys and values, and attention."""

from __future__ import annotations

from tetrad.core.step import PAGE_TOKENS
from tetrad.kernels.contract import Argument, Contract, case

CONTRACT = Contract(
    name="qkv",
    summary="rotate queries and keys, in fp32, rounded once; write keys and values to their slots",
    arguments=(
        Argument(
            "joined", "[T, (H + 2 G) W]", "activation", "queries, keys and values of all heads"
        ),
        Argument("cos", "[T, W]", "float32", "cosine of the angle of each number's pair"),
        Argument("sin", "[T, W]", "float32", "sine of it, negative for the first of a pair"),
        Argument("slots", "[T]", "int64", "page * PAGE_TOKENS + offset, no two alike"),
        Argument("pool", "[P, PAGE_TOKENS, 2 G W]", "activation", "keys, then values; written to"),
    ),
    results=(
        Argument("queries", "[T, H, W]", "activation", "rotated; pairs are (i, i + W/2)"),
        Argument("pool", "[P, PAGE_TOKENS, 2 G W]", "activation", "the argument"),
    ),
    cases=(
        case("several heads a key", T=5, H=6, G=2, W=16, P=2),
        case("one token", T=1, H=3, G=3, W=8, P=1),
        case("smollm2 widths", T=9, H=9, G=3, W=64, P=3),
    ),
    flops=lambda c: 3.0 * c["T"] * (c["H"] + c["G"]) * c["W"],
    bytes=lambda c, size: (
        c["T"] * (2.0 * (c["H"] + 2 * c["G"]) * c["W"] * size + 4 * c["W"] + 8) + PAGE_TOKENS
    ),
    tolerance={"float32": 1e-6, "bfloat16": 4e-3},
)
