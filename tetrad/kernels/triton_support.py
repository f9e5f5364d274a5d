"""Triton where it is installed.

Where it is not, modules with kernels import all the same, and their backends say what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tetrad.core.hardware import DeviceSnapshot

# A multiplication and an addition become one operation with one rounding. Triton 3.9 asks for this
# to be said and 3.10 changes what it does unasked; numbers should not depend on its version.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    triton = tl = TensorDescriptor = None

__all__ = [
    "MIN_CAPABILITY",
    "TensorDescriptor",
    "cdiv",
    "constexpr",
    "jit",
    "next_power_of_2",
    "row_warps",
    "tl",
    "triton",
    "why_not",
]

MIN_CAPABILITY = (8, 0)
"""Ampere: the first with bf16 in its tensor cores."""


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit`, or the function as it is where nothing could compile it."""
    decorate: Callable[[Callable[..., Any]], Any] = (
        triton.jit(**options) if triton is not None else lambda kernel: kernel
    )
    return decorate


def why_not(device: DeviceSnapshot) -> str | None:
    """None, or why Triton kernels cannot run on `device`, and what would cure it."""
    if device.compute_capability is None:
        return "needs an NVIDIA GPU; on a CPU use 'torch'"
    if triton is None:
        return 'Triton is not installed; `pip install "triton>=3.6,<4"` installs it'
    if device.compute_capability < MIN_CAPABILITY:
        found, needed = (".".join(map(str, c)) for c in (device.compute_capability, MIN_CAPABILITY))
        return f"needs compute capability {needed} (Ampere) or later, this GPU has {found}"
    return None


def constexpr(value: Any) -> Any:
    """A constant that kernels may read from their module."""
    return value if triton is None else tl.constexpr(value)


def is_interpreted() -> bool:
    """Does Triton run kernels in Python (TRITON_INTERPRET=1), which knows no inline PTX?"""
    return bool(triton.knobs.runtime.interpret)


def cdiv(size: int, part: int) -> int:
    """How many parts cover `size`."""
    return -(-size // part)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is at least `size`; tile edges are powers of two."""
    return 1 << max(0, size - 1).bit_length()


def row_warps(columns: int) -> int:
    """Warps for a program that holds a row of so many columns: at most 32 for each thread."""
    return min(32, max(1, columns // 512))
