"""`tetrad bench sweep`: the load generator at point after point, a table of all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from tetrad.bench.options.without_effect import without_effect
from tetrad.bench.sweep.options import BenchSweepConfig
from tetrad.cli import bench_files, tables
from tetrad.cli.flags import verb
from tetrad.cli.narrator import Narrator
from tetrad.core.errors import BenchFailure

if TYPE_CHECKING:
    from tetrad.bench.options.serve import BenchServeConfig
    from tetrad.bench.sweep.run import Measure
    from tetrad.core.records import BenchRun
    from tetrad.core.sweep_records import Place, SweepPoint

SPARE = (13, 12, 15, 11, 9, 2, 6, 7, 4)
"""Places in the headings that a narrow terminal may do without, the first first: what stays is the
point, result, failed, output tok/s, and the medians of TTFT, TPOT and E2E."""


def _bench_sweep(config: BenchSweepConfig) -> int:
    """Measure the points that are missing, show all. One that is not ok is a BenchFailure."""
    import uvloop

    from tetrad.bench.compare.outlook import in_words
    from tetrad.bench.sweep import find as sweep_find
    from tetrad.bench.sweep import run as sweep
    from tetrad.bench.sweep.outlook import first_look, left

    bench_files.check_folders(config, results=config.results)
    plan = sweep.plan_of(config)
    found = {} if config.results is None else sweep.kept(config.results, plan)
    if config.retry_failed:
        found = {place: point for place, point in found.items() if point.status == "ok"}
    narrator = Narrator(show_bar=not config.disable_tqdm)
    for line in without_effect(config):
        narrator.say(line)
    measure, done = _measure(narrator), {}
    begun_s = time.monotonic()
    if config.find is not None:
        steps = sweep_find.search(config, found, plan, measure, narrator.say)
    else:
        todo = sweep.points(config)
        done = {each.place: found[each.place] for each in todo if each.place in found}
        if done:
            narrator.say(f"{len(done)} of {len(todo)} points are in {config.results} and stay")
        missing = [each for each in todo if each.place not in done]
        outlook = partial(left, uvloop.run(first_look(missing, narrator)))
        steps = sweep.run(missing, plan, measure, narrator.say, outlook)
    try:
        for point in steps:
            done[point.place] = point
            if point.place not in found:
                _keep(point, config)
    finally:
        took = in_words(time.monotonic() - begun_s)
        narrator.say(f"points measured: {len(done.keys() - found.keys())}, in {took}")
        shown = _in_order(done.values(), config)
        show(shown, config)
    if config.find is not None:
        print(sweep_find.conclusion(shown, config.bounds))
        return 0
    return _verdict(shown)


def _in_order(points: Iterable[SweepPoint], config: BenchSweepConfig) -> list[SweepPoint]:
    """As the lists have them; those of a search by their concurrency."""
    from tetrad.bench.sweep import run as sweep

    if config.find is not None:
        return sorted(points, key=lambda point: point.place.concurrency or 0)
    places = [each.place for each in sweep.points(config)]
    return sorted(points, key=lambda point: places.index(point.place))


def _measure(narrator: Narrator) -> Measure:
    import uvloop

    from tetrad.bench.serve.run import bench_serve

    def measure(config: BenchServeConfig, place: Place) -> BenchRun:
        asked = bench_serve(config, narrator, place.repetition - 1, place.setting)
        return bench_files.signed(uvloop.run(asked))

    return measure


def _keep(point: SweepPoint, config: BenchSweepConfig) -> None:
    """Write a point at once, so that the next one's end cannot take it along."""
    if point.run is not None:
        bench_files.write_run(point.run, config)
    if config.results is not None:
        run = None if point.run is None else bench_files.kept(point.run, config)
        line = point.model_copy(update={"run": run}).model_dump_json()
        with config.results.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())


def show(points: Sequence[SweepPoint], config: BenchSweepConfig) -> None:
    """Print the table, what was wrong, and write the files that cover all points."""
    if not points:
        return
    from rich.table import Table
    from rich.text import Text

    from tetrad.bench.figures import cached
    from tetrad.bench.report.html import HEADINGS, cells

    table = Table()
    for place, heading in enumerate(HEADINGS):
        justify: Literal["left", "right"] = "right" if place > 1 else "left"
        table.add_column(heading, justify=justify, no_wrap=place != 0)
    for point in points:
        style = None if point.status == "ok" else "red"
        table.add_row(*map(Text, cells(point)), style=style)
    tables.show(table, SPARE)
    for point in points:
        if point.detail:
            print(f"{point.place}: {point.detail}")
    for line in cached.note((str(p.place), p.run) for p in points if p.run is not None):
        print(line)
    bench_files.write_points(points, config)


def _verdict(points: Sequence[SweepPoint]) -> int:
    wrong = [str(point.place) for point in points if point.status != "ok"]
    if wrong:
        raise BenchFailure(
            f"{len(wrong)} of {len(points)} points are not clean ({'; '.join(wrong)}); "
            "--retry-failed with the same --results runs them again."
        )
    return 0


bench_sweep = verb(BenchSweepConfig, _bench_sweep)
