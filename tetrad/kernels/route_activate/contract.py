"""What follows the product of a router joined with a shared expert's gate and up."""

from __future__ import annotations

from tetrad.kernels.contract import Argument, Case, Contract, case
from tetrad.kernels.route.contract import CONTRACT as ROUTE


def _case(name: str, **values: object) -> Case:
    return case(name, **({"held": (0, values["E"]), "groups": 1, "chosen": 1} | values))


CONTRACT = Contract(
    name="route_activate",
    summary="route of the first E columns; silu(gate) * up of the others, rounded once",
    arguments=(
        Argument("joined", "[T, E + 2 * F]", "float32", "logits, gate and up side by side"),
        *ROUTE.arguments[1:-2],
        Argument("dtype", "", "torch.dtype", "the activations'"),
        *ROUTE.arguments[-2:],
    ),
    results=(
        *ROUTE.results,
        Argument("hidden", "[T, F]", "activation", "gate * sigmoid(gate) * up"),
    ),
    cases=(
        _case(
            "groups and ties",
            T=6, E=16, K=3, F=24, groups=4, chosen=2, normalise=True, held=(3, 11),
        ),
        _case("one token", T=1, E=8, K=2, F=37, normalise=True),
        _case("not normalised", T=9, E=9, K=4, F=300, normalise=False, held=(2, 6), into=True),
        _case("glm, one rank of eight", T=7, E=256, K=8, F=2048, normalise=True, held=(224, 256)),
        _case("deepseek", T=7, E=256, K=8, F=2048, groups=8, chosen=4, normalise=True),
    ),
    flops=lambda c: c["T"] * (6.0 * c["E"] + 5.0 * c["F"]),
    bytes=lambda c, size: (
        4.0 * (c["T"] * (c["E"] + 2 * c["F"]) + c["E"])
        + c["T"] * (12.0 * c["K"] + c["F"] * size)
    ),
    tolerance={"float32": 1e-6, "bfloat16": 4e-3},
)  # fmt: skip
