"""What is said of memory at start."""

from __future__ import annotations

from typing import Any

import pytest

from tests.factories import TINY_GLM
from tetrad.core.arch import ModelArch
from tetrad.core.config import ServeConfig
from tetrad.engine.cache_layout import MemoryUse, plan_cache
from tetrad.engine.memory_statement import memory_statement

GB = 10**9
ARCH = ModelArch.from_config(TINY_GLM)
USE = MemoryUse("cuda", 100 * GB, 20 * GB, 80 * GB, page_bytes=GB // 100)


def told(
    use: MemoryUse = USE, activation_bytes: int | None = 3 * GB, **flags: Any
) -> tuple[str, str, str]:
    config = ServeConfig(**flags)
    layout = plan_cache(config, ARCH, use)
    shares, running, more = memory_statement(
        config,
        layout,
        use,
        weight_bytes=18 * GB,
        activation_bytes=activation_bytes,
        graph_bytes=GB,
    )
    return shares, running, more


def test_the_shares_add_up_to_the_device():
    shares, _, _ = told(mem_fraction_static=0.9)
    assert shares == (
        "100 GB: 18 GB weights, 70 GB KV cache (448000 tokens), 1 GB recorded steps, "
        "3 GB activations of a step of 2048 tokens, 2 GB other programs and the runtime, 6 GB left"
    )


def test_others_count_on_a_cpu_too():
    """There the share that the cache may take is of all memory, whoever else has some."""
    use = MemoryUse("cpu", 100 * GB, 18 * GB, 30 * GB, page_bytes=GB // 100)
    shares, _, _ = told(use, None, mem_fraction_static=0.3)
    assert shares == (
        "100 GB: 18 GB weights, 12 GB KV cache (76800 tokens), 1 GB recorded steps, "
        "52 GB other programs and the runtime, 17 GB left"
    )


def test_nothing_is_left_where_all_is_taken():
    use = MemoryUse("cpu", 100 * GB, 18 * GB, 12 * GB, page_bytes=GB // 100)
    assert told(use, mem_fraction_static=0.3)[0].endswith(", 0 MB left")


def test_what_was_not_measured_is_not_told():
    shares, _, _ = told(activation_bytes=None)
    assert "activations" not in shares


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({}, "256 requests at once, the default; --max-running-requests changes it"),
        ({"max_running_requests": 9}, "9 requests at once, as --max-running-requests says"),
        ({"chunked_prefill_size": 64}, "64 requests at once, as --chunked-prefill-size bounds a"),
        ({"max_total_tokens": 640}, "10 requests at once, the cache has no more pages"),
    ],
)
def test_the_limit_on_running_requests_is_named(flags: dict[str, Any], sentence: str):
    assert told(**flags)[1].startswith(sentence)


def test_how_many_of_the_longest_fit():
    assert told(mem_fraction_static=0.9)[1].endswith("of 4096 tokens each the cache holds 109")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            {"mem_fraction_static": 0.5},
            "one more GB (--mem-fraction-static +0.01) would hold 6400 more tokens, 1.56 requests "
            "of 4096",
        ),
        ({"max_total_tokens": 6400}, "one more GB would buy nothing: --max-total-tokens caps"),
        ({"max_running_requests": 2}, "one more GB would buy nothing: all running requests fit"),
    ],
)
def test_one_more_gb(flags: dict[str, Any], sentence: str):
    assert told(**flags)[2].startswith(sentence)
