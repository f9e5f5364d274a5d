"""Inputs of latent attention, and the answer row by row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tetrad.core.keys import FP8
from tetrad.formats import fp8_keys
from tetrad.kernels.backend import Check
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw, rows_of, sequence_slots
from tetrad.kernels.key_checks import latents_of


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Pages are scattered, slots no sequence owns are NaN, selections are random and unsorted."""
    draw = Draw.of(case, dtype, device)
    ragged = draw.ragged(case["lens"])
    width = case["C"] + case["R"]
    selected = None
    if topk := case["topk"]:
        selected = torch.full((sum(ragged.query_lens), topk), -1, dtype=torch.int32)
        for row, _, seen in rows_of(ragged):
            positions = draw.permutation(seen)[:topk]
            selected[row, : len(positions)] = positions.int().cpu()
        selected = selected.to(device)
    queries = draw.normal(sum(ragged.query_lens), case["H"], width)
    pool = draw.pool(case["lens"], ragged, width)
    if case["keys"] == FP8:
        pool = fp8_keys.encode_latents(pool[..., : case["C"]], pool[..., case["C"] :])
    return {
        "queries": queries,
        "pool": pool,
        "ragged": ragged,
        "selected": selected,
        "scale": width**-0.5,
        "latent_rank": case["C"],
    }


def expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """A softmax per row and head over the keys it reads."""
    ragged, selected = inputs["ragged"], inputs["selected"]
    queries = inputs["queries"].cpu().double()
    flat = latents_of(inputs["pool"].cpu(), inputs["latent_rank"]).flatten(0, 1)
    out = []
    for row, sequence, seen in rows_of(ragged):
        keys = flat[sequence_slots(ragged, sequence)[:seen]]
        if selected is not None:
            keys = keys[[p for p in selected[row].tolist() if p >= 0]]
        exponentials = (queries[row] @ keys.T * inputs["scale"]).exp()
        weights = exponentials / exponentials.sum(-1, keepdim=True)
        out.append(weights @ keys[:, : inputs["latent_rank"]])
    return (torch.stack(out),)


CHECK = Check(inputs, expected)
