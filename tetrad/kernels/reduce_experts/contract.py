"""Adding up what a token's experts computed."""

from __future__ import annotations

from tetrad.kernels.contract import Argument, Case, Contract, case


def _added(case: Case) -> int:
    """How many of `shared` and `residual` are there."""
    return int(case["shared"]) + int(case["residual"])


def _bytes(case: Case, size: int) -> float:
    rows = case["T"] * (case["K"] * (1 - case["dropped"]) + 1 + _added(case))
    return float(rows * case["D"] * size + case["T"] * case["K"] * 12)


def _case(name: str, **values: object) -> Case:
    return case(name, **({"shared": True, "residual": True, "dropped": 0.0} | values))


CONTRACT = Contract(
    name="reduce_experts",
    summary="weighted sum of a token's rows in slot order, plus `shared` and `residual`, in fp32",
    arguments=(
        Argument("rows", "[T * K, D]", "activation", "what each slot's expert computed"),
        Argument("ids", "[T, K]", "int64", "expert of each slot; below 0: its row is never read"),
        Argument("slot_weights", "[T, K]", "float32", "weight of each slot, from route"),
        Argument("shared", "[T, D]", "activation", "added to the sum; or None"),
        Argument("residual", "[T, D]", "activation", "added last; or None"),
    ),
    results=(Argument("y", "[T, D]", "activation", "rounded once; zero where nothing was added"),),
    cases=(
        _case("some dropped", T=5, K=3, D=48, dropped=0.4),
        _case("one token", T=1, K=2, D=64, shared=False, residual=False),
        _case("odd width", T=4, K=4, D=37, residual=False),
        _case("everything dropped", T=3, K=2, D=16, dropped=1.0, shared=False, residual=False),
        _case("residual alone", T=3, K=2, D=16, dropped=1.0, shared=False),
        _case("many tokens, most dropped", T=260, K=3, D=40, dropped=0.8),
        _case("many tokens, wide", T=1025, K=1, D=1030, dropped=0.5, residual=False),
        _case("glm", T=3, K=8, D=6144),
    ),
    flops=lambda c: (2.0 * c["K"] + _added(c)) * c["T"] * c["D"],
    bytes=_bytes,
    tolerance={"float32": 1e-6, "bfloat16": 4e-3},
)
