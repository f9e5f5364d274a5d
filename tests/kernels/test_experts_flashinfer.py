"""The adapters to FlashInfer: their layouts and factors against stand-ins that read weights as the
package documents them, and their calls against the package's own source."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import flashinfer_source as source
from tests.kernels.rows import reference_rows
from tetrad.core.hardware import DeviceSnapshot
from tetrad.formats import e2m1, nvfp4
from tetrad.formats.weights import Nvfp4Weight
from tetrad.kernels import triton_support
from tetrad.kernels.backend import Backend
from tetrad.kernels.canary import tolerance_of, try_case
from tetrad.kernels.compare import compare
from tetrad.kernels.experts import (
    flashinfer_cutedsl,
    flashinfer_cutlass,
    flashinfer_parts,
    flashinfer_trtllm,
)
from tetrad.kernels.experts.nvfp4_stacks import Nvfp4Experts
from tetrad.kernels.experts.reference import DenseExperts
from tetrad.kernels.experts.weights import ExpertWeights
from tetrad.kernels.registry import OPS

CPU = torch.device("cpu")
OP = OPS["experts"]
MODULES = (flashinfer_trtllm, flashinfer_cutedsl, flashinfer_cutlass)
BACKENDS: tuple[Backend, ...] = tuple(module.BACKEND for module in MODULES)
ENTRIES = {
    "flashinfer_trtllm": ("fused_moe/core.py", "trtllm_fp4_block_scale_routed_moe"),
    "flashinfer_cutedsl": ("fused_moe/cute_dsl/fused_moe.py", "cute_dsl_fused_moe"),
    "flashinfer_cutlass": ("fused_moe/core.py", "cutlass_fused_moe"),
}
WHOLE = [
    case
    for case in OP.contract.cases
    if case["format"] == case["down_format"] == "nvfp4" and case["D"] % 256 == case["F"] % 128 == 0
]
SMALLER = [case for case in OP.contract.cases if case not in WHOLE]


def values(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 of codes with row-major block scales [..., n / 16], in bytes."""
    decoded = e2m1.decode(codes.view(torch.uint8)).view(*scales.shape, 16)
    return (decoded * scales.view(torch.float8_e4m3fn).float()[..., None]).flatten(-2)


def from_tiles(raw: Tensor, num_experts: int, rows: int, columns: int) -> Tensor:
    """Bytes [E, rows, columns] out of flat memory, each fetched from where it must lie."""
    m, k = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    tile = m // 128 * (columns // 4) + k // 4
    at = tile * 512 + m % 32 * 16 + m % 128 // 32 * 4 + k % 4
    return raw.reshape(num_experts, -1)[:, at]


def mlp(
    x: Tensor,
    call: SimpleNamespace,
    between: Callable[[Tensor, int], Tensor],
    slot_weights: Tensor,
    ids: Tensor,
) -> Tensor:
    """Every slot that has an expert: silu(gate) * up, `between`, down; summed in fp32."""
    out = torch.zeros(len(x), call.down.shape[1])
    for token, slot in (ids >= 0).nonzero().tolist():
        expert = int(ids[token, slot])
        up, gate = call.up[expert] @ x[token], call.gate[expert] @ x[token]
        up, gate = up * call.up_factor[expert], gate * call.gate_factor[expert]
        hidden = torch.nn.functional.silu(gate) * up
        done = call.down[expert] @ between(hidden, expert) * call.down_factor[expert]
        out[token] += slot_weights[token, slot] * done
    return out


def again_by_row(hidden: Tensor, _expert: int) -> Tensor:
    return nvfp4.quantize(hidden.bfloat16()[None]).dequantize(torch.float32)[0]


