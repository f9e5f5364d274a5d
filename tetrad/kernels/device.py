"""Reads what a device is, and watches over the host's waits for it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tetrad.core.hardware import DeviceSnapshot
from tetrad.kernels.host import CGROUP, Memory, main_memory


def snapshot(device: str | torch.device) -> DeviceSnapshot:
    """Describe "cpu", "cuda" or "cuda:1"."""
    device = torch.device(device)
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if device.type == "cpu":
        return DeviceSnapshot(
            name=platform.processor() or platform.machine(),
            kind="cpu",
            compute_capability=None,
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            num_cores=os.cpu_count() or 1,
            versions=versions,
        )
    found = torch.cuda.get_device_properties(device)
    return DeviceSnapshot(
        name=found.name,
        kind="cuda",
        compute_capability=(found.major, found.minor),
        memory_bytes=found.total_memory,
        num_cores=found.multi_processor_count,
        versions=versions
        | {"cuda": str(torch.version.cuda), "triton": _triton(), "driver": _driver()},
    )


def _triton() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    """The driver's release; "unknown" without nvidia-ml-py."""
    try:
        import pynvml
    except ImportError:
        return "unknown"
    try:
        pynvml.nvmlInit()
        found = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return "unknown"
    return found.decode() if isinstance(found, bytes) else str(found)


def device_memory(device: torch.device, cgroup: Path = CGROUP) -> Memory:
    """A GPU's memory, or main memory as far as this process's control group allows."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading left in torch's own pool is free, too
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return Memory(total_bytes, free_bytes)
    return main_memory(cgroup)


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """torch raises RuntimeError where the host would wait for a GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it may not see every such place
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
