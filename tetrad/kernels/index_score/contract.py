"""The indexer's score of every cached key for every query."""

from __future__ import annotations

from tetrad.core.keys import ACTIVATION, FP8, index_bytes
from tetrad.kernels.contract import Argument, Contract, case, num_keys, num_rows, ragged_pairs

_MIXED = ((1, 70), (3, 5), (1, 1), (66, 130))
_DECODE = ((1, 65), (1, 64), (1, 200))

CONTRACT = Contract(
    name="index_score",
    summary="sum over heads of weight * relu(query . key) for each key at or before the query",
    arguments=(
        Argument("queries", "[T, X, I]", "activation", "rotated indexer queries"),
        Argument("weights", "[T, X]", "float32", "head weights; may be a slice of wider rows"),
        Argument(
            "pool",
            "[P, PAGE_TOKENS, I]",
            "activation",
            "index keys; or FP8 as formats/fp8_keys.py has it, uint8 [P, PAGE_TOKENS, I + 4]. "
            "Unwritten slots are NaN",
        ),
        Argument("ragged", "", "Ragged", "lengths and pages of the step's sequences"),
    ),
    results=(
        Argument(
            "scores", "[T, M]", "float32", "by key position, M = longest kv_len; -inf if not seen"
        ),
    ),
    cases=(
        case("mixed step", lens=_MIXED, X=4, I=16, keys=ACTIVATION),
        case("decode", lens=_DECODE, X=16, I=16, keys=ACTIVATION),
        case("mixed step, fp8", lens=_MIXED, X=4, I=16, keys=FP8),
        case("decode, fp8", lens=_DECODE, X=16, I=16, keys=FP8),
        case("one token", lens=((1, 1),), X=1, I=8, keys=ACTIVATION),
        case("one token, fp8", lens=((1, 1),), X=1, I=8, keys=FP8),
        case("prompt", lens=((9, 9),), X=3, I=24, keys=ACTIVATION),
        case("chunk after a prefix", lens=((5, 133),), X=2, I=128, keys=ACTIVATION),
        case("chunk after a prefix, fp8", lens=((5, 133),), X=2, I=128, keys=FP8),
    ),
    flops=lambda c: 2.0 * ragged_pairs(c["lens"]) * c["X"] * (c["I"] + 1),
    bytes=lambda c, size: (
        num_keys(c["lens"]) * index_bytes(c["keys"], c["I"], size)
        + num_rows(c["lens"]) * c["X"] * c["I"] * size
        + 4.0 * ragged_pairs(c["lens"])
    ),
    tolerance={"float32": 2e-6, "bfloat16": 2e-6},
)
