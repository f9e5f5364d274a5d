"""The Hopper kernel of attention without a GPU: its arithmetic run on torch, and compiled."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.compile_helpers import Compiled, compile_launches, ptxas_complaints
from tests.kernels.mla import (
    MLA,
    SMALL_CASES,
    drawn,
    glm_case,
    with_lengths_elsewhere,
    without_host_lengths,
)
from tests.kernels.torch_gluon import on_torch
from tetrad.core.keys import ACTIVATION, FP8, KeyFormat
from tetrad.kernels.backend import Backend
from tetrad.kernels.canary import try_case
from tetrad.kernels.contract import Case, case
from tetrad.kernels.experts.tiles import shared_bytes_of
from tetrad.kernels.mla import gluon as mla_gluon
from tetrad.kernels.mla import triton as mla_triton
from tetrad.kernels.triton_support import triton

pytest.importorskip("triton")

CPU = torch.device("cpu")
NEW_COMPILER = tuple(map(int, triton.__version__.split(".")[:2])) > (3, 6)
NEW_EMPTY: Any = Tensor.new_empty


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernel on torch, in memory full of NaN; add parts up by torch."""
    monkeypatch.setattr(mla_gluon, "attend_kernel", on_torch(mla_gluon, "attend_kernel"))
    monkeypatch.setattr(mla_triton, "combine", combine)
    monkeypatch.setattr(Tensor, "expand_dims", Tensor.unsqueeze, raising=False)
    monkeypatch.setattr(Tensor, "new_empty", poisoned)


def poisoned(like: Tensor, *shape: int, **options: Any) -> Tensor:
    """Parts of sums are not rounded either."""
    options |= {"dtype": torch.float32} if options.get("dtype") == torch.float16 else {}
    made: Tensor = NEW_EMPTY(like, *shape, **options)
    return made.fill_(torch.nan)


def combine(parts: Tensor, log_sums: Tensor, out: Tensor) -> None:
    weights = (log_sums * 0.6931471805599453).softmax(1).nan_to_num(0.0).unsqueeze(-1)
    out.copy_(torch.where(weights > 0, parts, 0.0).mul(weights).sum(1))


def backend(splits: int) -> Backend:
    return Backend("gluon", partial(mla_gluon.attend, num_splits=splits))


def as_made_for(each: Case) -> Case:
    """Weights of a tile take the place of its rotary keys; halves of FP8 latents are whole groups
    of 128 columns."""
    wide = {"C": 256} if each["keys"] == FP8 else {}
    return replace(each, values={**each.values, "R": 64, **wide})


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("each", [*map(as_made_for, SMALL_CASES)], ids=lambda each: each.name)
def test_case(each: Case, splits: int):
    (result,) = try_case(MLA, backend(splits), each, torch.float32, CPU)
    assert result.passes(MLA.contract.tolerance["float32"]), result


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("topk", [0, 400])
@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize(("keys", "rank"), [(ACTIVATION, 64), (FP8, 256), (FP8, 512)])
def test_many_tiles_of_keys_without_host_lengths(
    keys: KeyFormat, rank: int, splits: int, topk: int
):
    lens = ((1, 450), (1, 3), (1, 449), (1, 0))
    long = case("long", lens=lens, H=70, C=rank, R=64, topk=topk, keys=keys)
    inputs = drawn(long, CPU, torch.float32)
    if topk:
        inputs["selected"][0, 10:300:7] = -1
        inputs["selected"][0, 11] = 450
    expected = MLA.backends["torch"].run(
        **inputs | {"selected": inputs["selected"].where(inputs["selected"] < 450, -1)}
        if topk
        else inputs
    )
    found = backend(splits).run(**without_host_lengths(inputs))
    torch.testing.assert_close(found, expected)


