"""Reading and copying a long vector as fast as a device can.

Kernels of our own where Triton runs: `torch.sum` is not made for it, and `copy_` becomes a transfer
node in a CUDA graph, which moved 2.78 TB/s on an H200.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tetrad.kernels import triton_support
from tetrad.kernels.device import snapshot
from tetrad.kernels.triton_support import jit, tl

SPAN, STEPS, WARPS = 4096, 4, 8
"""Numbers that a program takes at a time, how often, and its warps: 16 loads of 16 bytes for each
thread, none of which waits for another."""


@jit()
def read_kernel(source, partial, SPAN: tl.constexpr, STEPS: tl.constexpr):
    """The sum of a program's SPAN * STEPS numbers."""
    place = tl.program_id(0).to(tl.int64)
    at = source + place * (SPAN * STEPS) + tl.arange(0, SPAN)
    total = tl.zeros([SPAN], tl.float32)
    for step in tl.static_range(STEPS):
        total += tl.load(at + step * SPAN)
    tl.store(partial + place, tl.sum(total))


@jit()
def copy_kernel(source, target, SPAN: tl.constexpr, STEPS: tl.constexpr):
    """Copies a program's SPAN * STEPS numbers."""
    at = tl.program_id(0).to(tl.int64) * (SPAN * STEPS) + tl.arange(0, SPAN)
    for step in tl.static_range(STEPS):
        tl.store(target + at + step * SPAN, tl.load(source + at + step * SPAN))


def whole(num_numbers: int) -> int:
    """The most numbers up to `num_numbers` that programs share out evenly."""
    return num_numbers // (SPAN * STEPS) * (SPAN * STEPS)


def streams(source: Tensor, target: Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    """Calls that copy fp32 `source` to `target` and that sum it; `whole` numbers of both."""
    if triton_support.why_not(snapshot(source.device)) is not None:
        total = torch.empty((), device=source.device)
        # neg is a kernel on a GPU too
        return (
            lambda: torch.neg(source, out=target),
            lambda: torch.sum(source, dim=0, out=total),
        )
    num_programs = len(source) // (SPAN * STEPS)
    partial = source.new_empty(num_programs)

    def copy() -> None:
        copy_kernel[(num_programs,)](source, target, SPAN, STEPS, num_warps=WARPS)

    def read() -> None:
        read_kernel[(num_programs,)](source, partial, SPAN, STEPS, num_warps=WARPS)

    return copy, read
