"""What `tetrad bench serve` looks at beside the load."""

from __future__ import annotations

from pydantic import model_validator

from tetrad.bench.options.workload import WorkloadOptions
from tetrad.core.option import option


class TelemetryOptions(WorkloadOptions):
    """A sampler of its own reads the GPUs and the server's /metrics while the load runs."""

    telemetry: bool = option(
        False,
        "Sample this machine's GPUs though the server's address is not this machine's, as behind a "
        "proxy or in a container; they are sampled anyway when it is.",
        group="Telemetry",
    )
    telemetry_gpus: tuple[int, ...] = option(
        (),
        "GPUs to sample, as nvidia-smi numbers them. Default: those on which a process runs, or all"
        " when the driver does not tell.",
        group="Telemetry",
    )
    telemetry_period_sec: float = option(
        0.5,
        "Seconds from one look at the GPUs and at the server's /metrics to the next; a look that "
        "took long is followed by fifty times as long a pause.",
        group="Telemetry",
        ge=0.05,
        le=60.0,
    )
    disable_telemetry: bool = option(False, "Sample nothing beside the load.", group="Telemetry")

    @model_validator(mode="after")
    def _samples_or_not(self) -> TelemetryOptions:
        if self.disable_telemetry and (self.telemetry or self.telemetry_gpus):
            raise ValueError(
                "--disable-telemetry samples nothing, so --telemetry and --telemetry-gpus go "
                "without it"
            )
        if any(index < 0 for index in self.telemetry_gpus):
            raise ValueError("--telemetry-gpus are numbers from 0, as nvidia-smi shows them")
        return self
