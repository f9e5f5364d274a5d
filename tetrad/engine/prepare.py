"""What happens on a GPU between loading and serving: the largest step is tried, prompts of every
kind are computed once, decode steps are recorded."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tetrad.core.arch import ModelArch
from tetrad.core.architectures import Arch
from tetrad.core.config import ServeConfig
from tetrad.core.errors import ConfigError
from tetrad.core.keys import num_expanded
from tetrad.core.llama_arch import LlamaArch
from tetrad.core.plan import StepPlan
from tetrad.core.request import SamplingParams
from tetrad.core.step import SampleWork, SequenceWork
from tetrad.engine.admission import Limits
from tetrad.engine.blocks import pages_for
from tetrad.engine.cuda_graph import CudaRecorder
from tetrad.engine.graphs import GraphPlan, usual_sizes
from tetrad.engine.runner import Runner

DRAWN = SamplingParams(temperature=1.0, top_p=0.9)
MARGIN_BYTES = 256 << 20
"""Left beside the largest step's memory: allocators round up, libraries take their own."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What preparing took and gave."""

    activation_bytes: int | None = None
    """Most that a step takes beyond weights and cache; None where it was not measured."""
    graph_bytes: int = 0
    graph_sizes: dict[str, list[int]] | None = None
    """Set → recorded sizes; None: none were wanted."""


def prepare(
    config: ServeConfig,
    arch: Arch,
    limits: Limits,
    runner: Runner,
    device: torch.device,
    say: Callable[[str], None],
) -> Prepared:
    """Try the largest step, compile what prompts need and record decode steps; on a CPU do nothing.
    `say` hears of progress. The cache must have a page more than `limits` say."""
    if device.type != "cuda":
        return Prepared()
    scratch_page = limits.num_pages
    topk = arch.indexer.topk if isinstance(arch, ModelArch) else limits.context_tokens
    tried = prompt_steps(limits, topk, scratch_page)
    peak_bytes = _activation_bytes(runner, [largest_step(limits, scratch_page), *tried], say)
    if isinstance(arch, LlamaArch) and not config.disable_cuda_graph:
        say(f"decode steps of {arch.model_type} run without CUDA graphs")
    if config.disable_cuda_graph or isinstance(arch, LlamaArch):
        return Prepared(peak_bytes)
    recorded = GraphPlan(
        sizes=graph_sizes(config, limits.max_running_requests),
        short_tokens=topk,
        context_tokens=min(limits.context_tokens, limits.cache_tokens),
        scratch_page=scratch_page,
        reserved_bytes=peak_bytes + MARGIN_BYTES,
    )
    graphs = runner.record_graphs(recorded, CudaRecorder(device), say)
    return Prepared(peak_bytes, graphs.num_bytes, graphs.sizes)


def graph_sizes(config: ServeConfig, max_running: int) -> tuple[int, ...]:
    """Rising sizes, as far as they are of use with so many running requests."""
    if config.cuda_graph_bs:
        useful = {size for size in config.cuda_graph_bs if size < max_running}
        larger = [size for size in config.cuda_graph_bs if size >= max_running]
        return tuple(sorted(useful | ({min(larger)} if larger else set())))
    return usual_sizes(min(config.cuda_graph_max_bs or max_running, max_running))


def prompt_steps(limits: Limits, topk: int, scratch_page: int) -> Iterator[StepPlan]:
    """Steps of 1, 2, 4, ... tokens and of the whole budget, twice each: whole prompts that are read
    whole, sampled greedily, and a chunk behind more keys than the `topk` that attention reads.
    Where the former expand their keys, also as prompts of which a token is cached, which do not.

    Kernels are compiled when a step first needs them, for ten seconds some of them, and which they
    are follows from a step's size and kind: no request is to wait for that.
    """
    context = min(limits.context_tokens, limits.cache_tokens)
    longest = min(topk, context)
    powers = [1 << power for power in range((limits.step_tokens - 1).bit_length())]
    for num_tokens in (*powers, limits.step_tokens):
        num_whole, rest = divmod(num_tokens, longest)
        sizes = [(longest, 0)] * num_whole + [(rest, 0)] * (rest > 0)
        if len(sizes) <= limits.max_running_requests:
            yield _step(sizes, scratch_page, SamplingParams(temperature=0.0))
            lens = [n for n, _ in sizes]
            if num_expanded(lens, lens, topk):
                yield _step([(n - 1, 1) for n in lens], scratch_page)
        if topk + num_tokens <= context:
            yield _step([(num_tokens, topk)], scratch_page)


def largest_step(limits: Limits, scratch_page: int) -> StepPlan:
    """As many tokens as a step may have, as many of them sampled as can be; the last sequence is a
    chunk at the end of the longest context. All keys go to the scratch page."""
    num_rows = min(limits.max_running_requests, limits.step_tokens)
    context = min(limits.context_tokens, limits.cache_tokens)
    chunk = min(limits.step_tokens - num_rows + 1, context)
    sizes = [(1, 0)] * (num_rows - 1) + [(chunk, context - chunk)]
    return _step(sizes, scratch_page)


def _step(
    sizes: list[tuple[int, int]], scratch_page: int, params: SamplingParams = DRAWN
) -> StepPlan:
    """(tokens, tokens before them) of each sequence; all of them sample."""
    return StepPlan(
        tuple(
            SequenceWork(
                rid=str(row),
                token_ids=array("i", (0,)) * count,
                start=start,
                pages=(scratch_page,) * pages_for(start + count),
                sample=SampleWork(params, seed=0, num_generated=0),
            )
            for row, (count, start) in enumerate(sizes)
        )
    )


def _activation_bytes(runner: Runner, plans: Sequence[StepPlan], say: Callable[[str], None]) -> int:
    """Most that any of these steps takes beside what is held."""
    held_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for plan in plans:
        say(f"trying a step of {plan.num_tokens} tokens")
        try:
            runner.launch(plan).wait()
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"A step of {plan.num_tokens} tokens does not fit beside weights and cache; lower "
                f"--mem-fraction-static or --chunked-prefill-size."
            ) from error
    return torch.cuda.max_memory_allocated() - held_bytes
