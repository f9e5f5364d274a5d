"""The shapes at which a real model calls each op: from its dimensions, its ranks and a load.

`tp` splits heads, dense and shared widths; `core/ranks.py` says how experts lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from tetrad.core.arch import ModelArch
from tetrad.core.keys import ACTIVATION, KeyFormat
from tetrad.core.ranks import Ranks
from tetrad.core.step import PAGE_TOKENS
from tetrad.formats.weights import NVFP4_BLOCK
from tetrad.kernels.contract import Case, case

Routing = Literal["uniform", "random", "skewed"]

MOST_SEQUENCES = 256
"""More rows than this are taken for one prompt's, fewer for as many decodes."""
MOST_SAMPLED = 256
"""Sequences that get a token in one step; the other rows of a large step belong to prompts."""
SORT_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Load:
    """What one step brings."""

    tokens: int
    """Rows of the step, over all ranks."""
    routing: Routing = "random"
    context: int = 4096
    """Keys that a decoding sequence holds."""
    tokens_per_expert: int | None = None
    """The experts' load, where it is given instead of `tokens`."""
    keys: KeyFormat = ACTIVATION
    """How keys are cached."""


def cases_for(op: str, arch: ModelArch, ranks: Ranks, load: Load) -> tuple[Case, ...]:
    """The calls of `op` in one layer, first the one that tells backends apart best; () when the
    shapes of `op` do not depend on a model."""
    if op not in _RULES:
        return ()
    found = _RULES[op](arch, ranks, load)
    return tuple(replace(each, is_large=True) for each in found)


def _rms_norm(arch: ModelArch, _ranks: Ranks, load: Load) -> list[Case]:
    return [case(f"hidden {arch.hidden}", T=load.tokens, W=arch.hidden, eps=arch.norm_eps)]


def _add_rms_norm(arch: ModelArch, ranks: Ranks, load: Load) -> list[Case]:
    values = {"T": load.tokens, "W": arch.hidden, "eps": arch.norm_eps, "more": ranks.attn_dp > 1}
    return [Case(f"hidden {arch.hidden}", values)]


