"""Facts about this machine that need no torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

import tetrad
from tetrad.core.extras import install
from tetrad.core.hardware import has_nvidia_driver

PACKAGES = ("torch", "triton", "safetensors", "tokenizers", "pydantic", "fastapi", "aiohttp")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU as the driver describes it."""

    name: str
    capability: str
    """Such as "9.0"."""
    memory_bytes: int
    free_bytes: int
    driver: str


@dataclass(frozen=True, slots=True)
class Machine:
    """The computer and the software on it."""

    system: str
    processor: str
    num_cores: int
    """Logical processors this process may use."""
    memory_bytes: int
    available_bytes: int
    python: str
    packages: dict[str, str]
    """Package → version, or "not installed"."""
    gpus: list[Gpu]
    gpu_note: str
    """Why no GPU is listed, or ""."""


def look() -> Machine:
    """Read everything."""
    memory = psutil.virtual_memory()
    gpus, note = find_gpus()
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=processor_name(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        memory_bytes=memory.total,
        available_bytes=memory.available,
        python=platform.python_version(),
        packages={"tetrad": tetrad.__version__} | {name: version(name) for name in PACKAGES},
        gpus=gpus,
        gpu_note=note,
    )


def version(package: str) -> str:
    """Installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def processor_name() -> str:
    """The marketing name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def find_gpus() -> tuple[list[Gpu], str]:
    """GPUs by the driver's own library, and a sentence when there are none."""
    try:
        import pynvml
    except ImportError:
        if not has_nvidia_driver():
            return [], "no NVIDIA driver"
        return [], f"the driver cannot be queried; `{install('gpu')}` brings nvidia-ml-py"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [], "no NVIDIA driver"
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        found = []
        for handle in handles:
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            name = _text(pynvml.nvmlDeviceGetName(handle))
            found.append(Gpu(name, f"{major}.{minor}", memory.total, memory.free, driver))
    finally:
        pynvml.nvmlShutdown()
    return found, "" if found else "the NVIDIA driver sees no GPU"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
