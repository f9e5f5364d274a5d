"""What a GPU prepares before it serves, as far as it shows without one."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.engine.fakes import make_limits
from tests.factories import tiny_glm_folder
from tetrad.core import keys as keys_module
from tetrad.core.config import ServeConfig
from tetrad.core.errors import ConfigError
from tetrad.core.step import PAGE_TOKENS
from tetrad.engine.load import load_engine
from tetrad.engine.prepare import (
    decode_steps,
    graph_sizes,
    largest_step,
    prompt_steps,
    step_sizes,
)
from tetrad.engine.runner import Runner


@pytest.mark.parametrize(
    ("flags", "max_running", "sizes"),
    [
        ({}, 6, (1, 2, 3, 4, 6)),
        ({"cuda_graph_max_bs": 4}, 256, (1, 2, 3, 4)),
        ({"cuda_graph_max_bs": 512}, 8, (1, 2, 3, 4, 8)),
        ({"cuda_graph_bs": (7, 3, 3)}, 256, (3, 7)),
        ({"cuda_graph_bs": (7, 3, 64, 32)}, 20, (3, 7, 32)),
    ],
)
def test_sizes_to_record(flags: dict[str, object], max_running: int, sizes: tuple[int, ...]):
    config = ServeConfig(**flags)  # type: ignore[arg-type]
    assert graph_sizes(config, max_running) == sizes


@pytest.mark.parametrize("size", [0, 65537, "many"])
def test_a_size_that_cannot_be_is_refused(size: object):
    with pytest.raises(ConfigError, match="--cuda-graph-bs"):
        ServeConfig.parse({"cuda_graph_bs": (size,)})


@pytest.mark.parametrize(("step", "context"), [(96, 512), (96, 40), (4, 512)])
def test_the_largest_step_fills_the_budget(step: int, context: int):
    plan = largest_step(make_limits(16, running=4, step=step, context=context), scratch_page=16)
    assert plan.num_tokens == min(step, context + 3)
    assert len(plan.sequences) == 4
    assert plan.sequences[-1].num_kv_tokens == context
    for work in plan.sequences:
        assert set(work.pages) == {16}
        assert len(work.pages) * PAGE_TOKENS >= work.num_kv_tokens
        assert work.sample is not None


@pytest.mark.parametrize(("context", "topk"), [(512, 32), (512, 512), (40, 32), (20, 32)])
def test_prompts_of_every_size_and_kind_are_tried(context: int, topk: int):
    limits = make_limits(16, running=4, step=96, context=context)
    plans = list(prompt_steps(limits, topk, scratch_page=16))
    sizes = {"short": set[int](), "sparse": set[int]()}
    for plan in plans:
        assert len(plan.sequences) <= 4
        assert plan.num_tokens <= 96
        for work in plan.sequences:
            assert work.num_kv_tokens <= context
            assert set(work.pages) == {16}
            assert len(work.pages) * PAGE_TOKENS >= work.num_kv_tokens
        longest = max(work.num_kv_tokens for work in plan.sequences)
        sizes["sparse" if longest > topk else "short"].add(plan.num_tokens)
    all_sizes = set(step_sizes(96))
    fitting = {size for size in all_sizes if size <= 4 * min(topk, context)}
    assert sizes["short"] == fitting
    assert sizes["sparse"] == {size for size in all_sizes if topk + size <= context}


def test_sizes_rise_by_half_at_most():
    assert step_sizes(1) == (1,)
    assert step_sizes(100) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100)
    for most in (2, 3, 95, 96, 97, 8192, 10_000):
        sizes = step_sizes(most)
        assert sizes[-1] == most
        assert all(2 * after <= 3 * before for before, after in pairwise(sizes[1:]))


@pytest.mark.parametrize(("context", "starts"), [(512, {0, 31, 32}), (32, {0, 31}), (20, {0, 19})])
def test_decodes_that_are_not_recorded_are_tried(context: int, starts: set[int]):
    limits = make_limits(16, running=7, step=96, context=context)
    plans = list(decode_steps(limits, 32, scratch_page=16, above=3))
    found = {(len(plan.sequences), work.start) for plan in plans for work in plan.sequences}
    assert found == {(rows, start) for rows in (4, 6, 7) for start in starts}
    assert all(plan.num_tokens == len(plan.sequences) for plan in plans)


def test_prompts_that_expand_their_keys_are_tried_both_ways(monkeypatch: pytest.MonkeyPatch):
    """Else the kernel that reads latents of as many rows would be compiled for a request."""
    monkeypatch.setattr(keys_module, "LEAST_EXPANDED", 256)
    limits = make_limits(64, running=4, step=1024, context=512)
    plans = list(prompt_steps(limits, 512, scratch_page=64))
    found = {tuple((len(work.token_ids), work.start) for work in plan.sequences) for plan in plans}
    assert {((256, 0),), ((512, 0),), ((512, 0), (512, 0))} <= found
    assert {((255, 1),), ((511, 1),), ((511, 1), (511, 1))} <= found
    assert ((128, 0),) in found
    assert ((127, 1),) not in found


def test_the_largest_step_runs_on_a_cache_nobody_has_written_to(tmp_path: Path):
    """Its numbers mean nothing; sequences' pages keep what they hold."""
    config = ServeConfig(model=tiny_glm_folder(tmp_path), device="cpu", max_total_tokens=1024)
    engine = load_engine(config)
    assert isinstance(engine.runner, Runner)
    limits, cache = engine.scheduler.limits, engine.runner.cache
    cache.poison()
    plan = largest_step(limits, scratch_page=limits.num_pages)
    assert len(engine.runner.launch(plan).wait().token_ids) == limits.max_running_requests
    for pool in (*cache.latent, *cache.index_keys.values()):
        assert pool[:-1].isnan().all()
        assert not pool[-1].isnan().all()
