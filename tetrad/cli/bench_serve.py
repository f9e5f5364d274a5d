"""`tetrad bench serve`: the load generator with a progress bar, the block, the record."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from tetrad.bench.options import BenchServeConfig
from tetrad.cli.flags import verb
from tetrad.cli.narrator import Narrator
from tetrad.core.errors import BenchFailure, ConfigError

if TYPE_CHECKING:
    from tetrad.core.records import BenchRun


def _bench_serve(config: BenchServeConfig) -> int:
    """Measure, print, append to the file. Figures that must not be used are a BenchFailure."""
    import uvloop

    from tetrad.bench.block import block, remarks
    from tetrad.bench.repeats import repeats, table
    from tetrad.bench.serving import bench_repeats

    if config.output_file is not None and not config.output_file.parent.is_dir():
        raise ConfigError(f"--output-file {config.output_file}: there is no such folder.")
    runs = uvloop.run(bench_repeats(config, Narrator(show_bar=not config.disable_tqdm)))
    for run in runs:
        print(f"\n{block(run, cache_report=config.cache_report)}")
        for line in remarks(run):
            print(line)
        if config.output_file is not None:
            append(run, config)
    if len(runs) > 1:
        print("", *table(repeats(runs)), sep="\n")
    if any(run.interrupted for run in runs):
        raise KeyboardInterrupt
    for run in runs:
        refuse(run, config.allow_failures)
    return 0


def refuse(run: BenchRun, allowed: int) -> None:
    """Raise BenchFailure when the figures must not be used."""
    if run.failed > allowed:
        raise BenchFailure(
            f"{run.failed} of {run.completed + run.failed} requests failed, "
            f"{allowed} are allowed (--allow-failures)."
        )
    if run.client is not None and run.client.invalid:
        raise BenchFailure(f"The figures are INVALID: {run.client.invalid[0]}")


def append(run: BenchRun, config: BenchServeConfig) -> None:
    """One line of JSON: SGLang's keys, then our record."""
    from tetrad.bench.block import cache_keys, detail_keys, sglang_keys

    assert config.output_file is not None
    details = detail_keys(run) if config.output_details else {}
    cache = cache_keys(run) if config.cache_report else {}
    line = json.dumps(
        {**sglang_keys(run), **cache, **details, "tetrad": run.model_dump(mode="json")}
    )
    with config.output_file.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    print(f"result appended to {config.output_file}", file=sys.stderr)


bench_serve = verb(BenchServeConfig, _bench_serve)
