"""`tetrad bench compare A B`: the same load on two servers in turns, and whether they differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tetrad.bench.compare.options import BenchCompareConfig
from tetrad.bench.options.without_effect import without_effect
from tetrad.cli import bench_files
from tetrad.cli.bench_serve import refuse
from tetrad.cli.flags import verb
from tetrad.cli.narrator import Narrator
from tetrad.core.errors import TetradError

if TYPE_CHECKING:
    from tetrad.bench.options.serve import BenchServeConfig
    from tetrad.core.records import BenchRun


def _bench_compare(config: BenchCompareConfig) -> int:
    """Measure in turns, print. Figures that must not be used are a BenchFailure."""
    import uvloop

    from tetrad.bench.compare.outlook import first_look, left
    from tetrad.bench.compare.run import compare, comparison, doubts, table, turns
    from tetrad.bench.figures import cached
    from tetrad.bench.serve.run import bench_serve

    bench_files.check_folders(config)
    narrator = Narrator(show_bar=not config.disable_tqdm)
    for line in without_effect(config):
        narrator.say(line)

    run_s = uvloop.run(first_look(config, narrator))
    urls = [getattr(config, side) for side in turns(config.pairs)]

    async def measure(asked: BenchServeConfig, number: int) -> BenchRun:
        told = f"pair {number // 2 + 1} of {config.pairs}: {urls[number]}"
        narrator.say(told + left(run_s, urls[number:]))
        run = bench_files.signed(await bench_serve(asked, narrator, number))
        run_s[urls[number]] = run.duration_s
        bench_files.write_run(run, asked)
        return run

    pairs, ended_by = uvloop.run(compare(config, measure))
    runs = [run for pair in pairs for run in pair]
    for run in runs:
        if run.failed > config.allow_failures:
            refuse(run, config.allow_failures)
    named = [(f"run {number}", run) for number, run in enumerate(runs, 1)]
    print("", *table(comparison(pairs)), *doubts(pairs), *cached.note(named), sep="\n")
    for run in runs:
        refuse(run, config.allow_failures)
    if isinstance(ended_by, TetradError):
        raise ended_by
    if ended_by is not None:
        raise KeyboardInterrupt
    return 0


bench_compare = verb(BenchCompareConfig, _bench_compare, positional=("a", "b"))
