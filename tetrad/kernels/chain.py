"""Kernels whose programs take their places while the kernel before ends, and wait there.

Programmatic dependent launch, from Hopper on: a kernel begins some 0.2 µs earlier. A kernel
that is launched with `options` calls `after_previous` before it touches memory, so that every
kernel may rely on all before it.
"""

from __future__ import annotations

import functools
from typing import Any

from tetrad.kernels.triton_support import is_interpreted, jit, triton
from tetrad.kernels.triton_support import tl as tl  # the interpreter looks for it

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.language.target_info import cuda_capability_geq
except ImportError:
    gdc_launch_dependents = gdc_wait = cuda_capability_geq = None


@jit()
def after_previous() -> None:
    """Wait until the kernel before has ended and its stores can be read."""
    if cuda_capability_geq(9, 0):
        gdc_wait()


@jit()
def before_next() -> None:
    """Let the next kernel's programs take their places."""
    if cuda_capability_geq(9, 0):
        gdc_launch_dependents()


def options() -> dict[str, bool]:
    """What makes a launch one of these, where the GPU can."""
    try:
        device = triton.runtime.driver.active.get_current_device()
    except RuntimeError:  # no GPU: kernels are interpreted, or tests stand in for them
        return {}
    return {"launch_pdl": True} if _can_chain(device) else {}


@functools.cache
def _can_chain(_device: Any) -> bool:
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90 and not is_interpreted())
