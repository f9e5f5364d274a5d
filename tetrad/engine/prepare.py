"""What happens on a GPU between loading and serving: the largest step is tried, prompts of every
kind are computed once, and decode steps are captured."""

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
from tetrad.core.limits import Limits
from tetrad.core.llama_arch import LlamaArch
from tetrad.core.plan import StepPlan
from tetrad.core.request import SamplingParams
from tetrad.core.step import SampleWork, SequenceWork
from tetrad.engine.blocks import pages_for
from tetrad.engine.cuda_graph import CudaRecorder
from tetrad.engine.graphs import GraphPlan, usual_sizes
from tetrad.engine.runner import Runner

DRAWN = SamplingParams(temperature=1.0, top_p=0.9)
MANY_ROWS = 256
"""Of logits: more are no special case to any kernel."""
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
    has_graphs = not (config.disable_cuda_graph or isinstance(arch, LlamaArch))
    sizes = graph_sizes(config, limits.max_running_requests) if has_graphs else ()
    tried = [
        largest_step(limits, scratch_page),
        *prompt_steps(limits, topk, scratch_page),
        *decode_steps(limits, topk, scratch_page, max(sizes, default=0)),
    ]
    peak_bytes = _activation_bytes(runner, tried, say)
    if isinstance(arch, LlamaArch) and not config.disable_cuda_graph:
        say(f"decode steps of {arch.model_type} run without CUDA graphs")
    if not has_graphs:
        return Prepared(peak_bytes)
    recorded = GraphPlan(
        sizes=sizes,
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


def step_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, ... and `most`.

    Which kernels a step needs follows from its size and kind, and for ten seconds some of them are
    compiled: no request is to wait for that. No table of theirs has an entry for sizes that are
    less than half as large again as the entry's smallest, so that one of these falls into each.
    """
    rising = (factor << power for power in range(most.bit_length()) for factor in (1, 3))
    return tuple(sorted({most, *(size for size in rising if size <= most)}))


def prompt_steps(limits: Limits, topk: int, scratch_page: int) -> Iterator[StepPlan]:
    """For each of `step_sizes`: whole prompts as long as they are read whole, sampled greedily, and
    as many short ones as matter; and a chunk at the end of as many keys as are read whole, and of
    more than the `topk` that attention reads. Where the first expand their keys, also as prompts of
    which a token is cached, which do not.
    """
    context = min(limits.context_tokens, limits.cache_tokens)
    longest = min(topk, context)
    for num_tokens in step_sizes(limits.step_tokens):
        num_whole, rest = divmod(num_tokens, longest)
        lens = [longest] * num_whole + [rest] * (rest > 0)
        if len(lens) <= limits.max_running_requests:
            greedy = SamplingParams(temperature=0.0)
            yield _step([(n, 0) for n in lens], scratch_page, greedy)
            if num_expanded(lens, lens, topk):
                yield _step([(n - 1, 1) for n in lens], scratch_page)
        num_short = min(limits.max_running_requests, num_tokens // 2)
        if len(lens) < num_short <= MANY_ROWS:
            each, more = divmod(num_tokens, num_short)
            yield _step([(each + 1, 0)] * more + [(each, 0)] * (num_short - more), scratch_page)
        if num_tokens < longest:
            yield _step([(num_tokens, longest - num_tokens)], scratch_page)
        if topk + num_tokens <= context:
            yield _step([(num_tokens, topk)], scratch_page)


def decode_steps(limits: Limits, topk: int, scratch_page: int, above: int) -> Iterator[StepPlan]:
    """Decodes of more rows than the `above` that are recorded, of one key and of as many as are
    read whole, and of more than `topk`."""
    context = min(limits.context_tokens, limits.cache_tokens)
    kept = sorted({0, min(topk, context) - 1, *([topk] if topk < context else [])})
    for num_rows in step_sizes(min(limits.max_running_requests, limits.step_tokens)):
        if num_rows > above:
            yield from (_step([(1, start)] * num_rows, scratch_page) for start in kept)


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
