"""Inputs of the latents, and latents and pools as they should be after."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tetrad.core.keys import FP8, SCALE_BLOCK
from tetrad.core.step import PAGE_TOKENS
from tetrad.formats import fp8_keys
from tetrad.kernels.backend import Check
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw
from tetrad.kernels.key_checks import index_keys_of, latents_of, rounded
from tetrad.kernels.rms_norm import check as rms_norm
from tetrad.kernels.rope import check as rope


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Joined: slices of one fp32 product with another behind them. So small that eps counts, and
    the index key has a mean; slots lie anywhere, and what is not written keeps its value."""
    draw = Draw.of(case, dtype, device)
    tokens, index_width = case["T"], case["I"]
    widths = [case["Q"], case["C"] + case["R"], index_width]
    if case["joined"]:
        product = draw.normal(tokens, sum(widths) + 32, dtype=torch.float32, std=3e-3)
        query, key, index_key, _ = torch.split(product, [*widths, 32], dim=-1)
    else:
        query, key, index_key = (draw.normal(tokens, width, std=3e-3) for width in widths)
    angles = draw.normal(tokens, case["R"] // 2, dtype=torch.float32, std=3.0)
    pages = case["P"], PAGE_TOKENS
    pool, index_pool = (
        draw.normal(*pages, width) for width in (case["C"] + case["R"], index_width)
    )
    if case["keys"] == FP8:
        pool = fp8_keys.encode_latents(pool[..., : case["C"]], pool[..., case["C"] :])
        index_pool = fp8_keys.encode_index_keys(index_pool) if index_width else index_pool
    return {
        "query": query,
        "key": key,
        "index_key": index_key + 0.01 if index_width else None,
        "query_weight": draw.normal(case["Q"]),
        "key_weight": draw.normal(case["C"]),
        "index_weight": draw.normal(index_width, dtype=torch.float32) if index_width else None,
        "index_bias": draw.normal(index_width, dtype=torch.float32) if index_width else None,
        "eps": 1e-5,
        "index_eps": 1e-6,
        "cos": angles.cos(),
        "sin": angles.sin(),
        "index_interleaved": case["interleaved"],
        "slots": draw.permutation(case["P"] * PAGE_TOKENS)[:tokens],
        "pool": pool,
        "index_pool": index_pool if index_width else None,
    }


def expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Row by row in float64."""
    eps, rank = inputs["eps"], len(inputs["key_weight"])
    query, key = inputs["query"].cpu().double(), inputs["key"].cpu().double()
    (latent,) = _normed(query, inputs["query_weight"], eps)
    (key_latent,) = _normed(key[:, :rank], inputs["key_weight"], eps)
    turned = _turned(key[:, rank:], inputs, is_interleaved=True)
    before, is_fp8 = inputs["pool"].cpu(), inputs["pool"].dtype == torch.uint8
    if is_fp8:
        key_latent, turned = rounded(key_latent, SCALE_BLOCK), turned.bfloat16().double()
    both = torch.cat([key_latent, turned], dim=1)
    pool = _written(latents_of(before, rank), inputs["slots"], both)
    if inputs["index_key"] is None:
        return latent, pool, torch.empty(0)
    index_key = _layer_normed(inputs)
    rotary = 2 * inputs["cos"].shape[1]
    turned = _turned(index_key[:, :rotary], inputs, inputs["index_interleaved"])
    index_key = torch.cat([turned, index_key[:, rotary:]], dim=1)
    if is_fp8:
        index_key = rounded(index_key, index_key.shape[1])
    before = index_keys_of(inputs["index_pool"].cpu(), index_key.shape[1])
    return latent, pool, _written(before, inputs["slots"], index_key)


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
    return rms_norm.expected({"x": x, "weight": weight, "eps": eps})


def _turned(x: Tensor, inputs: dict[str, Any], is_interleaved: bool) -> Tensor:
    (rotated,) = rope.expected({**inputs, "x": x.unsqueeze(1), "interleaved": is_interleaved})
    return rotated.squeeze(1)


def _layer_normed(inputs: dict[str, Any]) -> Tensor:
    weight, bias = inputs["index_weight"].cpu().double(), inputs["index_bias"].cpu().double()
    rows = []
    for row in inputs["index_key"].cpu().double():
        values = row.tolist()
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / len(values)
        rows.append((row - mean) / (variance + inputs["index_eps"]) ** 0.5 * weight + bias)
    return torch.stack(rows)


def _written(pool: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    after = pool.clone()
    for slot, row in zip(slots.tolist(), rows, strict=True):
        after[slot // PAGE_TOKENS, slot % PAGE_TOKENS] = row
    return after


def _outputs(result: tuple[Tensor, Tensor, Tensor | None]) -> tuple[Tensor, ...]:
    latent, pool, index_pool = result
    return latent, pool, torch.empty(0) if index_pool is None else index_pool


def _values(inputs: dict[str, Any], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    latent, pool, index_pool = outputs
    if pool.dtype != torch.uint8:
        return outputs
    pool = latents_of(pool.cpu(), len(inputs["key_weight"]))
    if inputs["index_key"] is None:
        return latent, pool, index_pool
    return latent, pool, index_keys_of(index_pool.cpu(), inputs["index_key"].shape[1])


CHECK = Check(inputs, expected, _outputs, _values)
