"""The indexer's kernels on a GPU: real sizes, repeats, graphs, dirty memory, far pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.dirt import dirty_memory
from tests.kernels.index import SCORE, SELECT, sorted_rows, step_inputs, tied_scores
from tetrad.core.keys import ACTIVATION, FP8, KeyFormat
from tetrad.core.step import PAGE_TOKENS
from tetrad.kernels.compare import compare
from tetrad.kernels.device import waiting_is_an_error
from tetrad.kernels.draw import Lens
from tetrad.kernels.index_score import triton as index_score
from tetrad.kernels.index_score.triton import ScoreTile
from tetrad.kernels.index_select import triton as index_select
from tetrad.kernels.index_select.triton import Stretch
from tetrad.kernels.ragged import Ragged

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
TOLERANCE = SCORE.contract.tolerance["bfloat16"]
TOPK = 2048
KEYS = pytest.mark.parametrize("keys", [ACTIVATION, FP8])
STEPS: dict[str, Lens] = {
    "decodes": ((1, 8191), (1, 1), (1, 2049), (1, 20000), (1, 64)),
    "one": ((1, 1),),
    "prompt": ((3000, 3000),),
    "chunk": ((517, 9001),),
    "mixed": ((1, 8191), (1, 4097), (700, 700), (2, 5000), (1, 3), (333, 6333), (1, 12000)),
    "drafts": ((3, 4099),) * 9,
}


def glm(lens: Lens, heads: int = 32, keys: KeyFormat = ACTIVATION) -> dict[str, Any]:
    return step_inputs(lens, heads, 128, torch.bfloat16, GPU, keys)


def score(inputs: dict[str, Any]) -> Tensor:
    found: Tensor = SCORE.backends["triton"](**inputs)
    return found


def select(scores: Tensor, seen: Tensor, topk: int = TOPK) -> Tensor:
    found: Tensor = SELECT.backends["triton"](scores, topk, seen)
    return found


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("lens", STEPS.values(), ids=STEPS)
@KEYS
def test_real_sizes_give_what_the_reference_gives(keys: KeyFormat, lens: Lens, heads: int):
    """Scores up to the rounding of sums; of the same scores, the very keys."""
    inputs = glm(lens, heads, keys)
    expected = SCORE.backends["torch"](**inputs)
    dirty_memory()
    found = score(inputs)
    assert compare(found, expected).passes(TOLERANCE)
    seen = inputs["ragged"].seen
    dirty_memory()
    selected = select(found, seen)
    assert torch.equal(
        sorted_rows(selected), sorted_rows(SELECT.backends["torch"](found, TOPK, seen))
    )
    assert torch.equal((selected >= 0).sum(1), seen.clamp(max=TOPK).long())


@pytest.mark.parametrize("num_keys", [2049, 8192, 8193, 32768, 40000, 131072, 300000])
@pytest.mark.parametrize("num_rows", [1, 64, 65])
def test_selection_among_many_ties(num_rows: int, num_keys: int):
    scores = tied_scores(num_rows, num_keys, num_keys, GPU)
    seen = (num_keys - torch.arange(num_rows, device=GPU) * 37).clamp(min=0).int()
    expected = SELECT.backends["torch"](scores, TOPK, seen)
    dirty_memory()
    assert torch.equal(sorted_rows(select(scores, seen)), sorted_rows(expected))


@pytest.mark.parametrize("queries", [1, 2, 4, 8])
@pytest.mark.parametrize("each", [64, 1024])
@KEYS
def test_every_tile_gives_the_same_scores(keys: KeyFormat, queries: int, each: int):
    """Each score is one sum, whatever lies beside it."""
    inputs = glm(STEPS["mixed"], keys=keys)
    first = score(inputs)
    found = index_score.scores(**inputs, tile=ScoreTile(queries, stages=3), each=each)
    assert compare(found, first).passes(TOLERANCE)


@pytest.mark.parametrize("lens", [STEPS["decodes"], STEPS["mixed"]], ids=["decodes", "mixed"])
@KEYS
def test_a_hundred_runs_give_the_same_bits(keys: KeyFormat, lens: Lens):
    """A race between copies and products shows as a moving score."""
    inputs = glm(lens, keys=keys)
    seen = inputs["ragged"].seen
    first = score(inputs).clone()
    selected = select(first, seen)
    for _ in range(100):
        dirty_memory()
        found = score(inputs)
        assert torch.equal(found, first)
        assert torch.equal(select(found, seen), selected)


def test_a_row_does_not_depend_on_what_is_decoded_beside_it():
    inputs = glm(STEPS["decodes"])
    together = score(inputs)
    ragged: Ragged = inputs["ragged"]
    for row, length in enumerate(ragged.kv_lens_host):
        one = replace(
            ragged,
            query_start=ragged.query_start[:2],
            kv_lens=ragged.kv_lens[row : row + 1],
            page_table=ragged.page_table[row : row + 1],
            query_lens=(1,),
            kv_lens_host=(length,),
        )
        part = {name: inputs[name][row : row + 1] for name in ("queries", "weights")}
        alone = score(inputs | part | {"ragged": one})
        assert torch.equal(alone[0], together[row, :length])


@pytest.mark.parametrize("most", [9000, 40000])
@KEYS
def test_a_graph_of_decodes_serves_any_lengths(keys: KeyFormat, most: int):
    """Captured for the longest; a padded row has one key, or none."""
    lens = ((1, most),) * 6
    inputs = glm(lens, keys=keys)
    ragged: Ragged = inputs["ragged"]
    fresh = replace(ragged)
    score(inputs)
    select(score(inputs), ragged.seen)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = score(inputs | {"ragged": fresh})
        selected = select(captured, fresh.seen)
    for kv_lens in ([most] * 6, [1, 0, 2048, 2049, 64, 8999], [5, most, 3000, 0, 8192, 8193]):
        ragged.kv_lens.copy_(torch.tensor(kv_lens, dtype=torch.int32))
        ragged.page_table.copy_(ragged.page_table.flip(0))
        inputs["queries"].copy_(torch.randn_like(inputs["queries"]))
        dirty_memory()
        graph.replay()
        told = replace(ragged, kv_lens_host=tuple(max(1, n) for n in kv_lens))
        expected = SCORE.backends["torch"](**(inputs | {"ragged": told}))
        for row, length in enumerate(kv_lens):
            assert captured[row, length:].isneginf().all()
            if length:
                assert compare(captured[row, :length], expected[row, :length]).passes(TOLERANCE)
        of_scores = SELECT.backends["torch"](captured, TOPK, ragged.seen)
        assert torch.equal(sorted_rows(selected), sorted_rows(of_scores))


@pytest.mark.parametrize("lens", [STEPS["decodes"], STEPS["mixed"]], ids=["decodes", "mixed"])
def test_the_host_never_waits(lens: Lens):
    inputs = glm(lens)
    select(score(inputs), inputs["ragged"].seen)
    ragged = replace(inputs["ragged"])
    with waiting_is_an_error():
        for rows, part in ragged.parts:
            given = {name: inputs[name][rows] for name in ("queries", "weights")}
            select(score(inputs | given | {"ragged": part}), part.seen)


def test_parts_of_a_step_give_its_scores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tetrad.kernels.ragged.MAX_PART_PAIRS", 1 << 20)
    inputs = glm(STEPS["mixed"])
    whole = score(inputs)
    assert len(inputs["ragged"].parts) > 5
    for rows, part in inputs["ragged"].parts:
        given = {name: inputs[name][rows] for name in ("queries", "weights")}
        found = score(inputs | given | {"ragged": part})
        assert compare(found, whole[rows, : part.max_kv_len]).passes(TOLERANCE)
        assert whole[rows, part.max_kv_len :].isneginf().all()


@KEYS
def test_pages_past_two_to_the_31_elements(keys: KeyFormat):
    """Offsets would wrap with 32 bits: into the pool, and into the scores. Of FP8 keys, the 31st
    byte is meant; what no sequence owns is NaN."""
    inputs = glm(((1, 4096), (2, 3000)), keys=keys)
    ragged: Ragged = inputs["ragged"]
    expected, near = score(inputs), inputs["pool"]
    far = (1 << 31) // (PAGE_TOKENS * near.shape[-1])
    pool = near.new_empty(far + len(near), *near.shape[1:])
    pool.fill_(0xFF if keys == FP8 else torch.nan)
    pool[far:] = near
    moved = replace(ragged, page_table=ragged.page_table + far)
    assert torch.equal(score(inputs | {"pool": pool, "ragged": moved}), expected)


def test_scores_past_two_to_the_31_elements():
    num_rows, num_keys = 33000, 66000
    inputs = glm(((num_rows, num_keys),))
    found = score(inputs)
    selected = select(found, inputs["ragged"].seen)
    last = slice(num_rows - 3, num_rows)
    part = inputs["ragged"]._part(last.start, last.stop)
    given = {name: inputs[name][last] for name in ("queries", "weights")}
    expected = SCORE.backends["torch"](**(inputs | given | {"ragged": part}))
    assert compare(found[last], expected).passes(TOLERANCE)
    of_scores = SELECT.backends["torch"](found[last], TOPK, part.seen)
    assert torch.equal(sorted_rows(selected[last]), sorted_rows(of_scores))


@pytest.mark.parametrize("per_thread", [8, 16, 32, 64])
@pytest.mark.parametrize("most", [8192, 16384, 32768])
def test_every_stretch_selects_the_same(most: int, per_thread: int):
    if most // per_thread > 1024:
        pytest.skip("more threads than a program has")
    scores = tied_scores(9, 100_000, 3, GPU)
    seen = torch.full((9,), 100_000, dtype=torch.int32, device=GPU)
    found = index_select.select(scores, TOPK, seen, Stretch(8192, most, per_thread))
    assert torch.equal(found, select(scores, seen))
