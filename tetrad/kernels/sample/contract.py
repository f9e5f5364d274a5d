"""Choosing the next token."""

from __future__ import annotations

from tetrad.kernels.contract import Argument, Contract, case

CONTRACT = Contract(
    name="sample",
    summary="greedy or filtered random choice of one token a row, fixed by one uniform number",
    arguments=(
        Argument("logits", "[R, V]", "float32", "penalties and biases already applied"),
        Argument(
            "temperature", "[R]", "float32", "divides logits; 0: greedy. None: every row is greedy"
        ),
        Argument("top_k", "[R]", "int64", "keep this many tokens; 0 keeps all"),
        Argument("top_p", "[R]", "float32", "of those, the fewest whose share reaches this"),
        Argument("min_p", "[R]", "float32", "of those, at least this share of the best one's"),
        Argument("uniform", "[R]", "float32", "in [0, 1): where to draw; kept tokens lie by id"),
    ),
    results=(Argument("ids", "[R]", "int64", "token per row; of equal logits the lower id first"),),
    cases=(
        case("every rule", R=8, V=40, rules=True),
        case("one greedy row", R=1, V=33, rules=False),
        case("plain", R=5, V=300, rules=False),
        case("large vocabulary", R=8, V=9001, rules=True),
    ),
    flops=lambda c: 5.0 * c["R"] * c["V"],
    bytes=lambda c, _size: 4.0 * c["R"] * (c["V"] + 7),
    tolerance={"float32": 0.0, "bfloat16": 0.0},
)
