"""How many pages, and which limit binds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.factories import TINY_GLM
from tetrad.core.arch import ModelArch
from tetrad.core.config import ServeConfig
from tetrad.core.errors import ConfigError
from tetrad.engine.cache_layout import CacheLayout, MemoryUse, plan_cache
from tetrad.kernels.device import device_memory
from tetrad.kernels.host import usable_cores

ARCH = ModelArch.from_config(TINY_GLM)
CONTEXT_PAGES = ARCH.max_position // 64
MB = 10**6


def layout(*, total: int = 10_000 * MB, used: int = 1000 * MB, **flags: Any) -> CacheLayout:
    use = MemoryUse("cpu", total, used, total - used, page_bytes=MB)
    return plan_cache(ServeConfig(**flags), ARCH, use)


def test_memory_binds():
    found = layout()
    assert found.limits.num_pages == 2000
    assert found.limited_by == "mem_fraction_static"
    assert "128000 tokens (2 GB), all that --mem-fraction-static 0.3" in found.sentence
    assert found.limits.max_running_requests == 256


def test_a_fraction_counts_what_is_used_and_what_is_free():
    assert layout(mem_fraction_static=0.5).limits.num_pages == 4000
    use = MemoryUse("cuda", 100 * MB, 20 * MB, 80 * MB, page_bytes=MB)
    assert plan_cache(ServeConfig(), ARCH, use).limits.num_pages == 65
    tight = MemoryUse("cpu", 100 * MB, 0, 7 * MB, page_bytes=MB)
    assert plan_cache(ServeConfig(), ARCH, tight).limits.num_pages == 7


def test_the_cap_binds():
    found = layout(max_total_tokens=1000)
    assert found.limits.num_pages == 15
    assert found.limited_by == "max_total_tokens"
    assert found.limits.max_running_requests == 15


def test_requests_bind():
    found = layout(max_running_requests=2)
    assert found.limits.num_pages == 2 * CONTEXT_PAGES
    assert found.limited_by == "max_running_requests"
    assert layout(max_running_requests=2, context_length=65).limits.num_pages == 4


def test_running_requests_fit_the_token_budget():
    assert layout(chunked_prefill_size=32).limits.max_running_requests == 32
    with pytest.raises(ConfigError, match="raise the latter to 64 or lower the former to 32"):
        layout(chunked_prefill_size=32, max_running_requests=64)


def test_too_little_memory_names_the_flag_and_a_value_that_works():
    with pytest.raises(ConfigError, match=r"--mem-fraction-static 0.1 .* 0.11 holds 4096 tokens"):
        layout(mem_fraction_static=0.1)
    assert layout(mem_fraction_static=0.11).limits.cache_tokens >= 4096
    with pytest.raises(ConfigError, match=r"0\.8 holds 64 tokens"):
        layout(total=10 * MB, used=7 * MB)
    with pytest.raises(ConfigError, match="does not fit on this device"):
        layout(total=10 * MB, used=10 * MB)


def test_a_context_beyond_the_model_is_refused():
    with pytest.raises(ConfigError, match=r"--context-length 4097: .* 4096"):
        layout(context_length=4097)


def test_a_control_group_bounds_memory_and_cores(tmp_path: Path):
    cpu = torch.device("cpu")
    free = device_memory(cpu, tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert device_memory(cpu, tmp_path).total_bytes == 1_000_000
    assert device_memory(cpu, tmp_path).free_bytes == 600_000
    assert usable_cores(tmp_path) == 1
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert device_memory(cpu, tmp_path).total_bytes == free.total_bytes
    assert usable_cores(tmp_path) == usable_cores(tmp_path / "nothing") >= 1


def test_two_processors_of_one_core_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Processors 0 and 2 share a core, 1 has one of its own, of 3 nothing is known."""
    for number, siblings in ((0, "0,2"), (1, "1"), (2, "0,2")):
        topology = tmp_path / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{siblings}\n")
    no_limit = tmp_path / "nothing"
    for affinity, cores in (({0, 2}, 1), ({0, 1}, 2), ({0, 1, 2, 3}, 3)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _process, allowed=affinity: allowed)
        assert usable_cores(no_limit, tmp_path) == cores
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    assert usable_cores(tmp_path, tmp_path) == 2
