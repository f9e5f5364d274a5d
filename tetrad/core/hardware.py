"""What a device is, as plain data. `tetrad.kernels.device` reads it from torch."""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """One device and the software that drives it, as found when it was taken."""

    name: str
    """As the vendor writes it, e.g. "NVIDIA H200"; the processor's architecture for a CPU."""
    kind: Literal["cpu", "cuda"]
    compute_capability: tuple[int, int] | None
    """(9, 0) for Hopper; None on a CPU."""
    memory_bytes: int
    """Device memory; main memory for a CPU."""
    num_cores: int
    """Streaming multiprocessors; logical processors for a CPU."""
    versions: dict[str, str] = field(default_factory=dict)
    """Package or driver → version: python, torch; cuda, triton and driver on a GPU."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form, for /server_info and records."""
        return asdict(self)


def has_nvidia_driver() -> bool:
    """Whether a GPU can be there at all: so much is known without torch and NVIDIA's packages."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
