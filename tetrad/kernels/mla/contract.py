"""Multi-head latent attention in absorbed form over the paged latent cache."""

from __future__ import annotations

from tetrad.kernels.contract import Argument, Case, Contract, case, num_rows, ragged_pairs


def _pairs(case: Case) -> float:
    """(query, key) pairs that are read: all seen ones, or at most `topk` a row."""
    if not case["topk"]:
        return float(ragged_pairs(case["lens"]))
    return float(
        sum(
            min(case["topk"], kv_len - query_len + i + 1)
            for query_len, kv_len in case["lens"]
            for i in range(query_len)
        )
    )


def _keys(case: Case) -> float:
    """Keys that must be read once: rows of one sequence may share them."""
    topk = case["topk"]
    return float(
        sum(min(kv_len, query_len * topk) if topk else kv_len for query_len, kv_len in case["lens"])
    )


CONTRACT = Contract(
    name="mla",
    summary="softmax(scale * query . latent) over seen or selected keys, times their first C",
    arguments=(
        Argument("queries", "[T, H, C + R]", "activation", "absorbed latent query, rotary query"),
        Argument(
            "pool", "[P, PAGE_TOKENS, C + R]", "activation", "latents; unwritten slots are NaN"
        ),
        Argument(
            "ragged",
            "",
            "Ragged",
            "lengths and pages of the step's sequences; one of kv_len 0 fills up a batch, and its "
            "rows are zeros",
        ),
        Argument(
            "selected",
            "[T, K]",
            "int32",
            "key positions each row reads, -1 for none; None: all seen. A row of -1 gives zeros",
        ),
        Argument("scale", "", "float", "multiplies query . latent"),
        Argument("latent_rank", "", "int", "C"),
    ),
    results=(
        Argument(
            "output", "[T, H, C]", "activation", "attention-weighted latents, softmax in fp32"
        ),
    ),
    cases=(
        case("mixed step", lens=((1, 70), (3, 5), (1, 1), (66, 130)), H=3, C=16, R=8, topk=0),
        case("selected, glm widths", lens=((1, 100), (2, 90)), H=64, C=512, R=64, topk=80),
        case("selected", lens=((1, 70), (3, 5), (20, 130)), H=3, C=16, R=8, topk=16),
        case("filled up", lens=((1, 65), (1, 0), (2, 3), (1, 0)), H=3, C=16, R=8, topk=0),
        case("selected, filled up", lens=((1, 65), (1, 0), (2, 3)), H=3, C=16, R=8, topk=16),
        case("decode", lens=((1, 65), (1, 64), (1, 200)), H=4, C=32, R=8, topk=0),
        case("selected decode", lens=((1, 65), (1, 3), (1, 200)), H=4, C=32, R=8, topk=32),
        case("one token", lens=((1, 1),), H=1, C=8, R=2, topk=0),
        case("prompt", lens=((9, 9),), H=2, C=24, R=4, topk=0),
        case("glm widths", lens=((1, 100), (2, 90)), H=64, C=512, R=64, topk=0),
    ),
    flops=lambda c: 2.0 * _pairs(c) * c["H"] * (2 * c["C"] + c["R"]),
    bytes=lambda c, size: (
        _keys(c) * (c["C"] + c["R"]) * size
        + num_rows(c["lens"]) * c["H"] * (2 * c["C"] + c["R"]) * size
    ),
    tolerance={"float32": 2e-6, "bfloat16": 4e-3},
)
