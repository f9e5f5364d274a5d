"""What attention makes of its products with x: the query's latent, and the step's cached keys."""

from __future__ import annotations

from tetrad.kernels.contract import Argument, Case, Contract, case

_INDEX = "of the sparse indexer; None: the layer has none"


def _numbers(case: Case) -> float:
    """Of a token, in the joined products."""
    return float(case["Q"] + case["C"] + case["R"] + case["I"])


CONTRACT = Contract(
    name="latents",
    summary=(
        "norm the query latent; norm the key latent, rotate the key behind it, write both to the "
        "token's slot; the same of an index key by layer norm and rotation of its first R columns"
    ),
    arguments=(
        Argument("query", "[T, Q]", "any", "float32 or activation; may be a slice of wider rows"),
        Argument("key", "[T, C + R]", "any", "latent, then rotary key; pairs are (2i, 2i + 1)"),
        Argument("index_key", "[T, I]", "any", _INDEX),
        Argument("query_weight", "[Q]", "activation", "of the RMS norm"),
        Argument("key_weight", "[C]", "activation", "of the RMS norm"),
        Argument("index_weight", "[I]", "float32", f"scale of the layer norm {_INDEX}"),
        Argument("index_bias", "[I]", "float32", f"bias of the layer norm {_INDEX}"),
        Argument("eps", "", "float", "of both RMS norms"),
        Argument("index_eps", "", "float", "of the layer norm"),
        Argument("cos", "[T, R/2]", "float32", "cosine of each pair's angle"),
        Argument("sin", "[T, R/2]", "float32", "sine of each pair's angle"),
        Argument(
            "index_interleaved", "", "bool", "the index key's pairs; else half-split, (i, i + R/2)"
        ),
        Argument("slots", "[T]", "int64", "page * PAGE_TOKENS + offset; all different"),
        Argument("pool", "[P, PAGE_TOKENS, C + R]", "activation", "changed in place"),
        Argument("index_pool", "[P, PAGE_TOKENS, I]", "activation", f"changed in place; {_INDEX}"),
    ),
    results=(
        Argument("latent", "[T, Q]", "activation", "normed query latent, rounded once"),
        Argument("pool", "[P, PAGE_TOKENS, C + R]", "activation", "the same pool"),
        Argument("index_pool", "[P, PAGE_TOKENS, I]", "activation", "the same pool, or None"),
    ),
    cases=(
        case("joined", T=5, P=3, Q=48, C=32, R=8, I=24, interleaved=True, joined=True),
        case("apart, half-split", T=3, P=1, Q=37, C=19, R=6, I=11, interleaved=False, joined=False),
        case("no index key", T=4, P=1, Q=48, C=32, R=8, I=0, interleaved=True, joined=True),
        case("no index key, apart", T=1, P=1, Q=64, C=16, R=2, I=0, interleaved=True, joined=False),
        case("index key all rotated", T=1, P=1, Q=8, C=8, R=4, I=4, interleaved=False, joined=True),
        case("glm", T=70, P=4, Q=2048, C=512, R=64, I=128, interleaved=True, joined=True),
    ),
    flops=lambda c: c["T"] * (4.0 * (c["Q"] + c["C"]) + 3.0 * c["R"] + 7.0 * c["I"]),
    bytes=lambda c, size: (
        c["T"] * (_numbers(c) * (size + (4 if c["joined"] else size)) + 4.0 * c["R"] + 8.0)
        + (c["Q"] + c["C"]) * size
        + 8.0 * c["I"]
    ),
    tolerance={"float32": 1e-6, "bfloat16": 4e-3},
)
