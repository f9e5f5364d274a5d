"""FlashInfer's attention over packed FP8 latents, for Blackwell workstations.

Read from the sources of version 0.7.4 (`flashinfer/mla`, `csrc/sparse_mla_sm120`): it takes a row's
keys as slots of the pool, -1 for none, and the 656 bytes of a latent as `formats/fp8_keys.py` lays
them out; scales that are powers of two are its DeepSeek-V3.2 format. It multiplies in FP8, so that
queries and softmax weights are rounded too. Not run on hardware.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tetrad.core.hardware import DeviceSnapshot
from tetrad.core.keys import FP8, latent_bytes
from tetrad.core.step import PAGE_TOKENS
from tetrad.kernels.backend import Backend, Rounding
from tetrad.kernels.experts.flashinfer_parts import why_not as package_why_not
from tetrad.kernels.mla import check
from tetrad.kernels.mla import triton as portable
from tetrad.kernels.ragged import Ragged

CAPABILITIES = ((12, 0), (12, 1))
RANK, ROTARY = 512, 64
MOST_HEADS = 128
KEYS_ALIGNMENT = 64
"""Its kernel for many rows takes whole tiles of keys."""
WORKSPACE_BYTES = 128 << 20


def why_not(device: DeviceSnapshot) -> str | None:
    """None, or why it cannot run on `device`, and what would cure it."""
    return package_why_not(device, CAPABILITIES, ("flashinfer",))


def run(
    queries: Tensor,
    pool: Tensor,
    ragged: Ragged,
    selected: Tensor | None,
    scale: float,
    latent_rank: int,
) -> Tensor:
    """What is not made of FP8 latents of 512 + 64 numbers and bf16 queries, `triton` computes."""
    num_rows, num_heads, width = queries.shape
    is_made_for = (
        pool.dtype == torch.uint8
        and pool.shape[-1] == latent_bytes(FP8, RANK, ROTARY, 2)
        and (latent_rank, width) == (RANK, RANK + ROTARY)
        and queries.dtype == torch.bfloat16
        and num_heads <= MOST_HEADS
    )
    if not is_made_for:
        return portable.run(queries, pool, ragged, selected, scale, latent_rank)
    slots = slots_of(ragged, selected)
    num_keys = slots.shape[1]
    out: Tensor = _function()(
        query=queries.unsqueeze(1),
        kv_cache=pool,
        workspace_buffer=_workspace(queries.device),
        qk_nope_head_dim=RANK,
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROTARY,
        block_tables=slots.unsqueeze(1),
        seq_lens=None,
        max_seq_len=num_keys,
        sparse_mla_top_k=num_keys,
        bmm1_scale=scale,
        backend="sparse",
        kv_scale_format="pow2_fp32",
    )
    return out.view(num_rows, num_heads, RANK)


def slots_of(ragged: Ragged, selected: Tensor | None) -> Tensor:
    """[T, K] int32: where the keys lie that each row reads, -1 for none, K a multiple of 64."""
    if selected is None:
        num_keys = ragged.page_table.shape[1] * PAGE_TOKENS
        selected = torch.arange(num_keys, dtype=torch.int32, device=ragged.page_table.device)
        selected = selected.expand(sum(ragged.query_lens), num_keys)
    is_key = (selected >= 0) & (selected < ragged.seen[:, None])
    slots = ragged.row_slots(torch.where(is_key, selected, 0).long())
    slots = torch.where(is_key, slots, -1).int()
    return functional.pad(slots, (0, -slots.shape[1] % KEYS_ALIGNMENT), value=-1)


def _function() -> Any:
    return importlib.import_module("flashinfer.mla").trtllm_batch_decode_with_kv_cache_mla


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


BACKEND = Backend(
    "flashinfer_sparse_mla",
    run,
    why_not,
    rounding=Rounding(
        "rounds queries and softmax weights to e4m3 where keys are FP8",
        check.expected,
        {"float32": 0.08, "bfloat16": 0.08},
        deviation=0.08,
    ),
    note="not run on hardware",
)