def compiled(
    inputs: dict[str, Any], splits: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[Compiled]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    return compile_launches(
        lambda: mla_gluon.attend(**inputs, num_splits=splits), 90, folder, monkeypatch
    )


def glm_inputs(topk: int, num_rows: int = 2, keys: KeyFormat = ACTIVATION) -> dict[str, Any]:
    lens = ((1, 70),) * num_rows
    return drawn(glm_case("compiled", lens, topk, keys=keys), CPU, torch.bfloat16)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("topk", [0, 2048])
@pytest.mark.parametrize("keys", [ACTIVATION, FP8])
def test_compiles(
    keys: KeyFormat, topk: int, splits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """wgmma on shared memory alone, not one by one; no spill, but of a few registers beside codes
    with a newer compiler; no atomic; all fits. Parts are added up within threads."""
    attend, *adding = compiled(glm_inputs(topk, keys=keys), splits, tmp_path, monkeypatch)
    assert [kernel.shared_bytes for kernel in adding] == [0] * (splits > 1)
    products = re.findall(r"wgmma\.mma_async\.\S*?(m64n\d+)k16\S+\s+\{[^}]*\},\s*(\S)", attend.ptx)
    scores, values = (512 + 64) // 16, 64 // 16
    assert Counter(products) == {("m64n64", "%"): scores, ("m64n128", "%"): 4 * values}
    assert set(re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", attend.ptx)) == {"0"}
    assert not ptxas_complaints(attend, tmp_path)
    assert attend.stack_bytes <= (128 if keys == FP8 and NEW_COMPILER else 0)
    assert attend.shared_bytes <= shared_bytes_of((9, 0))
    assert not re.search(r"\b(atom|red)\.", attend.ptx)


@pytest.mark.parametrize("topk", [0, 2048])
def test_warpgroups_synchronize(topk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever reads what others wrote waits for it and fences it first; whoever tells of something
    has all of its threads done with it, and fenced what they stored."""
    ptx = compiled(glm_inputs(topk), 1, tmp_path, monkeypatch)[0].ptx
    order = re.findall(
        r"mbarrier\.try_wait|cp\.async\.mbarrier\.arrive|mbarrier\.arrive|fence\.proxy\.async|"
        r"\bbar\.sync|cp\.async\.cg|m64n64k16|m64n128k16|stmatrix|wgmma\.wait_group",
        ptx,
    )
    steps = " ".join(step for step, _ in groupby(order))
    half = "cp.async.cg bar.sync cp.async.mbarrier.arrive"
    scores = "mbarrier.try_wait fence.proxy.async m64n64k16"
    assert f"mbarrier.try_wait {half} {half}" in steps
    assert re.search(
        f"{scores} (bar.sync )?{scores} wgmma.wait_group bar.sync "
        "stmatrix fence.proxy.async bar.sync mbarrier.arrive",
        steps,
    )
    values = "mbarrier.try_wait fence.proxy.async m64n128k16 wgmma.wait_group bar.sync"
    assert steps.count(f"{values} mbarrier.arrive") == steps.count("m64n128k16") == 2


@pytest.mark.parametrize("topk", [0, 2048])
def test_codes_are_loaded_ahead_and_their_numbers_stored_before_anybody_is_told(
    topk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """And no fence is in the way, which would wait for the codes that are loaded ahead."""
    ptx = compiled(glm_inputs(topk, keys=FP8), 1, tmp_path, monkeypatch)[0].ptx
    loop = ptx[: ptx.rindex("prmt.b32 pair")].rindex("mbarrier.try_wait")
    order = re.findall(
        r"fence\.proxy|cp\.async\.cg|prmt\.b32 pair|st\.shared\.v4|ld\.global\.v2|bar\.sync|"
        r"mbarrier\.arrive|cp\.async\.wait_group|barrier\.sync",
        ptx[loop:],
    )
    steps = [step for step, _ in groupby(order)]
    steps = steps[: steps.index("barrier.sync")]
    assert "fence.proxy" not in steps
    assert steps[0] == "cp.async.cg"
    group = ["prmt.b32 pair", "st.shared.v4", "ld.global.v2"]
    told = [index for index, step in enumerate(steps) if step == "mbarrier.arrive"]
    assert len(told) == 2
    for first, last in ((0, told[0]), (told[0], told[1])):
        assert [step for step in steps[first:last] if step in group] == group * 2
        assert steps[last - 1] == "bar.sync"
    assert "cp.async.wait_group" in steps[told[0] : told[1]]


@pytest.mark.parametrize("topk", [0, 2048])
def test_a_kernel_compiles_once_for_all_step_sizes(
    topk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for num_rows in (2, 3, 16):
        inputs = glm_inputs(topk, num_rows)
        compiled(inputs, 3, tmp_path, monkeypatch)
        compiled(with_lengths_elsewhere(inputs), 3, tmp_path, monkeypatch)
    assert len(list(tmp_path.glob("*.cubin"))) == 2


@pytest.mark.parametrize(("heads", "width"), [(8, 576), (16, 576), (64, 320)])
def test_what_it_is_not_made_for_is_left_to_triton(
    heads: int, width: int, monkeypatch: pytest.MonkeyPatch
):
    seen = []
    monkeypatch.setattr(mla_triton, "run", lambda *arguments: seen.append(arguments))
    other = case("other", lens=((1, 2),), H=heads, C=width - 64, R=64, topk=0, keys=ACTIVATION)
    inputs = drawn(other, CPU, torch.bfloat16)
    mla_gluon.run(**inputs)
    assert len(seen) == 1