def trtllm(call: dict[str, Any]) -> None:
    ids, slot_weights = call["topk_ids"]
    assert ids.dtype == torch.int32
    experts, rows, half = call["gemm1_weights"].shape
    down_rows, half_width = call["gemm2_weights"].shape[1:]

    def in_order(codes: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
        raw = from_tiles(scales.view(torch.uint8), experts, rows, columns // 16)
        shuffled = values(codes, raw)
        old = torch.arange(rows)
        return shuffled[:, old // 32 * 32 + old % 4 * 8 + old % 32 // 4]

    first = in_order(call["gemm1_weights"], call["gemm1_weights_scale"], rows, half * 2)
    x = values(call["hidden_states"], call["hidden_states_scale"])
    operands = SimpleNamespace(
        up=first[:, 0::2],
        gate=first[:, 1::2],
        down=in_order(
            call["gemm2_weights"], call["gemm2_weights_scale"], down_rows, half_width * 2
        ),
        up_factor=call["output1_scale_scalar"],
        gate_factor=call["output1_scale_gate_scalar"],
        down_factor=call["output2_scale_scalar"],
    )
    x = x * call["per_token_scale"][:, None]
    call["output"].copy_(mlp(x, operands, again_by_row, slot_weights, ids))


def cutedsl(call: dict[str, Any]) -> None:
    ids, x = call["token_selected_experts"], values(call["x"], call["x_sf"].squeeze(-1))
    assert ids.dtype == torch.int32
    assert call["x_sf"].dtype == torch.uint8

    def matrix(codes: Tensor, scales: Tensor) -> Tensor:
        _, rows, half = codes.shape
        m, k = torch.meshgrid(torch.arange(rows), torch.arange(half // 8), indexing="ij")
        raw = scales[m % 32, m % 128 // 32, m // 128, k % 4, k // 4]
        return values(codes, raw.permute(2, 0, 1))

    first = matrix(call["w1_weight"], call["w1_weight_sf"])
    row = torch.arange(first.shape[1]).view(-1, 2, 64)
    factor = call["w1_alpha"]
    operands = SimpleNamespace(
        up=first[:, row[:, 0].flatten()],
        gate=first[:, row[:, 1].flatten()],
        down=matrix(call["w2_weight"], call["w2_weight_sf"]),
        up_factor=factor,
        gate_factor=factor,
        down_factor=call["w2_alpha"],
    )
    assert call["fc2_input_scale"].tolist() == pytest.approx([1 / 2688])
    x = x * call["per_token_scale"][:, None]
    call["moe_output"].copy_(mlp(x, operands, again_by_row, call["token_final_scales"], ids))


def cutlass(call: dict[str, Any]) -> None:
    ids = call["token_selected_experts"]
    assert ids.dtype == torch.int32
    row_multiplier, scales, factor, hidden_multiplier, down_scales, down_factor = call[
        "quant_scales"
    ]
    assert row_multiplier.ndim == 0
    assert {call[f"fc{n}_expert_weights"].dtype for n in (1, 2)} == {torch.int64}
    assert {scales.dtype, down_scales.dtype} == {torch.int32}

    def matrix(words: Tensor, scales: Tensor) -> Tensor:
        experts, rows, columns = words.shape
        return values(words, from_tiles(scales.view(torch.uint8), experts, rows, columns))

    def rounded(row: Tensor, multiplier: Tensor) -> Tensor:
        return nvfp4.quantize((row * multiplier)[None], torch.tensor(1.0)).dequantize(
            torch.float32
        )[0]

    first = matrix(call["fc1_expert_weights"], scales)
    operands = SimpleNamespace(
        up=first.chunk(2, dim=1)[0],
        gate=first.chunk(2, dim=1)[1],
        down=matrix(call["fc2_expert_weights"], down_scales),
        up_factor=factor,
        gate_factor=factor,
        down_factor=down_factor,
    )
    x = torch.stack([rounded(row.float(), row_multiplier) for row in call["input"]])
    y = mlp(
        x,
        operands,
        lambda hidden, expert: rounded(hidden, hidden_multiplier[expert]),
        call["token_final_scales"],
        ids,
    )
    call["output"].copy_(y)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """FlashInfer with stand-ins for the three functions; the arguments that they got."""
    package, enums = ModuleType("flashinfer.fused_moe"), ModuleType("flashinfer.tllm_enums")
    enums.SfLayout = SimpleNamespace(layout_linear=2)  # type: ignore[attr-defined]
    found: list[dict[str, Any]] = []
    for compute, (_, name) in zip((trtllm, cutedsl, cutlass), ENTRIES.values(), strict=True):

        def entry(compute: Callable[..., None] = compute, **call: Any) -> None:
            found.append(call)
            compute(call)

        setattr(package, name, entry)
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", package)
    monkeypatch.setitem(sys.modules, "flashinfer.tllm_enums", enums)
    for module in (flashinfer_trtllm, flashinfer_cutedsl):
        monkeypatch.setattr(module, "quantize_rows", reference_rows)
    return found


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_whole_tiles(calls: list[dict[str, Any]], backend: Backend, case: Any):
    """Gate, up and down have global scales of their own in each expert."""
    (result,) = try_case(OP, backend, case, torch.bfloat16, CPU)
    assert len(calls) == 1
    assert result.passes(tolerance_of(OP, backend, torch.bfloat16)), result


def test_the_check_that_rounds_is_as_far_from_the_exact_answer_as_is_said():
    """Alone, not hidden behind what is added."""
    for case in WHOLE:
        arguments = OP.check.inputs(case, torch.bfloat16, CPU) | {"shared": None, "residual": None}
        (exact,) = OP.check.expected(arguments)
        for backend in BACKENDS:
            assert backend.rounding is not None
            (rounded,) = backend.rounding.expected(arguments)
            assert 0.1 < compare(rounded, exact).relative_l2 < backend.rounding.deviation


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_dropped_slots_negative_scales_and_other_global_scales(
    calls: list[dict[str, Any]], backend: Backend
):
    """Those of up are a third and three times those of gate."""
    arguments = OP.check.inputs(WHOLE[0], torch.bfloat16, CPU)
    stored: ExpertWeights = arguments["weight"]
    assert isinstance(stored.up, Nvfp4Weight)
    stored.up.scales.view(torch.uint8)[:, ::3, 1::2] ^= 0x80
    stored.up.global_scale.mul_(torch.tensor([1 / 3, 3.0, 1.0]))
    arguments["ids"][1] = -1
    arguments["ids"][2, 0] = -1
    assert backend.rounding is not None
    (truth,) = backend.rounding.expected(arguments)
    prepared = backend.prepare(stored, torch.bfloat16)
    y = backend.run(**(arguments | {"weight": prepared}))
    assert compare(y, truth).passes(tolerance_of(OP, backend, torch.bfloat16))
    assert prepared.nbytes == pytest.approx(stored.nbytes, rel=1e-3)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_what_is_not_accepted_stays_with_torch(backend: Backend):
    for case in SMALLER:
        stored = OP.check.inputs(case, torch.bfloat16, CPU)["weight"]
        assert isinstance(backend.prepare(stored, torch.bfloat16), DenseExperts), case.name
    stored = OP.check.inputs(WHOLE[0], torch.float32, CPU)["weight"]
    assert isinstance(backend.prepare(stored, torch.float32), DenseExperts)


def test_a_gate_of_zeros_does_not_divide():
    stored = OP.check.inputs(WHOLE[0], torch.bfloat16, CPU)["weight"]
    zero = replace(stored.gate, global_scale=torch.zeros_like(stored.gate.global_scale))
    stacks = Nvfp4Experts(zero, stored.up, stored.down)
    assert stacks.up_over_gate.tolist() == [1.0] * stored.num_experts


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_the_calls_fit_the_package(calls: list[dict[str, Any]], backend: Backend):
    """Every argument that reaches the entry point is bound to its signature."""
    signature = source.signature_of(*ENTRIES[backend.name])
    exports = source.text_of("fused_moe/__init__.py")
    assert re.search(rf"^ +{ENTRIES[backend.name][1]},$", exports, re.MULTILINE)
    try_case(OP, backend, WHOLE[0], torch.bfloat16, CPU)
    (call,) = calls
    bound = signature.bind(**call)
    assert set(bound.arguments) == set(call)
    with pytest.raises(TypeError):
        signature.bind(**call, no_such_argument=None)


def test_gpus_are_those_of_the_package():
    listed = source.constant("fused_moe/api.py", "_CUTLASS_NVFP4_ARCHS")
    assert tuple(divmod(arch, 10) for arch in listed) == flashinfer_cutlass.CAPABILITIES
    entry = source.function(*ENTRIES["flashinfer_cutedsl"])
    (listed,) = (
        ast.literal_eval(decorator.args[0])
        for decorator in entry.decorator_list
        if isinstance(decorator, ast.Call)
        and ast.unparse(decorator.func) == "supported_compute_capability"
    )
    without_rows = {107}
    expected = tuple(divmod(arch, 10) for arch in listed if arch not in without_rows)
    assert expected == flashinfer_cutedsl.CAPABILITIES
    assert "the Rubin gather kernel has no a_per_token_scale_ptr parameter" in source.text_of(
        ENTRIES["flashinfer_cutedsl"][0]
    )
    runners = source.text_of("fused_moe/runners.py")
    body = runners[runners.index("class TrtllmFp4RoutedRunner") :]
    found = re.search(r"supported = compute_capability in (\(\(.*?\)\))", body)
    assert found is not None
    assert ast.literal_eval(found[1]) == flashinfer_trtllm.CAPABILITIES


def test_numbers_are_those_of_the_package():
    enums = source.text_of("tllm_enums.py")
    assert f"Renormalize = ({flashinfer_trtllm.ROUTING_METHOD},)" in enums
    assert "layout_linear" in enums
    assert "Alignment of the padded hidden size (GEMM1's K).  Default ``512``.  Must" in (
        source.text_of("fused_moe/core.py")
    )


def rows_of(num_experts: int, count: int, columns: int) -> Tensor:
    return torch.arange(num_experts * count * columns).view(num_experts, count, columns)


def test_row_orders_are_those_of_the_package():
    """The package's own functions, run on the same rows."""
    core, utils = "fused_moe/core.py", "utils.py"
    rows = rows_of(2, 256, 4)
    alternating = source.run_alone(core, "get_reorder_rows_for_gated_act_gemm_row_indices")
    expected = torch.stack([expert[alternating(expert)] for expert in rows])
    assert torch.equal(flashinfer_trtllm._alternating(rows), expected)
    shuffle = source.run_alone(
        utils,
        "get_shuffle_matrix_a_row_indices",
        "get_shuffle_block_size",
        "_unaligned_rows_message",
        srcToDstBlk32RowMap=source.constant(utils, "srcToDstBlk32RowMap"),
        srcToDstBlk16RowMap=None,
    )
    expected = torch.stack([expert[shuffle(expert, 128)] for expert in rows])
    assert torch.equal(flashinfer_trtllm._shuffled(rows), expected)
    in_turn = source.run_alone("fused_moe/prepare.py", "_interleave_linear_and_gate")
    assert torch.equal(flashinfer_cutedsl._in_turn(rows), in_turn(rows, 64, dim=1))


def test_tiles_are_those_of_the_package():
    """The view that CuTe DSL reads, of memory in which each byte lies where it must."""
    convert = source.run_alone(
        "cute_dsl/utils.py", "convert_sf_to_mma_layout", ceil_div=lambda a, b: -(-a // b)
    )
    scales = torch.randint(0, 127, (2, 256, 8), dtype=torch.uint8)
    tiles = flashinfer_parts.in_tiles(scales)
    ours = flashinfer_cutedsl._strided(scales)
    theirs = convert(tiles.flatten(), m=256, k=128, num_groups=2)
    assert torch.equal(ours, theirs)
    assert ours.stride() == theirs.stride()
    assert torch.equal(from_tiles(tiles, 2, 256, 8), scales)


def test_ragged_tiles_are_filled_with_zeros():
    scales = torch.ones(1, 130, 5, dtype=torch.uint8)
    tiles = flashinfer_parts.in_tiles(scales)
    assert flashinfer_parts.in_rows(tiles).shape == (1, 256, 8)
    assert int(tiles.sum()) == 130 * 5


def gpu(*capability: int) -> DeviceSnapshot:
    return DeviceSnapshot("GPU", "cuda", (capability[0], capability[1]), 1 << 36, 100)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_why_not(backend: Backend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton_support, "triton", object())
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert "pip install" in str(backend.why_not(gpu(10, 0)))
    assert "'flashinfer'" in str(backend.why_not(gpu(10, 0)))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    for capability in ((8, 0), (9, 0)):
        sentence = str(backend.why_not(gpu(*capability)))
        assert f"this GPU has {capability[0]}.{capability[1]}" in sentence
        assert "'triton'" in sentence
    assert backend.why_not(gpu(10, 0)) is None
    assert backend.note == "not run on hardware"


def test_cute_dsl_needs_its_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton_support, "triton", object())
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: object() if name == "flashinfer" else None
    )
    assert "'cutlass' is not installed" in str(flashinfer_cutedsl.why_not(gpu(10, 0)))
    assert flashinfer_trtllm.why_not(gpu(10, 0)) is None


def test_runs_take_what_the_contract_gives():
    for backend in BACKENDS:
        assert list(inspect.signature(backend.run).parameters) == [
            argument.name for argument in OP.contract.arguments
        ]
