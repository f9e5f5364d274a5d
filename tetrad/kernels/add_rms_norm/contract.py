"""A sum, and its root-mean-square norm."""

from __future__ import annotations

from tetrad.kernels.contract import Argument, Contract, case

CONTRACT = Contract(
    name="add_rms_norm",
    summary="x + residual + more, rounded once, and the rms_norm of that sum as it was rounded",
    arguments=(
        Argument("x", "[T, W]", "activation", "what a layer's part adds"),
        Argument("residual", "[T, W]", "activation", "what it is added to"),
        Argument("weight", "[W]", "activation", "scale of each column"),
        Argument("eps", "", "float", "added to the mean square"),
        Argument("more", "[T, W]", "activation", "a third addend; None: there is none"),
        Argument("into", "[T, W]", "activation", "where normed goes; None: to memory of its own"),
    ),
    results=(
        Argument("total", "[T, W]", "activation", "x + residual + more"),
        Argument("normed", "[T, W]", "activation", "normalised rows of the sum"),
    ),
    cases=(
        case("few rows", T=3, W=48, eps=1e-5, more=False),
        case("one row", T=1, W=64, eps=1e-6, more=False),
        case("odd width", T=5, W=37, eps=1e-5, more=True, into=True),
        case("model width", T=4, W=6144, eps=1e-5, more=False, into=True),
        case("three addends", T=4, W=6144, eps=1e-5, more=True),
    ),
    flops=lambda c: (5.0 + c["more"]) * c["T"] * c["W"],
    bytes=lambda c, size: ((4.0 + c["more"]) * c["T"] + 1) * c["W"] * size,
    tolerance={"float32": 1e-6, "bfloat16": 4e-3},
)
