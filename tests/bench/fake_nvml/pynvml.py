"""Stands in for NVIDIA's management library: three GPUs, of which the last two run something.

GPU 0 draws nothing. GPU 1 draws 300 W, counts its energy and is held back by its power cap. GPU 2
draws 100 W and, like an old one, has no energy counter. `TETRAD_FAKE_NVML=broken` has no driver.
"""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
WATTS = (0.0, 300.0, 100.0)
BIRTH_S = time.perf_counter()


class NVMLError(Exception):
    pass


def nvmlInit():  # the names are NVIDIA's
    if os.environ.get("TETRAD_FAKE_NVML") == "broken":
        raise NVMLError("Driver Not Loaded")


def nvmlDeviceGetCount():
    return len(WATTS)


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetComputeRunningProcesses(handle):
    return [] if handle == 0 else [SimpleNamespace(pid=1)]


def nvmlDeviceGetName(handle):
    return b"NVIDIA Fake"


def nvmlDeviceGetUUID(handle):
    return f"GPU-{handle}"


def nvmlDeviceGetEnforcedPowerLimit(handle):
    return 700_000


def nvmlDeviceGetMaxClockInfo(handle, clock):
    return 1980


def nvmlDeviceGetPowerUsage(handle):
    return int(WATTS[handle] * 1e3)


def nvmlDeviceGetTotalEnergyConsumption(handle):
    if handle == 2:
        raise NVMLError("Not Supported")
    return int(WATTS[handle] * (time.perf_counter() - BIRTH_S) * 1e3)


def nvmlDeviceGetUtilizationRates(handle):
    return SimpleNamespace(gpu=90, memory=40)


def nvmlDeviceGetMemoryInfo(handle):
    return SimpleNamespace(total=140 * 2**30, used=70 * 2**30)


def nvmlDeviceGetClockInfo(handle, clock):
    return {NVML_CLOCK_SM: 1500, NVML_CLOCK_MEM: 3201}[clock]


def nvmlDeviceGetTemperature(handle, sensor):
    return 60


def nvmlDeviceGetCurrentClocksEventReasons(handle):
    return 0x4 if handle == 1 else 0x1
