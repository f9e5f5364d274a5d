"""What an op promises, as data: no torch, so that cost models and tables can read it anywhere.

Each `kernels/<op>/contract.py` holds one `CONTRACT`. Shapes use the axis letters of `core/arch.py`;
W stands for a width that differs from use to use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tetrad.core.keys import ACTIVATION, KeyFormat

BITS_PER_WEIGHT: Mapping[str, float] = {
    "bf16": 16.0,
    "fp8_tensor": 8.0,
    "fp8_block": 8.0,
    "nvfp4": 4.5,
    "int4": 6.0,
    "int8": 8.0,
    "int8_block": 9.0,
}
"""Bits a weight takes in memory, block scales included, by `format_name` of the stored weight."""


CANARY_CASES = 2
"""How many of a contract's cases a backend must pass at start-up; tests run all of them."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument or result of an op."""

    name: str
    shape: str
    """Axis letters, e.g. "[T, H, R]"; "" for a plain Python value."""
    dtype: str
    """A torch dtype, "activation" (the model's dtype), "weight" (any stored format) or a type."""
    meaning: str


@dataclass(frozen=True, slots=True)
class Case:
    """One shape at which an op is checked and timed."""

    name: str
    values: Mapping[str, Any]
    is_large: bool = False
    """Its inputs are drawn on the device, in whatever way is quick: weights as random codes and
    scales. Other cases are drawn on the CPU, so that every device gets the same numbers."""

    def __getitem__(self, key: str) -> Any:
        return self.values[key]


def case(name: str, **values: Any) -> Case:
    """A case from keyword arguments; the keys are the op's own."""
    return Case(name, values)


@dataclass(frozen=True, slots=True)
class Contract:
    """Name, arguments, cost, cases and tolerance of one op."""

    name: str
    summary: str
    """One line: what is computed."""
    arguments: tuple[Argument, ...]
    results: tuple[Argument, ...]
    cases: tuple[Case, ...]
    """Of those for each format of keys, where they have one, the first CANARY_CASES are small and
    take every branch of the op."""
    flops: Callable[[Case], float]
    """Useful floating-point operations; a multiply-add is two."""
    bytes: Callable[[Case, int], float]
    """Bytes that must cross the memory bus once, given the bytes of one activation."""
    tolerance: Mapping[str, float]
    """Activation dtype → largest relative L2 error against float64. Integers must be equal."""
    prepared: str | None = None
    """Name of the argument that a backend's `prepare` converts once at load."""

    @property
    def changes_an_argument(self) -> bool:
        """Is a result an argument that the op writes to?"""
        names = {argument.name for argument in self.arguments}
        return any(result.name in names for result in self.results)

    def canary_cases(self, keys: KeyFormat = ACTIVATION) -> tuple[Case, ...]:
        """What a backend must pass at start-up, where keys are cached as `keys`."""
        return tuple(c for c in self.cases if c.values.get("keys", keys) == keys)[:CANARY_CASES]

    @property
    def is_smooth(self) -> bool:
        """Do two right backends differ by rounding only? Not where a near-tie is decided."""
        only_activations = all(result.dtype == "activation" for result in self.results)
        return only_activations and not self.changes_an_argument


def ragged_pairs(lens: tuple[tuple[int, int], ...]) -> int:
    """(query, key) pairs of a causal step with (query_len, kv_len) sequences."""
    return sum(query_len * kv_len - query_len * (query_len - 1) // 2 for query_len, kv_len in lens)


def num_rows(lens: tuple[tuple[int, int], ...]) -> int:
    """T of a step with (query_len, kv_len) sequences."""
    return sum(query_len for query_len, _ in lens)


def num_keys(lens: tuple[tuple[int, int], ...]) -> int:
    """Keys that all sequences of a step hold together."""
    return sum(kv_len for _, kv_len in lens)
