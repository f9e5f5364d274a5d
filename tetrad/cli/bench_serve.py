"""`tetrad bench serve`: the load generator with a progress bar, the block, the record."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING

from tetrad.bench.options import BenchServeConfig
from tetrad.cli.flags import verb
from tetrad.core.errors import BenchFailure, ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress

    from tetrad.core.records import BenchRun


def _bench_serve(config: BenchServeConfig) -> int:
    """Measure, print, append to the file. Failures beyond the allowed number are a BenchFailure."""
    from tetrad.bench.block import block, remarks
    from tetrad.bench.serving import bench_serve as measure

    if config.output_file is not None and not config.output_file.parent.is_dir():
        raise ConfigError(f"--output-file {config.output_file}: there is no such folder.")
    run = asyncio.run(measure(config, Narrator(show_bar=not config.disable_tqdm)))
    print(f"\n{block(run)}")
    for line in remarks(run):
        print(line)
    if config.output_file is not None:
        append(run, config)
    if run.interrupted:
        raise KeyboardInterrupt
    if run.failed > config.allow_failures:
        raise BenchFailure(
            f"{run.failed} of {run.completed + run.failed} requests failed, "
            f"{config.allow_failures} are allowed (--allow-failures)."
        )
    return 0


def append(run: BenchRun, config: BenchServeConfig) -> None:
    """One line of JSON: SGLang's keys, then our record."""
    from tetrad.bench.block import detail_keys, sglang_keys

    assert config.output_file is not None
    details = detail_keys(run) if config.output_details else {}
    line = json.dumps({**sglang_keys(run), **details, "tetrad": run.model_dump(mode="json")})
    with config.output_file.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    print(f"result appended to {config.output_file}", file=sys.stderr)


class Narrator:
    """Tells on stderr what happens; draws a bar there when it is a terminal."""

    def __init__(self, *, show_bar: bool) -> None:
        self._show_bar = show_bar and sys.stderr.isatty()
        self._bar: Progress | None = None
        self._num_failed = 0

    def say(self, line: str) -> None:
        """One line about what happens next."""
        print(line, file=sys.stderr)

    def begin(self, num_requests: int) -> None:
        """The measured load starts."""
        if self._show_bar:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                refresh_per_second=2,
            )
            self._bar.add_task("requests", total=num_requests)
            self._bar.start()

    def finished(self, has_failed: bool) -> None:
        """Move the bar."""
        self._num_failed += has_failed
        if self._bar is not None:
            failed = f"requests, {self._num_failed} failed" if self._num_failed else "requests"
            self._bar.update(self._bar.task_ids[0], advance=1, description=failed)

    def end(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.stop()


bench_serve = verb(BenchServeConfig, _bench_serve)
