"""Writing keys into the paged cache."""

from __future__ import annotations

from tetrad.kernels.contract import Argument, Contract, case

CONTRACT = Contract(
    name="store_latent",
    summary="write each token's key, given as two parts side by side, to its slot of a paged pool",
    arguments=(
        Argument("pool", "[P, PAGE_TOKENS, A + B]", "activation", "changed in place"),
        Argument("slots", "[T]", "int64", "page * PAGE_TOKENS + offset; all different"),
        Argument("left", "[T, A]", "activation", "first part: latent, or rotated index columns"),
        Argument("right", "[T, B]", "activation", "second part: rotary key, or the other columns"),
    ),
    results=(Argument("pool", "[P, PAGE_TOKENS, A + B]", "activation", "the same pool"),),
    cases=(
        case("few tokens", T=5, P=3, A=32, B=8),
        case("one token", T=1, P=1, A=7, B=3),
        case("glm", T=70, P=4, A=512, B=64),
    ),
    flops=lambda _case: 0.0,
    bytes=lambda c, size: 2.0 * c["T"] * (c["A"] + c["B"]) * size + 8.0 * c["T"],
    tolerance={"float32": 0.0, "bfloat16": 0.0},
)
