"""Inputs of the index scores, and the answer key by key."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tetrad.core.keys import FP8
from tetrad.formats import fp8_keys
from tetrad.kernels.backend import Check
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw, rows_of, sequence_slots
from tetrad.kernels.key_checks import index_keys_of


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Pages are scattered; every slot no sequence owns is NaN. Weights are slices of wider rows."""
    draw = Draw.of(case, dtype, device)
    ragged = draw.ragged(case["lens"])
    rows = sum(ragged.query_lens)
    queries = draw.normal(rows, case["X"], case["I"])
    weights = draw.normal(rows, case["X"] + 3, dtype=torch.float32)[:, : case["X"]]
    pool = draw.pool(case["lens"], ragged, case["I"])
    return {
        "queries": queries,
        "weights": weights,
        "pool": fp8_keys.encode_index_keys(pool) if case["keys"] == FP8 else pool,
        "ragged": ragged,
    }


def expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Row by row over the keys it sees."""
    ragged = inputs["ragged"]
    queries, weights = inputs["queries"].cpu().double(), inputs["weights"].cpu().double()
    flat = index_keys_of(inputs["pool"].cpu(), queries.shape[-1]).flatten(0, 1)
    out = torch.full((len(queries), max(ragged.kv_lens_host)), -torch.inf, dtype=torch.float64)
    for row, sequence, seen in rows_of(ragged):
        keys = flat[sequence_slots(ragged, sequence)[:seen]]
        out[row, :seen] = (queries[row] @ keys.T).clamp(min=0).T @ weights[row]
    return (out,)


CHECK = Check(inputs, expected)
