"""What `tetrad bench compare` was asked: all that a run takes, and two servers."""

from __future__ import annotations

from pydantic import model_validator

from tetrad.bench.options.serve import BenchServeConfig
from tetrad.core.option import option


class BenchCompareConfig(BenchServeConfig):
    """The same load on two servers, in turns."""

    a: str = option("", "Address of the first server, such as http://host:30000.", group="Compare")
    b: str = option(
        "",
        "Address of the second; the first once more shows how far one server is from itself.",
        group="Compare",
    )
    pairs: int = option(
        6,
        "Runs of each server, in the order A B, B A, A B, ...; three at least give an interval.",
        group="Compare",
        ge=3,
        le=100,
    )

    @model_validator(mode="after")
    def _has_two_servers(self) -> BenchCompareConfig:
        if not self.a or not self.b:
            raise ValueError("two addresses are compared, as in `tetrad bench compare A B`")
        if self.repeat != 1 or {"base_url", "host", "port"} & self.model_fields_set:
            raise ValueError(
                "A and B take the place of --base-url, --host and --port, and --pairs that of "
                "--repeat"
            )
        if self.warmup_until_steady:
            raise ValueError("each run of a comparison warms up alike; use --warmup-requests")
        return self
