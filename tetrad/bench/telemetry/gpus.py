"""What the GPUs of this machine do, by NVIDIA's management library (`nvidia-ml-py`).

Used inside the sampler's process only; it imports nothing of the load generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tetrad.core.extras import install
from tetrad.core.hardware import has_nvidia_driver

FIELDS = (
    *("power_w", "energy_j", "sm_mhz", "memory_mhz", "busy", "memory_busy"),
    *("memory_used_bytes", "temperature_c", "throttle_bits"),
)
"""What one reading of one GPU holds, in this order."""
Reading = list[float | int | None]


class Gpus:
    """The GPUs that are watched; `why_none` says why there are none."""

    def __init__(self, wanted: Sequence[int] = ()) -> None:
        self.facts: list[dict[str, Any]] = []
        self.why_none = ""
        self._handles: list[Any] = []
        try:
            import pynvml
        except ImportError:
            self.why_none = (
                f"nvidia-ml-py is not installed; `{install('gpu')}` in Tetrad's folder brings it"
                if has_nvidia_driver()
                else "this machine has no NVIDIA driver"
            )
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._find(wanted)
        except pynvml.NVMLError as error:
            self.why_none = f"no NVIDIA driver answers ({error})"

    def _find(self, wanted: Sequence[int]) -> None:
        nvml = self._nvml
        count = nvml.nvmlDeviceGetCount()
        handles = {index: nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)}
        if missing := [index for index in wanted if index not in handles]:
            self.why_none = f"there is no GPU {missing[0]}; the driver sees {count}"
            return
        busy = [
            i
            for i, h in handles.items()
            if self._told(nvml.nvmlDeviceGetComputeRunningProcesses, h)
        ]
        for index in wanted or busy or handles:
            self._handles.append(handles[index])
            self.facts.append(self._facts_of(index, handles[index]))
        if not self.facts:
            self.why_none = "the NVIDIA driver sees no GPU"

    def _facts_of(self, index: int, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        limit = self._told(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        memory = self._told(nvml.nvmlDeviceGetMemoryInfo, handle)
        return {
            "index": index,
            "name": _text(self._told(nvml.nvmlDeviceGetName, handle)),
            "uuid": _text(self._told(nvml.nvmlDeviceGetUUID, handle)),
            "power_limit_w": None if limit is None else limit / 1e3,
            "max_sm_mhz": self._told(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
            "memory_total_bytes": None if memory is None else float(memory.total),
        }

    def read(self) -> list[Reading]:
        """One reading of each GPU, its values in the order of FIELDS."""
        return [self._reading(handle) for handle in self._handles]

    def _reading(self, handle: Any) -> Reading:
        nvml, told = self._nvml, self._told
        power = told(nvml.nvmlDeviceGetPowerUsage, handle)
        energy = told(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        rates = told(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = told(nvml.nvmlDeviceGetMemoryInfo, handle)
        return [
            None if power is None else power / 1e3,
            None if energy is None else energy / 1e3,
            told(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            told(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            None if rates is None else rates.gpu / 100,
            None if rates is None else rates.memory / 100,
            None if memory is None else float(memory.used),
            told(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            told(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle),
        ]

    def _told(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        """The driver's answer; None where this GPU or a container does not give it."""
        try:
            return ask(*arguments)
        except self._nvml.NVMLError:
            return None


def _text(value: str | bytes | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""
