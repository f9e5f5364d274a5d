"""Latent attention on a GPU: real sizes, repeats, graphs, far pages, dirty memory, no waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.dirt import dirty_memory
from tests.kernels.mla import (
    MLA,
    Lens,
    drawn,
    exact,
    glm_case,
    relative_error,
    without_host_lengths,
)
from tetrad.core.keys import ACTIVATION, FP8, KeyFormat
from tetrad.core.step import PAGE_TOKENS
from tetrad.kernels.device import snapshot, waiting_is_an_error
from tetrad.kernels.draw import Draw
from tetrad.kernels.ragged import Ragged

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
TOLERANCE = MLA.contract.tolerance["bfloat16"]
Run = Callable[..., Tensor]

DECODES: tuple[tuple[Lens, int], ...] = (
    (((1, 1),), 0),
    (((1, 2048),), 0),
    (((1, 0), (1, 1), (1, 63), (1, 64), (1, 65), (1, 2047), (1, 1000)), 0),
    (((1, 8192),), 2048),
    (((1, 0), (1, 1), (1, 2047), (1, 2048), (1, 2049), (1, 9000)), 2048),
    (((1, 300),) * 33, 0),
    (((1, 4096),) * 32, 2048),
    (((1, 4100),) * 140, 2048),
)
PROMPTS: tuple[tuple[Lens, int], ...] = (
    (((200, 200),), 0),
    (((150, 2000), (1, 900), (4, 77)), 0),
    (((150, 4000), (1, 900), (4, 77)), 2048),
)
STEPS = DECODES + PROMPTS
KEYS = pytest.mark.parametrize("keys", [ACTIVATION, FP8])


@pytest.fixture(params=[name for name in MLA.backends if name != "torch"])
def run(request: pytest.FixtureRequest) -> Run:
    backend = MLA.backends[request.param]
    if refusal := backend.why_not(snapshot(GPU)):
        pytest.skip(refusal)
    found: Run = backend.run
    return found


def draw(lens: Lens, topk: int, heads: int = 64, keys: KeyFormat = ACTIVATION) -> dict[str, Any]:
    return drawn(glm_case(f"{lens} {topk}", lens, topk, heads, keys), GPU, torch.bfloat16)


def poisoned(pool: Tensor) -> Tensor:
    """Filled with NaN; with bytes of 0xFF codes, scales and rotary numbers are that too."""
    return pool.fill_(0xFF if pool.dtype == torch.uint8 else torch.nan)


@pytest.mark.parametrize("heads", [64, 8])
@pytest.mark.parametrize(("lens", "topk"), STEPS)
@KEYS
def test_real_sizes_against_float64(run: Run, keys: KeyFormat, lens: Lens, topk: int, heads: int):
    inputs = draw(lens, topk, heads, keys)
    dirty_memory()
    found = run(**inputs)
    assert relative_error(found, exact(inputs)) <= TOLERANCE


@pytest.mark.parametrize("heads", [1, 16, 20, 40, 63, 128])
@KEYS
def test_any_number_of_heads(run: Run, keys: KeyFormat, heads: int):
    for lens, topk in (STEPS[2], STEPS[4], PROMPTS[1]):
        inputs = draw(lens, topk, heads, keys)
        dirty_memory()
        assert relative_error(run(**inputs), exact(inputs)) <= TOLERANCE


@pytest.mark.parametrize("heads", [64, 8])
@pytest.mark.parametrize(("lens", "topk"), [DECODES[4], DECODES[6], DECODES[7], PROMPTS[2]])
@KEYS
def test_a_hundred_runs_are_one(run: Run, keys: KeyFormat, lens: Lens, topk: int, heads: int):
    """A race between copies, tensor cores and warps shows as a moving result."""
    inputs = draw(lens, topk, heads, keys)
    first = run(**inputs)
    assert relative_error(first, exact(inputs)) <= TOLERANCE
    for _ in range(100):
        dirty_memory()
        assert torch.equal(run(**inputs), first)


@pytest.mark.parametrize("topk", [0, 2048])
@pytest.mark.parametrize("num_rows", [1, 24, 140])
@KEYS
def test_a_graph_replays_with_other_inputs(run: Run, keys: KeyFormat, num_rows: int, topk: int):
    """Lengths, pages and selections change too, and the host's twins of them are not read."""
    longest = 5000 if topk else 1500
    steps = [
        draw(
            tuple((1, (row * 977 + seed * 331) % longest) for row in range(num_rows)),
            topk,
            keys=keys,
        )
        for seed in range(3)
    ]
    width = max(step["ragged"].page_table.shape[1] for step in steps)
    pool = poisoned(max((s["pool"] for s in steps), key=len).clone())
    static = without_host_lengths(steps[0]) | {"pool": pool}
    for name in ("queries", "selected"):
        static[name] = None if static[name] is None else static[name].clone()
    tables = static["ragged"]
    table = torch.zeros(num_rows, width, dtype=torch.int32, device=GPU)
    static["ragged"] = Ragged(
        tables.query_start.clone(), tables.kv_lens.clone(), table,
        tables.query_lens, tables.kv_lens_host,
    )  # fmt: skip
    fill(static, steps[0])
    run(**static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(**static)
    for step in (steps[1], steps[2], steps[0], steps[1]):
        fill(static, step)
        found.fill_(torch.nan)
        graph.replay()
        assert relative_error(found, exact(step)) <= TOLERANCE


def fill(static: dict[str, Any], step: dict[str, Any]) -> None:
    """Overwrite the tensors that a graph reads; what the step lacks is NaN."""
    static["queries"].copy_(step["queries"])
    poisoned(static["pool"])
    static["pool"][: len(step["pool"])] = step["pool"]
    static["ragged"].kv_lens.copy_(step["ragged"].kv_lens)
    table = step["ragged"].page_table
    static["ragged"].page_table.zero_()
    static["ragged"].page_table[:, : table.shape[1]] = table
    if static["selected"] is not None:
        static["selected"].copy_(step["selected"])


@pytest.mark.parametrize("heads", [64, 8])
@pytest.mark.parametrize("topk", [0, 100])
@KEYS
def test_pages_past_two_to_the_31st_element(run: Run, keys: KeyFormat, topk: int, heads: int):
    """Of FP8 keys, the 31st byte is meant."""
    inputs = draw(((1, 128), (1, 100)), topk, heads, keys)
    small, near = inputs["pool"], inputs["ragged"].page_table
    num_pages = (1 << 31) // (PAGE_TOKENS * small.shape[-1]) + 50
    pool = poisoned(small.new_empty(num_pages, *small.shape[1:]))
    far = near + (num_pages - len(small))
    pool[far.flatten().long()] = small[near.flatten().long()]
    ragged = inputs["ragged"]
    moved = Ragged(ragged.query_start, ragged.kv_lens, far, (1, 1), ragged.kv_lens_host)
    found = run(**inputs | {"pool": pool, "ragged": moved})
    assert relative_error(found, exact(inputs)) <= TOLERANCE


@pytest.mark.parametrize("topk", [0, 2048])
@KEYS
def test_the_host_never_waits(run: Run, keys: KeyFormat, topk: int):
    lens = ((1, 3000 if topk else 300),) * 20
    inputs = without_host_lengths(draw(lens, topk, keys=keys))
    run(**inputs)
    with waiting_is_an_error():
        run(**inputs)


def test_a_row_does_not_depend_on_its_neighbours(run: Run):
    """In a step of as many rows."""
    inputs = draw(((1, 4096),) * 24, 2048)
    together = run(**inputs)
    draw_again = Draw.of(glm_case("others", ()), torch.bfloat16, GPU)
    others = draw_again.normal(*inputs["queries"].shape)
    others[7] = inputs["queries"][7]
    alone = run(**inputs | {"queries": others})
    assert torch.equal(together[7], alone[7])
    assert not torch.equal(together[8], alone[8])


@pytest.mark.parametrize("topk", [0, 256])
def test_every_fp8_code_is_decoded(run: Run, topk: int):
    """A sequence of 256 keys has each of them, in every column, with scales far apart."""
    inputs = draw(((1, 256),), topk, keys=FP8)
    rows = inputs["pool"].view(-1, inputs["pool"].shape[-1])
    pages = inputs["ragged"].page_table[0].long()
    slots = (pages[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device=GPU)).flatten()
    codes = (torch.arange(256)[:, None] + 37 * torch.arange(512)) % 256
    codes[codes % 128 == 127] = 5
    scales = torch.pow(2.0, (torch.arange(256)[:, None] + torch.arange(4)) % 7 - 3)
    rows[slots, :512] = codes.to(GPU, torch.uint8)
    rows[slots, 512:528] = scales.float().view(torch.uint8).to(GPU)
    inputs["queries"] *= 2.0**-7
    assert relative_error(run(**inputs), exact(inputs)) <= TOLERANCE
