"""Grouped-query attention over a paged cache of keys and values."""

from __future__ import annotations

from typing import Any

from tetrad.kernels.contract import Argument, Case, Contract, num_keys, num_rows, ragged_pairs


def _case(name: str, lens: tuple[tuple[int, int], ...], heads: int, groups: int, w: int) -> Case:
    values: dict[str, Any] = {"lens": lens, "H": heads, "G": groups, "W": w}
    return Case(name, values)


CONTRACT = Contract(
    name="gqa",
    summary="causal softmax attention in which H / G query heads share one key and value",
    arguments=(
        Argument("queries", "[T, H, W]", "activation", "rotated"),
        Argument(
            "pool",
            "[P, PAGE_TOKENS, 2 G W]",
            "activation",
            "of each token the keys of all G heads, then their values. Unwritten slots are NaN",
        ),
        Argument(
            "ragged",
            "",
            "Ragged",
            "lengths and pages of the step's sequences; one of kv_len 0 fills up a batch, and its "
            "rows are zeros",
        ),
        Argument("scale", "", "float", "multiplies query . key"),
    ),
    results=(Argument("output", "[T, H, W]", "activation", "weighted values, softmax in fp32"),),
    cases=(
        _case("mixed step", ((1, 70), (3, 5), (1, 1), (66, 130)), 6, 2, 16),
        _case("filled up", ((1, 65), (1, 0), (2, 3), (1, 0)), 3, 3, 8),
        _case("decode", ((1, 65), (1, 64), (1, 200)), 9, 3, 64),
        _case("decode of equals", ((1, 65), (1, 65)), 4, 1, 32),
        _case("one token", ((1, 1),), 2, 1, 8),
        _case("prompt", ((9, 9),), 4, 2, 24),
        _case("prompts", ((70, 70), (65, 65), (3, 3)), 9, 3, 64),
    ),
    flops=lambda c: 4.0 * ragged_pairs(c["lens"]) * c["H"] * c["W"],
    bytes=lambda c, size: (
        2.0 * (num_keys(c["lens"]) * c["G"] + num_rows(c["lens"]) * c["H"]) * c["W"] * size
    ),
    tolerance={"float32": 2e-6, "bfloat16": 4e-3},
)
