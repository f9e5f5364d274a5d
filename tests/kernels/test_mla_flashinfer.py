"""The adapter to FlashInfer's attention: its arguments against a stand-in that reads them as the
package documents, and its call against the package's own source."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import flashinfer_source as source
from tests.kernels.mla import MLA, drawn, exact, glm_case, relative_error
from tetrad.core.errors import UnsupportedError
from tetrad.core.hardware import DeviceSnapshot
from tetrad.core.keys import ACTIVATION, FP8
from tetrad.formats import fp8_keys
from tetrad.kernels import triton_support
from tetrad.kernels.canary import try_case
from tetrad.kernels.mla import flashinfer_sparse_mla
from tetrad.kernels.mla import triton as portable
from tetrad.kernels.select import resolve_ops

CPU = torch.device("cpu")
ENTRY = "trtllm_batch_decode_with_kv_cache_mla"
BACKEND = flashinfer_sparse_mla.BACKEND


def attend(**given: Any) -> Tensor:
    """A softmax over the slots of each row; nothing else of the pool is read."""
    (rank, rotary) = given["kv_lora_rank"], given["qk_rope_head_dim"]
    queries, slots = given["query"].double(), given["block_tables"]
    assert given["query"].dtype == torch.bfloat16
    assert slots.dtype == torch.int32
    assert slots.shape == (len(queries), 1, given["sparse_mla_top_k"])
    assert slots.shape[-1] % 64 == 0
    assert given["backend"] == "sparse"
    assert not given["workspace_buffer"].any()
    rows = given["kv_cache"].view(-1, given["kv_cache"].shape[-1])
    out = torch.zeros(*queries.shape[:3], rank, dtype=torch.float64)
    for row in range(len(queries)):
        mine = slots[row, 0][slots[row, 0] >= 0].long()
        keys = fp8_keys.decode_latents(rows[mine], rank).double()
        assert keys.shape[-1] == rank + rotary
        if len(mine):
            weights = (queries[row, 0] @ keys.T * given["bmm1_scale"]).softmax(-1)
            out[row, 0] = weights @ keys[:, :rank]
    return out.bfloat16()


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, as far as the adapter sees it; every call has to fit the real function."""
    signature = source.signature_of("mla/_core.py", ENTRY)

    def entry(*args: Any, **given: Any) -> Tensor:
        bound = signature.bind(*args, **given)
        return attend(**bound.arguments)

    root: Any = ModuleType("flashinfer")
    root.mla = SimpleNamespace(**{ENTRY: entry})
    monkeypatch.setitem(sys.modules, "flashinfer", root)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", root.mla)
    monkeypatch.setattr(flashinfer_sparse_mla, "WORKSPACE_BYTES", 1 << 10)
    flashinfer_sparse_mla._workspace.cache_clear()


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", ["selected, fp8", "glm widths, fp8"])
def test_case(name: str):
    (case,) = (each for each in MLA.contract.cases if each.name == name)
    (result,) = try_case(MLA, BACKEND, case, torch.bfloat16, CPU)
    assert result.relative_l2 <= 4e-3


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("topk", [0, 100])
def test_steps_of_every_kind(topk: int):
    """Decodes, prompts, a sequence that only fills up; a selection with gaps and unseen keys."""
    lens = ((1, 130), (3, 70), (1, 0), (1, 1))
    inputs = drawn(glm_case("kinds", lens, topk, 16, FP8), CPU, torch.bfloat16)
    if topk:
        inputs["selected"][0, ::3] = -1
        inputs["selected"][1] = -1
    truth = exact(inputs)
    if topk:
        inputs["selected"][0, 0] = 5000
    assert relative_error(BACKEND.run(**inputs), truth) <= 4e-3


@pytest.mark.parametrize(("heads", "keys"), [(64, ACTIVATION), (129, FP8)])
def test_the_rest_is_left_to_triton(heads: int, keys: Any, monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr(portable, "run", lambda *arguments: seen.append(arguments))
    BACKEND.run(**drawn(glm_case("rest", ((1, 2),), 0, heads, keys), CPU, torch.bfloat16))
    assert len(seen) == 1


def test_the_package_hands_it_out():
    """By its public name."""
    assert "from ._core import *" in source.text_of("mla/__init__.py")
    assert "__all__" not in source.text_of("mla/_core.py")


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch):
    workstation = DeviceSnapshot("RTX PRO 6000", "cuda", (12, 0), 1 << 36, 188)
    hopper = replace(workstation, name="H200", compute_capability=(9, 0))
    assert "12.0 or 12.1 (Blackwell), this GPU has 9.0" in str(BACKEND.why_not(hopper))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    if triton_support.triton is not None:
        assert 'pip install -e ".[flashinfer]"' in str(BACKEND.why_not(workstation))
    assert BACKEND.rounding is not None
    assert "not run on hardware" in BACKEND.remarks
    with pytest.raises(UnsupportedError, match="needs an NVIDIA GPU"):
        resolve_ops("cpu", {"mla.decode": "flashinfer_sparse_mla"})
