"""The least time that a machine needs for what a step costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tetrad.roofline.cost import OpCall


@dataclass(frozen=True, slots=True)
class Rates:
    """What one device, and its link to the others, can do at best."""

    tb_per_s: float
    """Of memory read."""
    tflops: float
    """Of a large product."""
    link_gb_per_s: float
    """Into one device, from the others."""

    def limit_us(self, call: OpCall) -> float:
        """Of all calls like this one: reading or computing, whichever takes longer."""
        reading_us = call.bytes / self.tb_per_s / 1e6
        computing_us = call.flops / self.tflops / 1e6
        return call.count * max(reading_us, computing_us)

    def bound(self, call: OpCall) -> Literal["memory", "compute"]:
        """Which of the two."""
        reads_longer = call.bytes / self.tb_per_s >= call.flops / self.tflops
        return "memory" if reads_longer else "compute"

    def link_us(self, num_bytes: float) -> float:
        """Of receiving so much, latencies left out."""
        return num_bytes / self.link_gb_per_s / 1e3
