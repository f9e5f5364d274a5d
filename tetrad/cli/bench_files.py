"""What a benchmark writes to files, and how it was called."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.options.target import without_credentials
from tetrad.cli.machine import look
from tetrad.core.errors import BenchFailure, ConfigError

if TYPE_CHECKING:
    from tetrad.core.records import BenchRun
    from tetrad.core.sweep_records import SweepPoint

SECRETS = ("--api-key", "--authorization", "--header")
SHORTEST_FLAG = 4
"""Of an abbreviated flag."""


def check_folders(config: BenchServeConfig, **more: Path | None) -> None:
    """Refuse before the load what could not be written after it."""
    files = {"output_file": config.output_file, "html": config.html, "csv": config.csv, **more}
    for name, path in files.items():
        check_writable("--" + name.replace("_", "-"), path)
    for name, folder in (("result-dir", config.result_dir), ("png", config.png)):
        if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise ConfigError(f"--{name} {folder}: this is not a writable folder.")
    if config.png is not None:
        from tetrad.bench.report.pyplot import require_matplotlib

        require_matplotlib("--png")
    if Path(config.result_filename or "").name != (config.result_filename or ""):
        raise ConfigError(
            f"--result-filename {config.result_filename}: it must be a name without folders; "
            "--result-dir says where."
        )
    if config.save_result:
        folder = config.result_dir or Path()
        check_writable("--result-filename", folder / (config.result_filename or "result.json"))


def check_writable(flag: str, path: Path | None) -> None:
    """Raise ConfigError before the work where its result could not be written."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no such folder.")
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: this is a folder; name a file in it.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag} {path}: this is not writable.")


def command() -> str:
    """The command line as it was typed, its secrets masked."""
    return without_credentials(shlex.join(["tetrad", *masked(sys.argv[1:])]))


def masked(words: Sequence[str]) -> list[str]:
    """The words with what follows a secret's flag replaced; of a header the name stays."""
    shown, secret = [], None
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            is_long = len(name) >= SHORTEST_FLAG
            secret = next((s for s in SECRETS if is_long and s.startswith(name)), None)
            hides = secret is not None and equals
            shown.append(f"{name}={_mask(value, secret)}" if hides else word)
        else:
            shown.append(word if secret is None else _mask(word, secret))
    return shown


def _mask(value: str, flag: str | None) -> str:
    name, equals, _ = value.partition("=")
    return f"{name}=***" if flag == "--header" and equals else "***"


def signed(run: BenchRun) -> BenchRun:
    """The record with the command and the machine of its client."""
    return run.model_copy(update={"command": command(), "machine": dataclasses.asdict(look())})


def write_run(run: BenchRun, config: BenchServeConfig) -> None:
    """What is written for each run by itself. Raises BenchFailure when a file cannot be written,
    after the others are."""
    writes: list[Write] = []
    if config.output_file is not None:
        writes.append(("--output-file", config.output_file, lambda: append(run, config)))
    if config.save_result:
        writes.append(("--save-result", config.result_dir or Path(), lambda: save(run, config)))
    _write_all(writes)


def write_all(
    runs: Sequence[BenchRun], points: Sequence[SweepPoint], config: BenchServeConfig
) -> None:
    """What is written for each run, and once for all. Raises BenchFailure when one of the files
    cannot be written, after the others are."""
    failures = []
    for write in (*(partial(write_run, run) for run in runs), partial(write_points, points)):
        try:
            write(config)
        except BenchFailure as failure:
            failures.append(failure)
    if failures:
        raise failures[0]


Write = tuple[str, Path, Callable[[], None]]
"""Flag, file or folder, and what writes there."""


def _write_all(writes: Sequence[Write]) -> None:
    """A full disk must not keep the other files from being written."""
    sentences = []
    for flag, path, write in writes:
        try:
            write()
        except OSError as error:
            sentences.append(f"{flag} {path} cannot be written: {error.strerror}")
    if sentences:
        raise BenchFailure(f"{'; '.join(sentences)}. The results are printed above.")


def append(run: BenchRun, config: BenchServeConfig) -> None:
    """One line of JSON: SGLang's keys, then our record."""
    from tetrad.bench.report.block import cache_keys, detail_keys, sglang_keys

    assert config.output_file is not None
    details = detail_keys(run) if config.output_details else {}
    cache = cache_keys(run) if config.cache_report else {}
    keys = {**sglang_keys(run), **cache, **details}
    line = json.dumps({**keys, "tetrad": kept(run, config).model_dump(mode="json")})
    with config.output_file.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    print(f"result appended to {config.output_file}", file=sys.stderr)


def kept(run: BenchRun, config: BenchServeConfig) -> BenchRun:
    """The record without single requests, unless they were asked for."""
    return run if config.output_details else run.model_copy(update={"requests": []})


def save(run: BenchRun, config: BenchServeConfig) -> None:
    """One JSON file: vLLM's keys."""
    from tetrad.bench.report.outputs import vllm_file_name, vllm_keys

    now = datetime.datetime.now()
    folder = config.result_dir or Path()
    path = folder / (config.result_filename or vllm_file_name(run, config, now))
    if config.result_filename is None:
        path = unused(path)
    path.write_text(json.dumps(vllm_keys(run, config, now)) + "\n", encoding="utf-8")
    print(f"result written to {path}", file=sys.stderr)


def unused(path: Path) -> Path:
    """The path, or the first one like it that is free: two short runs may end within a second."""
    number, free = 2, path
    while free.exists():
        free = path.with_stem(f"{path.stem}-{number}")
        number += 1
    return free


def write_points(points: Sequence[SweepPoint], config: BenchServeConfig) -> None:
    """What is written once, for all runs."""
    if not points:
        return
    writes: list[Write] = []
    if config.csv is not None:
        writes.append(("--csv", config.csv, partial(_write_csv, points, config.csv)))
    if config.html is not None:
        writes.append(("--html", config.html, partial(_write_html, points, config.html)))
    if config.png is not None:
        writes.append(("--png", config.png, partial(_write_png, points, config.png)))
    _write_all(writes)


def _write_csv(points: Sequence[SweepPoint], path: Path) -> None:
    from tetrad.bench.report.outputs import table

    path.write_text(table(points), encoding="utf-8", newline="")
    print(f"figures written to {path}", file=sys.stderr)


def _write_html(points: Sequence[SweepPoint], path: Path) -> None:
    from tetrad.bench.report.html import page

    path.write_text(page(points, command(), dataclasses.asdict(look())), encoding="utf-8")
    print(f"report written to {path}", file=sys.stderr)


def _write_png(points: Sequence[SweepPoint], folder: Path) -> None:
    from tetrad.bench.report import png as report_png

    written = report_png.write(points, folder)
    print(f"{len(written)} plots written to {folder}", file=sys.stderr)
