"""What of this machine the engine may use: device, memory, threads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from tetrad.core.errors import UnsupportedError

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Memory:
    """One device's memory as read once."""

    total_bytes: int
    free_bytes: int


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
    main = psutil.virtual_memory()
    limit = _first_number(cgroup / "memory.max")
    if limit is None or limit >= main.total:
        return Memory(main.total, main.available)
    used = _first_number(cgroup / "memory.current") or 0
    return Memory(limit, min(main.available, limit - used))


def use_sensible_threads() -> None:
    """Give torch one thread for each physical core this process may use but one, which the API
    process needs; OMP_NUM_THREADS overrides."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() - 1))


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Physical cores within this process's affinity and its control group's share, at least 1.

    Two threads on one core, or more threads than a container's share, slow a matmul down.
    """
    logical = len(os.sched_getaffinity(0))
    physical = psutil.cpu_count(logical=False) or logical
    quota, period = _numbers(cgroup / "cpu.max") or (logical, 1)
    return max(1, min(logical, physical, quota // period))


def _first_number(path: Path) -> int | None:
    numbers = _numbers(path)
    return numbers[0] if numbers else None


def _numbers(path: Path) -> list[int]:
    """The numbers in a control file; [] if there is none, or its first word is "max"."""
    words = path.read_text().split() if path.is_file() else []
    return [int(word) for word in words] if words and words[0] != "max" else []
