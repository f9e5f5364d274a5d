"""Multi-head latent attention in absorbed form over the paged latent cache."""

from __future__ import annotations

from tetrad.core.keys import ACTIVATION, FP8, KeyFormat, latent_bytes
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


def key_bytes(case: Case, size: int) -> int:
    """Of one key; `size`: of an activation."""
    return latent_bytes(case["keys"], case["C"], case["R"], size)


def _case(
    name: str,
    lens: tuple[tuple[int, int], ...],
    heads: int,
    rank: int,
    rotary: int,
    *,
    topk: int = 0,
    keys: KeyFormat = ACTIVATION,
) -> Case:
    return case(name, lens=lens, H=heads, C=rank, R=rotary, topk=topk, keys=keys)


CONTRACT = Contract(
    name="mla",
    summary="softmax(scale * query . latent) over seen or selected keys, times their first C",
    arguments=(
        Argument("queries", "[T, H, C + R]", "activation", "absorbed latent query, rotary query"),
        Argument(
            "pool",
            "[P, PAGE_TOKENS, C + R]",
            "activation",
            "latents; or FP8 as formats/fp8_keys.py has it, uint8 [P, PAGE_TOKENS, bytes]. "
            "Unwritten slots are NaN",
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
        _case("mixed step", ((1, 70), (3, 5), (1, 1), (66, 130)), 3, 16, 8),
        _case("selected, glm widths", ((1, 100), (2, 90)), 64, 512, 64, topk=80),
        _case("mixed step, fp8", ((1, 70), (3, 5), (1, 1), (66, 130)), 3, 16, 8, keys=FP8),
        _case("selected, fp8", ((1, 100), (2, 90)), 64, 512, 64, topk=80, keys=FP8),
        _case("selected", ((1, 70), (3, 5), (20, 130)), 3, 16, 8, topk=16),
        _case("filled up", ((1, 65), (1, 0), (2, 3), (1, 0)), 3, 16, 8),
        _case("selected, filled up", ((1, 65), (1, 0), (2, 3)), 3, 16, 8, topk=16),
        _case("filled up, fp8", ((1, 65), (1, 0), (2, 3)), 3, 160, 8, topk=16, keys=FP8),
        _case("decode", ((1, 65), (1, 64), (1, 200)), 4, 32, 8),
        _case("selected decode", ((1, 65), (1, 3), (1, 200)), 4, 32, 8, topk=32),
        _case("one token", ((1, 1),), 1, 8, 2),
        _case("one token, fp8", ((1, 1),), 1, 8, 2, keys=FP8),
        _case("prompt", ((9, 9),), 2, 24, 4),
        _case("glm widths", ((1, 100), (2, 90)), 64, 512, 64),
        _case("glm widths, fp8", ((1, 100), (2, 90)), 64, 512, 64, keys=FP8),
    ),
    flops=lambda c: 2.0 * _pairs(c) * c["H"] * (2 * c["C"] + c["R"]),
    bytes=lambda c, size: (
        _keys(c) * key_bytes(c, size) + num_rows(c["lens"]) * c["H"] * (2 * c["C"] + c["R"]) * size
    ),
    tolerance={"float32": 2e-6, "bfloat16": 4e-3},
)
