"""The adapter to Humming: against a stand-in for the package, and against its real signature."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tetrad.core.hardware import DeviceSnapshot
from tetrad.formats.weights import Nvfp4Weight
from tetrad.kernels import triton_support
from tetrad.kernels.activation.reference import run as activation
from tetrad.kernels.canary import try_case
from tetrad.kernels.experts import humming
from tetrad.kernels.experts.humming import BACKEND, COMPUTE_OPTIONS, LAYER_OPTIONS, HummingExperts
from tetrad.kernels.experts.reference import DenseExperts
from tetrad.kernels.experts.weights import ExpertWeights
from tetrad.kernels.reduce_experts.reference import run as reduce_experts
from tetrad.kernels.registry import OPS

CPU = torch.device("cpu")
OP = OPS["experts"]
NVFP4 = [c for c in OP.contract.cases if c["format"] == c["down_format"] == "nvfp4"]

(EMPTY,) = (c for c in NVFP4 if c.name == "nvfp4 with empty experts")


class FakeLayer(torch.nn.Module):
    """Multiplies each expert's rows by its matrix, as Humming's grouped product does."""

    def __init__(self, shape_n: int, shape_k: int, num_experts: int, **options: Any) -> None:
        super().__init__()
        assert options == LAYER_OPTIONS
        self.shape = (num_experts, shape_n, shape_k)
        self.is_transformed = False

    def load_from_tensors(self, tensors: dict[str, Tensor]) -> None:
        stored = Nvfp4Weight(tensors["weight"], tensors["weight_scale"], tensors["weight_scale_2"])
        assert tuple(stored.shape) == self.shape
        self.weight = torch.nn.Parameter(stored.dequantize(torch.float32), requires_grad=False)

    def transform(self, allow_inplace: bool) -> None:
        self.is_transformed = True

    def forward(self, inputs: Tensor, expert_layout: Tensor, compute_config: Any) -> Tensor:
        assert self.is_transformed
        assert compute_config == COMPUTE_OPTIONS
        assert expert_layout.dtype == torch.int64
        starts = expert_layout.tolist()
        assert len(starts) == len(self.weight) + 1
        assert starts[0] == 0
        out = torch.full((len(inputs), self.shape[1]), torch.nan, dtype=inputs.dtype)
        for expert, (begin, end) in enumerate(pairwise(starts)):
            rows = inputs[begin:end].float()
            out[begin:end] = (rows @ self.weight[expert].T).to(inputs.dtype)
        return out


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("humming.layer")
    module.HummingLayer = FakeLayer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "humming.layer", module)
    monkeypatch.setattr(humming, "gated", activation)
    monkeypatch.setattr(humming, "reduce_experts", reduce_experts)


@pytest.mark.parametrize("case", NVFP4, ids=lambda case: case.name)
def test_every_nvfp4_case(stand_in: None, case: Any):
    (result,) = try_case(OP, BACKEND, case, torch.bfloat16, CPU)
    assert result.passes(OP.contract.tolerance["bfloat16"]), result


def test_dropped_slots_are_left_out(stand_in: None):
    arguments = OP.check.inputs(EMPTY, torch.bfloat16, CPU)
    weight = BACKEND.prepare(arguments["weight"], torch.bfloat16)
    arguments["ids"][1] = -1
    arguments["ids"][2, 0] = -1
    kept = arguments | {"ids": arguments["ids"].clamp(min=0)}
    kept["slot_weights"] = arguments["slot_weights"].masked_fill(arguments["ids"] < 0, 0.0)
    (truth,) = OP.check.expected(kept)
    y = BACKEND.run(**(arguments | {"weight": weight}))
    torch.testing.assert_close(y.double(), truth, rtol=0.02, atol=0.02)


def test_gate_and_up_are_joined_where_their_global_scales_agree(stand_in: None):
    stored: ExpertWeights = OP.check.inputs(EMPTY, torch.bfloat16, CPU)["weight"]
    assert isinstance(stored.gate, Nvfp4Weight)
    assert isinstance(stored.up, Nvfp4Weight)
    apart = BACKEND.prepare(stored, torch.bfloat16)
    alike = replace(stored.up, global_scale=stored.gate.global_scale)
    joined = BACKEND.prepare(replace(stored, up=alike), torch.bfloat16)
    assert isinstance(apart, HummingExperts)
    assert isinstance(joined, HummingExperts)
    assert (len(apart.gate_up), len(joined.gate_up)) == (2, 1)
    num_experts, _, width = stored.gate.shape
    rows, starts = torch.randn(num_experts, width).bfloat16(), torch.arange(num_experts + 1)
    separate = BACKEND.prepare(replace(stored, up=alike), torch.bfloat16)
    object.__setattr__(separate, "gate_up", tuple(map(humming._layer, (stored.gate, alike))))
    torch.testing.assert_close(joined.hidden(rows, starts), separate.hidden(rows, starts))
    assert joined.nbytes > 0


def test_what_humming_does_not_take_stays_with_torch():
    for case in OP.contract.cases:
        stored = OP.check.inputs(case, torch.float32, CPU)["weight"]
        assert isinstance(BACKEND.prepare(stored, torch.float32), DenseExperts)
        if case not in NVFP4:
            assert isinstance(BACKEND.prepare(stored, torch.bfloat16), DenseExperts)


def gpu(*capability: int) -> DeviceSnapshot:
    return DeviceSnapshot("GPU", "cuda", (capability[0], capability[1]), 1 << 36, 100)


def test_why_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton_support, "triton", object())
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert "pip install humming-kernels" in str(BACKEND.why_not(gpu(9, 0)))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    assert "8.0" in str(BACKEND.why_not(gpu(7, 5)))
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        assert BACKEND.why_not(gpu(*capability)) is None


def test_the_calls_fit_the_installed_package():
    real = pytest.importorskip("humming.layer").HummingLayer
    inspect.signature(real).bind(shape_n=512, shape_k=256, num_experts=4, **LAYER_OPTIONS)
    inspect.signature(real.forward).bind(
        None, inputs=None, expert_layout=None, compute_config=COMPUTE_OPTIONS
    )
    inspect.signature(real.load_from_tensors).bind(None, {})
    inspect.signature(real.transform).bind(None, allow_inplace=True)
    schema = pytest.importorskip("humming.schema").BaseWeightSchema
    wanted = schema.from_config(dict(LAYER_OPTIONS["weight_config"])).get_tensors_attrs(
        shape_n=512, shape_k=256, param_dtype=torch.bfloat16, num_experts=4
    )
    assert {name: (each["shape"], each["dtype"]) for name, each in wanted.items()} == {
        "weight": ((4, 512, 128), torch.uint8),
        "weight_scale": ((4, 512, 16), torch.float8_e4m3fn),
        "weight_scale_2": ((4,), torch.float32),
    }
