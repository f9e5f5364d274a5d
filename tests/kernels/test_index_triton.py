"""The indexer's Triton kernels without a GPU: interpreted, and compiled for four generations."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.compile_helpers import (
    CAPABILITIES,
    INTERPRETED_S,
    Compiled,
    compile_launches,
    ptxas_complaints,
    run_interpreted,
)
from tests.kernels.index import SCORE, SELECT, step_inputs
from tetrad.core.keys import ACTIVATION, FP8, KeyFormat
from tetrad.kernels import triton_support
from tetrad.kernels.draw import Lens
from tetrad.kernels.index_score import triton as index_score
from tetrad.kernels.index_select.triton import LONG_STRETCH, SHORT_STRETCH, stretch_for
from tetrad.kernels.ragged import Ragged

CPU = torch.device("cpu")
DECODE: Lens = ((1, 300), (1, 200))
PROMPT: Lens = ((40, 300), (1, 70), (20, 200))
LEAST_SHARED_BYTES = 99 << 10
"""What a program may have on 8.6, 8.9 and 12.x."""
HOPPER_SHARED_BYTES = 227 << 10

needs_triton = pytest.mark.skipif(
    triton_support.triton is None, reason="Triton has wheels for Linux only"
)


@needs_triton
@pytest.mark.timeout(INTERPRETED_S)
def test_interpreted():
    run_interpreted(Path(__file__).with_name("interpreted_index.py"))


def inside_others(ragged: Ragged) -> Ragged:
    """Small integers as the engine sends them, in one copy: at any multiple of four bytes."""
    kv_lens = torch.cat([ragged.kv_lens[:1], ragged.kv_lens])[1:]
    return replace(ragged, kv_lens=kv_lens)


def compile_score(
    lens: Lens,
    heads: int,
    capability: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    keys: KeyFormat = ACTIVATION,
) -> Compiled:
    inputs = step_inputs(lens, heads, 128, torch.bfloat16, CPU, keys)
    inputs["ragged"] = inside_others(inputs["ragged"])
    call = partial(SCORE.backends["triton"].run, **inputs)
    (kernel,) = compile_launches(call, capability, folder, monkeypatch)
    return kernel


@needs_triton
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("lens", [DECODE, PROMPT], ids=["decode", "prompt"])
@pytest.mark.parametrize("keys", [ACTIVATION, FP8])
def test_scores_compile_without_spilling(
    keys: KeyFormat,
    lens: Lens,
    heads: int,
    capability: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Two programs fit on a multiprocessor of Hopper: one multiplies while the other adds up."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = compile_score(lens, heads, capability, tmp_path, monkeypatch, keys)
    # ptxas stops at 168 registers on 12.0, and puts one address aside before the loop
    assert kernel.stack_bytes <= (8 if capability == 120 else 0)
    if capability == 90:
        assert len(re.findall(r"wgmma\.mma_async", kernel.ptx)) == 128 // 16
        assert 2 * kernel.shared_bytes <= HOPPER_SHARED_BYTES
        assert not ptxas_complaints(kernel, tmp_path)
        # decoded keys go to wgmma in registers: none may be overwritten while it reads
        assert set(re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", kernel.ptx)) == {"0"}
    else:
        assert kernel.shared_bytes <= LEAST_SHARED_BYTES


@needs_triton
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("num_rows", "lengths"), [(2, (2049, 1 << 20)), (200, (1 << 15, 1 << 16))])
def test_selection_compiles_without_spilling(
    num_rows: int,
    lengths: tuple[int, ...],
    capability: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """An atomic add would make the order vary."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    seen = torch.zeros(num_rows, dtype=torch.int32)
    for num_keys in lengths:
        scores = torch.empty(num_rows, num_keys)
        call = partial(SELECT.backends["triton"].run, scores, 2048, seen)
        kernels = compile_launches(call, capability, tmp_path, monkeypatch)
        assert kernels
        for kernel in kernels:
            assert kernel.stack_bytes == 0
            assert kernel.shared_bytes <= LEAST_SHARED_BYTES
            assert not re.search(r"\b(atom|red)\.\S*global", kernel.ptx)


@needs_triton
def test_a_kernel_compiles_once_for_all_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A step of another size must not wait for a compiler; prompts and decodes have one each."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    steps: tuple[tuple[Lens, ...], ...] = (
        (((1, 1),), ((1, 70), (1, 3), (1, 9000)), ((1, 64),) * 16),
        (((2, 2),), ((1, 70), (33, 33)), ((2000, 2000),)),
    )
    for group in steps:
        texts = {compile_score(lens, 32, 90, tmp_path, monkeypatch).ptx for lens in group}
        assert len(texts) == 1
    texts = set()
    for num_rows, num_keys in ((1, 2064), (3, 4096), (64, 8192)):
        scores = torch.zeros(num_rows, num_keys)
        seen = torch.zeros(num_rows + 1, dtype=torch.int32)[num_rows % 2 :][:num_rows]
        call = partial(SELECT.backends["triton"].run, scores, 2048, seen)
        (kernel,) = compile_launches(call, 90, tmp_path, monkeypatch)
        texts.add(kernel.ptx)
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("num_rows", "num_keys", "queries"),
    [(1, 1, 1), (1, 8192, 1), (64, 131072, 1), (2048, 32768, 8), (8192, 2049, 8), (1, 1 << 20, 1)],
)
def test_programs_take_whole_pages_and_leave_none_out(num_rows: int, num_keys: int, queries: int):
    tile = index_score.ScoreTile(queries, stages=3)
    each = index_score.keys_each(num_rows, num_keys, 132, tile)
    assert each % 64 == 0
    assert 0 < each < num_keys + 64
    programs = -(-num_rows // queries) * -(-num_keys // each)
    assert programs <= 2 * max(index_score.PROGRAMS_PER_CORE * 132, -(-num_rows // queries))


def test_few_rows_are_cut_into_shorter_stretches():
    assert stretch_for(64, 2048).most == SHORT_STRETCH
    assert stretch_for(65, 2048).most == LONG_STRETCH
    assert stretch_for(1, 4096).most == 4 * 4096


def test_rows_of_scores_begin_at_whole_vectors(monkeypatch: pytest.MonkeyPatch):
    """What the selection reads four at a time."""
    launched: list[Tensor] = []

    class Kernel:
        def __getitem__(self, _grid: tuple[int, int]):
            return lambda *args, **_: launched.append(args[6])

    monkeypatch.setattr(index_score, "score_kernel", Kernel())
    found = SCORE.backends["triton"](**step_inputs(((3, 70), (1, 5)), 2, 16, torch.float32, CPU))
    assert found.shape == (4, 70)
    assert found.stride() == (80, 1)
    assert launched[0].is_contiguous()
