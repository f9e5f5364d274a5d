"""`tetrad bench serve`: the load generator with a progress bar, the block, the record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.options.without_effect import without_effect
from tetrad.cli import bench_files
from tetrad.cli.flags import verb
from tetrad.cli.narrator import Narrator
from tetrad.core.errors import BenchFailure

if TYPE_CHECKING:
    from tetrad.core.records import BenchRun


def _bench_serve(config: BenchServeConfig) -> int:
    """Measure, print, write files. Figures that must not be used are a BenchFailure."""
    import uvloop

    from tetrad.bench.figures.repeats import repeats, table
    from tetrad.bench.report.block import block, remarks
    from tetrad.bench.serve.run import bench_repeats
    from tetrad.bench.sweep.run import alone

    bench_files.check_folders(config)
    narrator = Narrator(show_bar=not config.disable_tqdm)
    for line in without_effect(config):
        narrator.say(line)
    measured = uvloop.run(bench_repeats(config, narrator))
    runs = [bench_files.signed(run) for run in measured]
    for run in runs:
        print(f"\n{block(run, cache_report=config.cache_report)}")
        for line in remarks(run):
            print(line)
    if len(runs) > 1:
        print("", *table(repeats(runs)), sep="\n")
    bench_files.write_all(runs, alone(runs, config.allow_failures), config)
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


bench_serve = verb(BenchServeConfig, _bench_serve)
