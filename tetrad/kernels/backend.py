"""What a backend of an op is, and what its op needs to check it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tetrad.core.hardware import DeviceSnapshot
from tetrad.kernels.contract import Case, Contract


def _runs_anywhere(_device: DeviceSnapshot) -> str | None:
    return None


def _as_they_are(_inputs: dict[str, Any], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs


def _as_stored(weight: Any, _dtype: torch.dtype) -> Any:
    return weight


@dataclass(frozen=True, slots=True)
class Rounding:
    """What a backend rounds on the way besides its results.

    Its answers differ from those of the other backends by more than the contract allows, so `auto`
    leaves it alone: who serves a model chooses its accuracy. It is checked against a float64 answer
    that rounds at the same places.
    """

    meaning: str
    """Completes "this backend ..."."""
    expected: Callable[[dict[str, Any]], tuple[Tensor, ...]]
    """As `Check.expected`, rounding where the backend does."""
    tolerance: Mapping[str, float]
    """Activation dtype → largest relative L2 error against `expected`."""
    deviation: float
    """Largest relative L2 error against the op's exact answer."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to compute an op. Calling the backend runs it."""

    name: str
    run: Callable[..., Any]
    """The op, with the arguments of its contract."""
    why_not: Callable[[DeviceSnapshot], str | None] = _runs_anywhere
    """None, or one sentence: the fact that stops it here and what would cure it."""
    prepare: Callable[[Any, torch.dtype], Any] = _as_stored
    """Converts the contract's `prepared` argument once at load, given the activations' dtype. The
    result has `nbytes`."""
    issued_flops: Callable[[Mapping[str, Any]], float | None] | None = None
    """Floating-point operations of a call with these arguments (prepared), padding included; None
    where it cannot tell."""
    rounding: Rounding | None = None
    """None: nothing but the results."""
    note: str = ""
    """How far it is proven, where that is less than the others are."""

    @property
    def remarks(self) -> str:
        """What whoever chooses the backend should know, shown wherever it is listed; or ""."""
        rounds = "" if self.rounding is None else self.rounding.meaning
        return "; ".join(filter(None, (self.note, rounds)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Check:
    """How an op is tried out: inputs for a case, and the answer computed another way."""

    inputs: Callable[[Case, torch.dtype, torch.device], dict[str, Any]]
    """Arguments by name, seeded, weights as stored."""
    expected: Callable[[dict[str, Any]], tuple[Tensor, ...]]
    """The results in float64 (integers in int64) on the CPU, written token by token and sharing
    nothing with any backend. Does not change its argument."""
    outputs: Callable[[Any], tuple[Tensor, ...]] = lambda result: (result,)
    """What to compare of what the op returned."""
    values: Callable[[dict[str, Any], tuple[Tensor, ...]], tuple[Tensor, ...]] = _as_they_are
    """The numbers that outputs stand for, given the inputs, where they may be codes."""


@dataclass(frozen=True, slots=True)
class Op:
    """Contract, check, and backends in order of preference."""

    contract: Contract
    check: Check
    backends: Mapping[str, Backend]
