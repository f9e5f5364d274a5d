"""What attention makes of its products with x: the query's latent, and the step's cached keys."""

from __future__ import annotations

from tetrad.core.keys import ACTIVATION, FP8, index_bytes, latent_bytes
from tetrad.kernels.contract import Argument, Case, Contract, case

_INDEX = "of the sparse indexer; None: the layer has none"
_FP8 = "or FP8 as formats/fp8_keys.py has it, uint8"


def _token_bytes(case: Case, size: int) -> float:
    """What is read and written of a token."""
    numbers: int = case["Q"] + case["C"] + case["R"] + case["I"]
    key = latent_bytes(case["keys"], case["C"], case["R"], size)
    index_key = index_bytes(case["keys"], case["I"], size) if case["I"] else 0
    read = numbers * (4 if case["joined"] else size)
    return float(read + case["Q"] * size + key + index_key + 4 * case["R"] + 8)


_JOINED = {"T": 5, "P": 3, "Q": 48, "C": 32, "R": 8, "I": 24, "interleaved": True, "joined": True}
_APART = {"T": 3, "P": 2, "Q": 37, "C": 20, "R": 6, "I": 12, "interleaved": False, "joined": False}
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
        Argument("pool", "[P, PAGE_TOKENS, C + R]", "activation", f"changed in place; {_FP8}"),
        Argument("index_pool", "[P, PAGE_TOKENS, I]", "activation", f"as `pool` is; {_INDEX}"),
    ),
    results=(
        Argument("latent", "[T, Q]", "activation", "normed query latent, rounded once"),
        Argument("pool", "[P, PAGE_TOKENS, C + R]", "activation", "the same pool"),
        Argument("index_pool", "[P, PAGE_TOKENS, I]", "activation", "the same pool, or None"),
    ),
    cases=(
        case("joined", **_JOINED, keys=ACTIVATION),
        case("apart, half-split", **{**_APART, "C": 19, "I": 11}, keys=ACTIVATION),
        case("joined, fp8", **_JOINED, keys=FP8),
        case("apart, half-split, fp8", **_APART, keys=FP8),
        case("no index key", **{**_JOINED, "I": 0}, keys=ACTIVATION),
        case("no index key, fp8", **{**_JOINED, "I": 0}, keys=FP8),
        case("no index key, apart", **{**_APART, "T": 1, "R": 2, "I": 0}, keys=ACTIVATION),
        case("index key all rotated", **{**_APART, "R": 4, "I": 4}, keys=ACTIVATION),
        case("index key all rotated, fp8", **{**_APART, "R": 4, "I": 4}, keys=FP8),
        case("groups that are not whole, fp8", **{**_JOINED, "C": 160, "I": 40}, keys=FP8),
        case(
            "glm",
            **{**_JOINED, "T": 70, "P": 4, "Q": 2048, "C": 512, "R": 64, "I": 128},
            keys=ACTIVATION,
        ),
    ),
    flops=lambda c: c["T"] * (4.0 * (c["Q"] + c["C"]) + 3.0 * c["R"] + 7.0 * c["I"]),
    bytes=lambda c, size: c["T"] * _token_bytes(c, size) + (c["Q"] + c["C"]) * size + 8.0 * c["I"],
    tolerance={"float32": 1e-6, "bfloat16": 4e-3},
)
