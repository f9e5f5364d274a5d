"""Reads what a device is."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import torch

from tetrad.core.hardware import DeviceSnapshot


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
