"""What a device can do at best, measured in the run that is compared with it."""

from __future__ import annotations

import torch

from tetrad.bench.kernels.stream import streams, whole
from tetrad.core.records import CallTime, Ceilings
from tetrad.kernels.timer import Timer

GPU_BYTES, CPU_BYTES = 2 << 30, 64 << 20
"""Of the vector that is copied and summed."""
GPU_EDGES, CPU_EDGES = (8192,), (256, 768)
"""Of the square matrices that are multiplied; the fastest counts. On a CPU that others use too the
large ones always lose a time slice, and with many threads the small ones cannot use them all."""
FREE_SHARE = 4
"""The copy takes at most one part in this many of the free memory."""


def measure_ceilings(
    timer: Timer, dtype: torch.dtype, device: torch.device, budget_s: float
) -> Ceilings:
    """Copy, streaming read, large matrix product and an almost empty call."""
    on_gpu = device.type == "cuda"
    num_bytes = CPU_BYTES
    if on_gpu:
        num_bytes = min(GPU_BYTES, torch.cuda.mem_get_info(device)[0] // FREE_SHARE)
    share_s = budget_s / 4
    copy_tb_per_s, read_tb_per_s = _stream(timer, num_bytes, device, share_s)
    edges, number = GPU_EDGES if on_gpu else CPU_EDGES, torch.zeros((), device=device)
    products = [_product(timer, edge, dtype, device, share_s / len(edges)) for edge in edges]
    launch = timer.time([lambda: number.add_(1.0)], share_s)
    return Ceilings(
        copy_tb_per_s=copy_tb_per_s,
        read_tb_per_s=read_tb_per_s,
        gemm_tflops=max(products),
        launch_us=launch.median_us,
    )


def _product(
    timer: Timer, edge: int, dtype: torch.dtype, device: torch.device, share_s: float
) -> float:
    """TFLOP/s of a square product."""
    left, right = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    time = timer.time([lambda: torch.mm(left, right, out=product)], share_s)
    return 2 * edge**3 / _best_us(time) / 1e6


def _best_us(time: CallTime) -> float:
    """On a CPU the shortest: what is longer lost the core for a while, and is no ceiling."""
    return time.min_us if time.method == "wall" else time.median_us


def _stream(
    timer: Timer, num_bytes: int, device: torch.device, share_s: float
) -> tuple[float, float]:
    """TB/s of copying about `num_bytes`, read and written, and of summing them."""
    source = torch.ones(whole(num_bytes // 4), device=device)
    copy, read = streams(source, torch.empty_like(source))
    copy_us, read_us = (_best_us(timer.time([call], share_s)) for call in (copy, read))
    return 2 * source.nbytes / copy_us / 1e6, source.nbytes / read_us / 1e6
