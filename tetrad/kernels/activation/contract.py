"""The gated activation of an MLP."""

from __future__ import annotations

from tetrad.kernels.contract import Argument, Contract, case

CONTRACT = Contract(
    name="activation",
    summary="silu(gate) * up, in fp32, rounded once",
    arguments=(
        Argument("gate", "[T, F]", "activation", "gate projection; may be a slice of wider rows"),
        Argument("up", "[T, F]", "activation", "up projection; may be a slice of wider rows"),
    ),
    results=(Argument("hidden", "[T, F]", "activation", "gate * sigmoid(gate) * up"),),
    cases=(case("few rows", T=3, F=48), case("one row", T=1, F=64), case("odd", T=5, F=37)),
    flops=lambda c: 5.0 * c["T"] * c["F"],
    bytes=lambda c, size: 3.0 * c["T"] * c["F"] * size,
    tolerance={"float32": 1e-6, "bfloat16": 4e-3},
)
