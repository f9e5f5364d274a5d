"""Keys as the cache holds them in FP8: layout, rounding, and what is not a number."""

from __future__ import annotations

import pytest
import torch

from tetrad.core.keys import FP8, index_bytes, latent_bytes
from tetrad.formats import fp8_keys

SPREAD = torch.logspace(-6, 4, 40).unsqueeze(1)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_a_latent_of_glm_takes_656_bytes_in_this_order():
    latent, rotary = drawn(3, 512), drawn(3, 64)
    rows = fp8_keys.encode_latents(latent, rotary)
    assert rows.shape == (3, 656) == (3, latent_bytes(FP8, 512, 64, 2))
    codes = rows[:, :512].contiguous().view(torch.float8_e4m3fn).float()
    scales = rows[:, 512:528].contiguous().view(torch.float32)
    assert torch.equal(rows[:, 528:].contiguous().view(torch.bfloat16), rotary.bfloat16())
    for group in range(4):
        columns = slice(128 * group, 128 * group + 128)
        found = codes[:, columns] * scales[:, group : group + 1]
        torch.testing.assert_close(found, latent[:, columns], rtol=1 / 16, atol=1e-4)
    assert torch.equal(
        fp8_keys.decode_latents(rows, 512)[:, :512], codes * scales.repeat_interleave(128, 1)
    )


def test_an_index_page_has_codes_before_scales():
    keys = drawn(2, 64, 128)
    pool = fp8_keys.encode_index_keys(keys)
    assert pool.shape == (2, 64, 132)
    assert index_bytes(FP8, 128, 2) == 132
    page = pool[1].flatten()
    code = page[5 * 128 : 6 * 128].view(torch.float8_e4m3fn).float()
    scale = page[64 * 128 :].view(torch.float32)[5]
    slots = torch.tensor([[64 + 5]])
    assert torch.equal(fp8_keys.decode_index_keys(pool, slots)[0, 0], code * scale)
    torch.testing.assert_close(code * scale, keys[1, 5], rtol=1 / 16, atol=1e-4)


@pytest.mark.parametrize("rank", [8, 128, 160, 512])
def test_storing_rounds_as_promised_and_decoding_does_not(rank: int):
    """At most 1/16 of a number, or 2^-10 of its scale; every decoded number is a bf16 number."""
    latent = drawn(40, rank) * SPREAD
    rows = fp8_keys.encode_latents(latent, drawn(40, 8))
    decoded = fp8_keys.decode_latents(rows, rank)
    assert torch.equal(decoded, decoded.bfloat16().float())
    groups = torch.nn.functional.pad(latent, (0, -rank % 128)).unflatten(-1, (-1, 128))
    scale = fp8_keys.scales(groups.abs().amax(-1)).repeat_interleave(128, -1)[:, :rank]
    error = (decoded[:, :rank] - latent).abs()
    assert (error <= torch.maximum(latent.abs() / 16, scale * 2.0**-10)).all()
    assert (error.norm(dim=1) / latent.norm(dim=1)).max() < 0.05


def test_scales_are_the_smallest_powers_of_two():
    found = fp8_keys.scales(torch.tensor([448.0, 448.1, 447.0, 224.0, 0.0]))
    assert found[:4].tolist() == [1.0, 2.0, 1.0, 0.5]
    assert 0 < found[4] < 1e-20


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_in_its_group(bad: float):
    latent = drawn(1, 256)
    latent[0, 3] = bad
    decoded = fp8_keys.decode_latents(fp8_keys.encode_latents(latent, drawn(1, 8)), 256)
    assert decoded[0, :128].isnan().all()
    assert decoded[0, 128:].isfinite().all()
    keys = drawn(1, 64, 128)
    keys[0, 7, 1] = bad
    found = fp8_keys.decode_index_keys(fp8_keys.encode_index_keys(keys), torch.arange(64))
    assert found[7].isnan().all()
    assert found.isnan().any(dim=1).sum() == 1


def test_unwritten_bytes_of_a_poisoned_pool_are_nan():
    rows = torch.full((2, 656), 0xFF, dtype=torch.uint8)
    assert fp8_keys.decode_latents(rows, 512).isnan().all()
