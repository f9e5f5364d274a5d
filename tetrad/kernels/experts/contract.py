"""The routed experts of a mixture-of-experts layer."""

from __future__ import annotations

from tetrad.kernels.contract import BITS_PER_WEIGHT, Argument, Case, Contract, case


def touched_experts(case: Case) -> float:
    """Experts that get a token: all of `used`, less those that random routing misses; or those that
    `rows_per_expert` names, where a case has it."""
    if "rows_per_expert" in case.values:
        return float(sum(count > 0 for count in case["rows_per_expert"]))
    tokens, used = case["T"], case["used"]
    chosen = case["K"] * (1.0 - case["dropped"])
    return float(used * (1.0 - (1.0 - chosen / used) ** tokens))


def _flops(case: Case) -> float:
    slots = case["T"] * case["K"] * (1.0 - case["dropped"])
    return float(6 * slots * case["D"] * case["F"])


def _bytes(case: Case, size: int) -> float:
    bits = 2 * BITS_PER_WEIGHT[case["format"]] + BITS_PER_WEIGHT[case["down_format"]]
    weights = touched_experts(case) * case["D"] * case["F"] * bits / 8
    rows = 2 + int(case["shared"]) + int(case["residual"])
    return float(weights + rows * case["T"] * case["D"] * size)


def _case(name: str, tokens: int, used: int, **values: object) -> Case:
    sizes = {"E": 8, "K": 2, "D": 32, "F": 48, "T": tokens, "used": used}
    merged = sizes | {"format": "nvfp4", "shared": True, "residual": True, "dropped": 0.0} | values
    return case(name, **({"down_format": merged["format"]} | merged))


CONTRACT = Contract(
    name="experts",
    summary="each token's K experts, down(silu(gate(x)) * up(x)), summed with what is added",
    arguments=(
        Argument("x", "[T, D]", "activation", "rows"),
        Argument(
            "weight", "[E, F, D] x 2, [E, D, F]", "weight", "gate, up and down of each expert"
        ),
        Argument("ids", "[T, K]", "int64", "a token's experts, all different; below 0: dropped"),
        Argument("slot_weights", "[T, K]", "float32", "weight of each slot, from route"),
        Argument("shared", "[T, D]", "activation", "the shared expert's output, added; or None"),
        Argument("residual", "[T, D]", "activation", "added last; or None"),
    ),
    results=(Argument("y", "[T, D]", "activation", "summed in fp32 in slot order, rounded once"),),
    cases=(
        _case("whole tiles", 5, used=2, E=3, D=512, F=384),
        _case("several tiles of one expert", 60, used=1, E=3, K=1, D=512, F=384, shared=False),
        _case("nvfp4 with empty experts", 5, used=6, residual=False),
        _case("some dropped", 9, used=8, K=3, dropped=0.6),
        _case("one token", 1, used=8),
        _case("one expert has every token", 7, used=1, K=1),
        _case(
            "dense odd sizes", 6, used=8, D=37, F=21, format="bf16", shared=False, residual=False
        ),
        _case("fp8 per tensor", 4, used=8, format="fp8_tensor"),
        _case("fp8 ragged blocks", 4, used=8, D=136, F=144, format="fp8_block"),
        _case("nvfp4 with fp8 down", 5, used=8, down_format="fp8_tensor"),
    ),
    flops=_flops,
    bytes=_bytes,
    tolerance={"float32": 5e-6, "bfloat16": 6e-3},
    prepared="weight",
)
