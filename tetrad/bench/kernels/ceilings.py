"""What a device can do at best, measured in the run that is compared with it."""

from __future__ import annotations

import torch

from tetrad.bench.kernels.stream import streams, whole
from tetrad.core.records import Ceilings
from tetrad.kernels.timer import Timer

GPU_BYTES, CPU_BYTES = 2 << 30, 64 << 20
"""Of the vector that is copied and summed."""
GPU_EDGE, CPU_EDGE = 8192, 768
"""Of the square matrices that are multiplied."""
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
    edge = GPU_EDGE if on_gpu else CPU_EDGE
    left, right = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(2))
    product, number = torch.empty_like(left), torch.zeros((), device=device)
    gemm = timer.time([lambda: torch.mm(left, right, out=product)], share_s)
    launch = timer.time([lambda: number.add_(1.0)], share_s)
    return Ceilings(
        copy_tb_per_s=copy_tb_per_s,
        read_tb_per_s=read_tb_per_s,
        gemm_tflops=2 * edge**3 / gemm.median_us / 1e6,
        launch_us=launch.median_us,
    )


def _stream(
    timer: Timer, num_bytes: int, device: torch.device, share_s: float
) -> tuple[float, float]:
    """TB/s of copying about `num_bytes`, read and written, and of summing them."""
    source = torch.ones(whole(num_bytes // 4), device=device)
    copy, read = streams(source, torch.empty_like(source))
    copy_us, read_us = (timer.time([call], share_s).median_us for call in (copy, read))
    return 2 * source.nbytes / copy_us / 1e6, source.nbytes / read_us / 1e6
