"""The numeric check a backend must pass on this very device before it is used.

Every backend, the reference too, is compared with the op's float64 check, which is written another
way (row by row, in Python) and shares no code with it. One that rounds on the way is compared with
a check that rounds at the same places.
"""

from __future__ import annotations

import torch

from tetrad.core.keys import ACTIVATION, KeyFormat
from tetrad.kernels.backend import Backend, Op
from tetrad.kernels.compare import Comparison, compare
from tetrad.kernels.contract import Case


def try_case(
    op: Op, backend: Backend, case: Case, dtype: torch.dtype, device: torch.device
) -> tuple[Comparison, ...]:
    """Run one case and compare each of its results."""
    arguments = op.check.inputs(case, dtype, device)
    check = backend.rounding or op.check
    expected = check.expected(arguments)
    if name := op.contract.prepared:
        arguments[name] = backend.prepare(arguments[name], dtype)
    results = op.check.values(arguments, op.check.outputs(backend.run(**arguments)))
    return tuple(compare(ours, truth) for ours, truth in zip(results, expected, strict=True))


def tolerance_of(op: Op, backend: Backend, dtype: torch.dtype) -> float:
    """The largest relative error that `try_case` may find."""
    promise = backend.rounding or op.contract
    return promise.tolerance[str(dtype).removeprefix("torch.")]


def canary(
    op: Op,
    backend: Backend,
    dtype: torch.dtype,
    device: torch.device,
    keys: KeyFormat = ACTIVATION,
) -> str | None:
    """None when the contract's canary cases come out right, else one sentence."""
    cases = op.contract.canary_cases(keys)
    sentences = (canary_case(op, backend, case, dtype, device) for case in cases)
    return next((sentence for sentence in sentences if sentence is not None), None)


def canary_case(
    op: Op, backend: Backend, case: Case, dtype: torch.dtype, device: torch.device
) -> str | None:
    """One of these cases."""
    try:
        results = try_case(op, backend, case, dtype, device)
    except Exception as error:  # noqa: BLE001  # compiler, driver, kernel: all mean "not here"
        return f"fails on this device in the case '{case.name}': {told(error)}"
    tolerance = tolerance_of(op, backend, dtype)
    for result in results:
        if not result.passes(tolerance):
            return (
                f"wrong numbers on this device: relative error {result.relative_l2:.2g} in "
                f"the case '{case.name}' where {tolerance:.2g} is allowed"
            )
    return None


def told(error: Exception) -> str:
    """Kind and first line of an error, for use within a sentence."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300].rstrip(": ")
