"""No request waits for a compiler: what a step launches, one that was tried before launched."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.fakes import make_limits
from tests.engine.launched import NUM_PAGES, launches
from tetrad.core.keys import ACTIVATION, FP8, KeyFormat
from tetrad.core.limits import Limits
from tetrad.core.plan import StepPlan
from tetrad.core.request import SamplingParams
from tetrad.core.step import SampleWork, SequenceWork
from tetrad.engine.blocks import pages_for
from tetrad.engine.prepare import decode_steps, largest_step, prompt_steps

pytest.importorskip("triton")
SCRATCH = NUM_PAGES - 1
TOPK, CONTEXT = 2048, 8192
SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(top_p=0.9),
)

Sizes = list[tuple[int, int]]
"""(tokens, tokens before them) of each sequence of a step."""


def step(sizes: Sizes, params: SamplingParams) -> StepPlan:
    return StepPlan(
        tuple(
            SequenceWork(
                str(row), array("i", (1,) * count), start, (SCRATCH,) * pages_for(start + count),
                SampleWork(params, 0, 0),
            )
            for row, (count, start) in enumerate(sizes)
        )
    )  # fmt: skip


def traffic(most_tokens: int, most_rows: int, num_recorded: int) -> Iterator[Sizes]:
    """What clients may cause: prompts of one length, chunks, long prompts, all of it beside
    decodes, and decodes alone where more run than steps are recorded for."""
    drawn = random.Random(0)
    yield from ([(128, 0)] * count for count in range(1, most_tokens // 128 + 1))
    for total in (*range(1, 140, 3), *range(140, most_tokens, 211)):
        yield (
            [(total, drawn.choice((0, 700, 1900, TOPK)))]
            if total <= CONTEXT - TOPK
            else [(total, 0)]
        )
        yield [(TOPK, 0)] * (total // TOPK) + [(total % TOPK or 1, 0)]
    for longest in (999, CONTEXT - 1):
        for num_decodes in (1, 3, 17, 31, 65, 250, 1000, 2000):
            for num_prompts in (1, 2, 5, 20):
                decodes = [(1, drawn.randrange(longest)) for _ in range(num_decodes)]
                starts = [drawn.choice((0, 0, 100, TOPK, 3000)) for _ in range(num_prompts)]
                yield [*decodes, *((drawn.randrange(1, 500), start) for start in starts)]
    for length in (1, 100, TOPK, CONTEXT):
        for count in (*range(1, 70, 5), 100, 300, 500, 1000, 1500, 2000):
            if count > num_recorded:
                yield [(1, length - 1)] * count


def fitting(limits: Limits, num_recorded: int) -> Iterator[Sizes]:
    most, rows = limits.step_tokens, limits.max_running_requests
    for sizes in traffic(most, rows, num_recorded):
        if sum(count for count, _ in sizes) <= most and len(sizes) <= rows:
            yield sizes


def differing(variant: tuple[Any, ...], known: set[tuple[Any, ...]]) -> tuple[str, list[Any]]:
    """A variant by how it differs from the one most like it."""
    name, values, _ = variant
    alike = [other for other in known if other[0] == name]
    return name, sorted(min((set(values) - set(other[1]) for other in alike), key=len, default=()))


@pytest.mark.parametrize(
    ("keys", "backend", "is_quantised", "most", "num_recorded"),
    [
        pytest.param(ACTIVATION, "gluon", False, (8192, 2048), 2048, id="recorded decodes"),
        pytest.param(ACTIVATION, "gluon", False, (8192, 2048), 0, id="no graphs"),
        pytest.param(FP8, "gluon", False, (8192, 256), 64, id="fp8 keys"),
        pytest.param(ACTIVATION, "triton", True, (1000, 200), 200, id="all linears quantised"),
    ],
)
def test_every_kernel_was_compiled_before(
    keys: KeyFormat, backend: str, is_quantised: bool, most: tuple[int, int], num_recorded: int
):
    step_tokens, running = most
    limits = make_limits(1 << 16, running=running, step=step_tokens, context=CONTEXT)
    chosen = {"experts": backend, "mla": backend}
    with launches(keys, is_quantised=is_quantised, **chosen) as launched:
        tried = [
            largest_step(limits, SCRATCH),
            *prompt_steps(limits, TOPK, SCRATCH),
            *decode_steps(limits, TOPK, SCRATCH, num_recorded),
        ]
        known = set().union(*(launched.of(plan) for plan in tried))
        assert {"grouped_product", "sort_kernel"} <= {name for name, *_ in known}
        for number, sizes in enumerate(fitting(limits, num_recorded)):
            new = launched.of(step(sizes, SAMPLING[number % 3])) - known
            assert [differing(each, known) for each in new] == [], sizes
