"""The cache pools and the registry of models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.factories import TINY_GLM
from tetrad.core.arch import MODEL_TYPES, ModelArch
from tetrad.core.keys import FP8
from tetrad.core.step import PAGE_TOKENS
from tetrad.formats import fp8_keys
from tetrad.layers.cache import KvCache
from tetrad.models import registry

ARCH = ModelArch.from_config(TINY_GLM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bytes_per_page_are_what_the_pools_take(dtype: torch.dtype):
    cache = KvCache(ARCH, 3, "cpu", dtype)
    pools = [*cache.latent, *cache.index_keys.values()]
    assert sum(pool.nbytes for pool in pools) == 3 * KvCache.bytes_per_page(ARCH, dtype)
    assert {pool.dtype for pool in pools} == {dtype}


def test_fp8_pools_are_bytes_and_their_poison_is_nan():
    cache = KvCache(ARCH, 3, "cpu", torch.bfloat16, FP8)
    pools = [*cache.latent, *cache.index_keys.values()]
    assert sum(pool.nbytes for pool in pools) == 3 * KvCache.bytes_per_page(
        ARCH, torch.bfloat16, FP8
    )
    assert {pool.dtype for pool in pools} == {torch.uint8}
    cache.poison()
    assert fp8_keys.decode_latents(cache.latent[0], 32).isnan().all()
    slots = torch.arange(3 * PAGE_TOKENS)
    assert fp8_keys.decode_index_keys(cache.index_keys[0], slots).isnan().all()


def test_only_full_layers_keep_index_keys():
    cache = KvCache(ARCH, 2, "cpu", torch.float32)
    assert list(cache.index_keys) == [0, 1, 3]
    assert len(cache.latent) == 4
    assert cache.index_keys[3].shape == (2, PAGE_TOKENS, 16)
    assert cache.latent[2].shape == (2, PAGE_TOKENS, 32 + 8)


def test_poison_reaches_every_slot():
    cache = KvCache(ARCH, 2, "cpu", torch.bfloat16)
    cache.poison()
    assert all(pool.isnan().all() for pool in [*cache.latent, *cache.index_keys.values()])


def test_every_supported_model_type_has_a_class_in_a_file_of_its_name():
    assert tuple(registry.MODELS) == MODEL_TYPES
    root = Path(registry.__file__).parent
    for name, model in registry.MODELS.items():
        assert (root / f"{name}.py").is_file()
        assert model.__module__ == f"tetrad.models.{name}"
