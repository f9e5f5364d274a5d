"""What of this machine's cores and main memory a process may use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
PROCESSORS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class Memory:
    """One device's memory as read once."""

    total_bytes: int
    free_bytes: int


def main_memory(cgroup: Path = CGROUP) -> Memory:
    """Main memory as far as this process's control group allows."""
    main = psutil.virtual_memory()
    limit = _first_number(cgroup / "memory.max")
    if limit is None or limit >= main.total:
        return Memory(main.total, main.available)
    used = _first_number(cgroup / "memory.current") or 0
    return Memory(limit, min(main.available, limit - used))


def usable_processors(cgroup: Path = CGROUP) -> int:
    """Logical processors within this process's affinity and its control group's share, at least
    1."""
    logical = len(os.sched_getaffinity(0))
    quota, period = _numbers(cgroup / "cpu.max") or (logical, 1)
    return max(1, min(logical, quota // period))


def usable_cores(cgroup: Path = CGROUP, processors: Path = PROCESSORS) -> int:
    """Physical cores among them, at least 1.

    Two threads on one core, or more threads than a container's share, slow a matmul down.
    """
    cores = {_core(processors / f"cpu{number}", number) for number in os.sched_getaffinity(0)}
    return min(usable_processors(cgroup), len(cores))


def _core(processor: Path, number: int) -> str:
    """Names the logical processors that are one core with this one."""
    siblings = processor / "topology" / "thread_siblings_list"
    return siblings.read_text().strip() if siblings.is_file() else str(number)


def _first_number(path: Path) -> int | None:
    numbers = _numbers(path)
    return numbers[0] if numbers else None


def _numbers(path: Path) -> list[int]:
    """The numbers in a control file; [] if there is none, or its first word is "max"."""
    words = path.read_text().split() if path.is_file() else []
    return [int(word) for word in words] if words and words[0] != "max" else []
