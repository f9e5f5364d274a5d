"""Every op, every backend, every case of its contract, against float64."""

from __future__ import annotations

import inspect

import pytest
import torch

from tetrad.core.hardware import DeviceSnapshot
from tetrad.kernels.backend import Backend, Op
from tetrad.kernels.canary import tolerance_of, try_case
from tetrad.kernels.contract import Case
from tetrad.kernels.device import snapshot
from tetrad.kernels.experts.reference import StoredExperts
from tetrad.kernels.linear.reference import run as linear
from tetrad.kernels.registry import OPS

DEVICES = [
    pytest.param("cpu", id="cpu"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="cuda"),
]


def every_case() -> list[object]:
    return [
        pytest.param(op, backend, case, id=f"{op.contract.name}-{backend.name}-{case.name}")
        for op in OPS.values()
        for backend in op.backends.values()
        for case in op.contract.cases
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("op", "backend", "case"), every_case())
def test_op(op: Op, backend: Backend, case: Case, dtype: torch.dtype, device: str):
    here: DeviceSnapshot = snapshot(device)
    if (refusal := backend.why_not(here)) is not None:
        pytest.skip(refusal)
    tolerance = tolerance_of(op, backend, dtype)
    results = try_case(op, backend, case, dtype, torch.device(device))
    assert len(results) == len(op.contract.results)
    for result in results:
        assert result.passes(tolerance), result


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("add_rms_norm", "into"),
        ("route", "weights_into"),
        ("route", "ids_into"),
        ("route_activate", "weights_into"),
        ("route_activate", "ids_into"),
    ],
)
def test_a_result_is_written_where_it_is_wanted(name: str, place: str, device: str):
    """And nowhere beside it: `place` is rows of a larger tensor."""
    op = OPS[name]
    case = next(case for case in op.contract.cases if case.values.get("into"))
    for backend in op.backends.values():
        if backend.why_not(snapshot(device)):
            continue
        inputs = op.check.inputs(case, torch.float32, torch.device(device))
        num_rows, width = inputs[place].shape
        around = torch.full((num_rows + 2, width), 77, device=device, dtype=inputs[place].dtype)
        results = backend.run(**inputs | {place: around[1:-1]})
        (there,) = (r for r in results if r.data_ptr() == around[1:-1].data_ptr())
        number = [r.data_ptr() for r in results].index(there.data_ptr())
        assert there.equal(backend.run(**inputs | {place: None})[number])
        assert (around[0] == 77).all()
        assert (around[-1] == 77).all()


@pytest.mark.parametrize("case", OPS["experts"].contract.cases, ids=lambda case: case.name)
def test_experts_left_as_stored_give_what_decoded_ones_give(case: Case):
    """The path of devices that keep quantised experts, run on the CPU."""
    op = OPS["experts"]
    keeping = Backend("keeping", op.backends["torch"].run, prepare=lambda w, _: StoredExperts(w))
    (result,) = try_case(op, keeping, case, torch.float32, torch.device("cpu"))
    assert result.passes(op.contract.tolerance["float32"]), result


@pytest.mark.parametrize("case", OPS["linear"].contract.cases, ids=lambda case: case.name)
def test_a_linear_left_as_stored_gives_what_a_decoded_one_gives(case: Case):
    op = OPS["linear"]
    keeping = Backend("keeping", linear)
    (result,) = try_case(op, keeping, case, torch.float32, torch.device("cpu"))
    assert result.passes(op.contract.tolerance["float32"]), result


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_every_backend_takes_the_contracts_arguments(op: Op):
    promised = [argument.name for argument in op.contract.arguments]
    for backend in op.backends.values():
        assert list(inspect.signature(backend.run).parameters) == promised, backend.name
    inputs = op.check.inputs(op.contract.cases[0], torch.float32, torch.device("cpu"))
    assert list(inputs) == promised


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_costs_are_positive_and_grow_with_the_activation_size(op: Op):
    for case in op.contract.cases:
        assert op.contract.flops(case) >= 0
        assert 0 < op.contract.bytes(case, 1) <= op.contract.bytes(case, 4)


def test_experts_cost_counts_each_touched_expert_once():
    """Seven tokens for one expert read one expert's weights, not seven."""
    contract = OPS["experts"].contract
    one, many = (
        next(case for case in contract.cases if case.name == name)
        for name in ("one expert has every token", "nvfp4 with empty experts")
    )
    matrix_bytes = 32 * 48 * 4.5 / 8
    assert contract.bytes(one, 0) == pytest.approx(3 * matrix_bytes)
    assert 3 * matrix_bytes < contract.bytes(many, 0) <= 6 * 3 * matrix_bytes


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_check_draws_the_same_inputs_every_time(op: Op):
    """Else a failure could not be repeated."""
    case = op.contract.cases[0]
    first, second = (op.check.inputs(case, torch.float32, torch.device("cpu")) for _ in range(2))
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, second[name], rtol=0, atol=0, equal_nan=True)
