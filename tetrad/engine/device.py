"""What of this machine the engine may use: device, memory, threads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import torch

from tetrad.core.errors import UnsupportedError
from tetrad.kernels.host import CGROUP, Memory, main_memory, usable_cores


def resolve_device(wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device to run on. Raises UnsupportedError for a GPU that is not there."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            "--device cuda: torch sees no GPU here; --device cpu runs without one."
        )
    has_gpu = wanted != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", 0) if has_gpu else torch.device("cpu")


def device_memory(device: torch.device, cgroup: Path = CGROUP) -> Memory:
    """A GPU's memory, or main memory as far as this process's control group allows."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading left in torch's own pool is free, too
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return Memory(total_bytes, free_bytes)
    return main_memory(cgroup)


def use_sensible_threads() -> None:
    """Give torch one thread for each physical core this process may use but one, which the API
    process needs; OMP_NUM_THREADS overrides."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() - 1))
