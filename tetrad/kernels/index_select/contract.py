"""The keys with the best index scores."""

from __future__ import annotations

from tetrad.kernels.contract import Argument, Contract, case

CONTRACT = Contract(
    name="index_select",
    summary="positions of a row's `topk` largest scores; NaN first, ties to the lowest position",
    arguments=(
        Argument("scores", "[T, M]", "float32", "from index_score; -inf where a key is not seen"),
        Argument("topk", "", "int", "how many to choose at most"),
        Argument(
            "seen", "[T]", "int32", "columns that count in each row; others are not looked at"
        ),
    ),
    results=(
        Argument(
            "selected", "[T, topk]", "int32", "positions, in any order; -1 where there are too few"
        ),
    ),
    cases=(
        case("ties at the edge", T=6, M=40, topk=16, ties=True),
        case("one row", T=1, M=100, topk=64, ties=False),
        case("fewer keys than topk", T=3, M=5, topk=16, ties=False),
        case("exactly topk", T=3, M=16, topk=16, ties=True),
        case("long", T=2, M=3000, topk=2048, ties=True),
        case("in stretches", T=3, M=20000, topk=64, ties=True),
    ),
    flops=lambda _case: 0.0,
    bytes=lambda c, _size: 4.0 * c["T"] * (c["M"] + c["topk"]),
    tolerance={"float32": 0.0, "bfloat16": 0.0},
)