def _latents(arch: ModelArch, _ranks: Ranks, load: Load) -> list[Case]:
    mla, index = arch.mla, arch.indexer
    values = {
        "P": 2 * -(-load.tokens // PAGE_TOKENS),
        "Q": mla.q_lora_rank,
        "C": mla.kv_lora_rank,
        "R": mla.rope_dim,
        "interleaved": index.rope_interleaved,
        "joined": True,
        "keys": load.keys,
    }
    return [
        case(f"{mla.q_lora_rank}, {mla.latent_dim}, {width}", T=load.tokens, I=width, **values)
        for width in (index.head_dim, 0)
    ]


def _rope(arch: ModelArch, _ranks: Ranks, load: Load) -> list[Case]:
    index, rotated = arch.indexer, arch.mla.rope_dim
    name = f"index queries, {rotated} of {index.num_heads} times {index.head_dim}"
    sizes = {"T": load.tokens, "H": index.num_heads, "R": rotated, "W": index.head_dim}
    return [case(name, interleaved=index.rope_interleaved, **sizes)]


def _absorb(arch: ModelArch, ranks: Ranks, load: Load) -> list[Case]:
    mla, heads = arch.mla, arch.mla.num_heads // ranks.tp
    widths = {"N": mla.nope_dim, "C": mla.kv_lora_rank, "R": mla.rope_dim}
    name = f"{heads} heads, {mla.nope_dim} to {mla.kv_lora_rank}"
    return [case(name, T=load.tokens, H=heads, **widths)]


def _head_linear(arch: ModelArch, ranks: Ranks, load: Load) -> list[Case]:
    mla, heads = arch.mla, arch.mla.num_heads // ranks.tp
    name = f"{heads} heads, {mla.kv_lora_rank} to {mla.v_dim}"
    return [case(name, T=load.tokens, H=heads, W=mla.kv_lora_rank, O=mla.v_dim)]


def _linear(arch: ModelArch, ranks: Ranks, load: Load) -> list[Case]:
    """A quantised one first: dense ones go to cuBLAS in every backend."""
    mla, hidden = arch.mla, arch.hidden
    heads = mla.num_heads // ranks.tp
    shared = arch.moe.shared_intermediate // ranks.tp
    quantised = ("nvfp4", "fp8_block", "bf16")
    matrices = {
        "shared gate": (shared, hidden, quantised),
        "shared down": (hidden, shared, quantised),
        "dense gate": (arch.dense_intermediate // ranks.tp, hidden, quantised),
        "o": (hidden, heads * mla.v_dim, quantised),
        "q_b": (heads * (mla.nope_dim + mla.rope_dim), mla.q_lora_rank, ("bf16",)),
    }
    return [
        case(f"{name}, {stored}", T=load.tokens, out=out, width=width, format=stored)
        for name, (out, width, formats) in matrices.items()
        for stored in formats
        if stored != "nvfp4" or width % NVFP4_BLOCK == 0
    ]


def _activation(arch: ModelArch, ranks: Ranks, load: Load) -> list[Case]:
    widths = {
        "shared": arch.moe.shared_intermediate // ranks.tp,
        "dense": arch.dense_intermediate // ranks.tp,
    }
    return [case(f"{name} {width}", T=load.tokens, F=width) for name, width in widths.items()]


def _route(arch: ModelArch, ranks: Ranks, load: Load) -> list[Case]:
    moe = arch.moe
    return [
        case(
            f"{moe.experts_per_token} of {moe.num_experts}",
            T=load.tokens,
            E=moe.num_experts,
            K=moe.experts_per_token,
            groups=moe.num_groups,
            chosen=moe.groups_per_token,
            normalise=moe.normalise_weights,
            held=(0, moe.num_experts // ranks.ep),
        )
    ]


def _router(arch: ModelArch, ranks: Ranks, load: Load) -> list[Case]:
    """With the shared expert and alone; and attention's front, with an indexer."""
    experts, shared = arch.moe.num_experts, arch.moe.shared_intermediate // ranks.tp
    mla, index = arch.mla, arch.indexer
    front = (mla.q_lora_rank, mla.latent_dim, index.head_dim, index.num_heads)
    outs = {
        f"{experts} + 2 * {shared}": experts + 2 * shared,
        f"{experts}": experts,
        " + ".join(map(str, front)): sum(front),
    }
    return [
        case(name, T=load.tokens, out=out, width=arch.hidden, format="bf16")
        for name, out in outs.items()
    ]


def _route_activate(arch: ModelArch, ranks: Ranks, load: Load) -> list[Case]:
    width = arch.moe.shared_intermediate // ranks.tp
    return [
        case(f"{routed.name}, shared {width}", **routed.values, F=width)
        for routed in _route(arch, ranks, load)
    ]


def _sort_tokens(arch: ModelArch, ranks: Ranks, load: Load) -> list[Case]:
    moe = arch.moe
    local = moe.num_experts // ranks.ep
    return [
        case(
            f"{local} experts, tiles of {SORT_BLOCK}",
            T=load.tokens,
            K=moe.experts_per_token,
            E=local,
            used=local,
            block=SORT_BLOCK,
            small_block=SORT_BLOCK,
            dropped=1.0 - 1.0 / ranks.ep,
        )
    ]


def _reduce_experts(arch: ModelArch, ranks: Ranks, load: Load) -> list[Case]:
    slots = arch.moe.experts_per_token
    values = {"D": arch.hidden, "shared": True, "residual": True, "dropped": 1.0 - 1.0 / ranks.ep}
    return [case(f"{slots} of {arch.hidden}", T=load.tokens, K=slots, **values)]


def _experts(arch: ModelArch, ranks: Ranks, load: Load) -> list[Case]:
    moe = arch.moe
    local = moe.num_experts // ranks.ep
    values = {
        "E": local,
        "used": local,
        "D": arch.hidden,
        "F": moe.intermediate // ranks.expert_tp,
        "format": "nvfp4",
        "down_format": "nvfp4",
        "shared": True,
        "residual": True,
        "dropped": 0.0,
    }
    is_plain = load.tokens_per_expert is None and load.routing == "random" and ranks.ep == 1
    if is_plain:
        name = f"{local} experts, random"
        return [case(name, T=load.tokens, K=moe.experts_per_token, **values)]
    counts = rows_per_expert(arch, ranks, load)
    if sum(counts) == 0:
        return []
    name = f"{local} experts, {load.routing}"
    return [case(name, T=sum(counts), K=1, rows_per_expert=counts, **values)]


def rows_per_expert(arch: ModelArch, ranks: Ranks, load: Load) -> tuple[int, ...]:
    """(token, slot) rows that each expert of rank 0 gets.

    "uniform": as even as can be. "random": each token takes the best of Gaussian scores. "skewed":
    every expert's scores have a Gaussian bias of their own.
    """
    moe = arch.moe
    local = moe.num_experts // ranks.ep
    if load.routing == "uniform":
        if load.tokens_per_expert is not None:
            return (load.tokens_per_expert,) * local
        rows = load.tokens * moe.experts_per_token // ranks.ep
        return tuple(rows // local + (expert < rows % local) for expert in range(local))
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(moe.num_experts, generator=generator)
    scores = torch.randn(step_tokens(arch, load), moe.num_experts, generator=generator)
    if load.routing == "skewed":
        scores += bias
    chosen = scores.topk(moe.experts_per_token, dim=-1).indices
    counts: list[int] = chosen.flatten().bincount(minlength=moe.num_experts)[:local].tolist()
    return tuple(counts)


def step_tokens(arch: ModelArch, load: Load) -> int:
    """Tokens of the step that brings `load` to the experts."""
    if load.tokens_per_expert is None:
        return load.tokens
    return max(1, load.tokens_per_expert * arch.moe.num_experts // arch.moe.experts_per_token)


def _lens(load: Load) -> tuple[tuple[int, int], ...]:
    """As many decodes, or one prompt."""
    if load.tokens <= MOST_SEQUENCES:
        return ((1, load.context),) * load.tokens
    return ((load.tokens, max(load.tokens, load.context)),)


def _index_score(arch: ModelArch, _ranks: Ranks, load: Load) -> list[Case]:
    index = arch.indexer
    lens = _lens(load)
    name = f"{lens[0][1]} keys"
    return [case(name, lens=lens, X=index.num_heads, I=index.head_dim, keys=load.keys)]


def _index_select(arch: ModelArch, _ranks: Ranks, load: Load) -> list[Case]:
    topk, num_keys = arch.indexer.topk, _lens(load)[0][1]
    name = f"{topk} of {num_keys}"
    return [case(name, T=load.tokens, M=num_keys, topk=topk, ties=False)]


def _mla(arch: ModelArch, ranks: Ranks, load: Load) -> list[Case]:
    mla, topk = arch.mla, arch.indexer.topk
    heads = mla.num_heads // ranks.tp
    is_sparse = max(kv_len for _, kv_len in _lens(load)) > topk
    values = {"H": heads, "C": mla.kv_lora_rank, "R": mla.rope_dim, "keys": load.keys}
    name = f"{heads} heads, {topk if is_sparse else 'all'} of {load.context} keys"
    return [case(name, lens=_lens(load), topk=topk if is_sparse else 0, **values)]


def _finite_rows(arch: ModelArch, _ranks: Ranks, load: Load) -> list[Case]:
    rows = min(load.tokens, MOST_SAMPLED)
    return [case(f"{rows} rows of {arch.vocab}", R=rows, V=arch.vocab, spoiled=False)]


def _sample(arch: ModelArch, _ranks: Ranks, load: Load) -> list[Case]:
    rows = min(load.tokens, MOST_SAMPLED)
    return [case(f"{rows} rows of {arch.vocab}", R=rows, V=arch.vocab, rules=False)]


_RULES: Mapping[str, Callable[[ModelArch, Ranks, Load], list[Case]]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "latents": _latents,
    "rope": _rope,
    "head_linear": _head_linear,
    "absorb": _absorb,
    "linear": _linear,
    "activation": _activation,
    "router": _router,
    "route": _route,
    "route_activate": _route_activate,
    "sort_tokens": _sort_tokens,
    "experts": _experts,
    "reduce_experts": _reduce_experts,
    "index_score": _index_score,
    "index_select": _index_select,
    "mla": _mla,
    "finite_rows": _finite_rows,
    "sample": _sample,
}
