"""Points of a sweep one after the other; what a file holds already is not measured again."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tetrad import __version__
from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.options.target import without_credentials
from tetrad.bench.sweep.options import FEWEST_REQUESTS, REPLACED, BenchSweepConfig
from tetrad.core.errors import BenchFailure, ConfigError
from tetrad.core.records import BenchRun
from tetrad.core.sweep_records import Place, Status, SweepPoint

NO_PART_OF_A_PLAN = {
    *("api_key", "authorization", "header"),
    *("host", "port", "base_url", "ready_check_timeout_sec"),
    *("output_file", "output_details", "save_result", "save_detailed", "result_dir"),
    *(
        "result_filename",
        "html",
        "png",
        "csv",
        "tag",
        "cache_report",
        "allow_failures",
        "disable_tqdm",
    ),
    *("concurrency", "request_rates", "lengths", "results", "retry_failed", "repeat"),
    *("find", "under"),
    *("telemetry", "telemetry_gpus", "telemetry_period_sec", "disable_telemetry"),
}
"""Secrets, which stay out of files, and options that change no figure. Points may be added."""


Measure = Callable[[BenchServeConfig, Place], BenchRun]
"""The run of a point, whose prompts are the place's own."""


@dataclass(frozen=True, slots=True)
class Todo:
    """A point and the run that measures it."""

    place: Place
    config: BenchServeConfig


def points(config: BenchSweepConfig) -> list[Todo]:
    """All points in the order of the lists, the last list varying fastest."""
    concurrencies: list[int | None] = [*config.concurrencies] or [None]
    rates: list[float | None] = [*config.rates] or [None]
    pairs: list[tuple[int, int] | None] = [*config.length_pairs] or [None]
    settings = product(concurrencies, rates, pairs)
    return [
        _todo(config, *each, repetition)
        for each, repetition in product(settings, range(1, config.repeat + 1))
    ]


def todo_at(config: BenchSweepConfig, concurrency: int) -> Todo:
    """A point of a search, which varies nothing but the concurrency."""
    return _todo(config, concurrency, None, None, 1)


def _todo(
    config: BenchSweepConfig,
    concurrency: int | None,
    rate: float | None,
    lengths: tuple[int, int] | None,
    repetition: int,
) -> Todo:
    values = {name: getattr(config, name) for name in BenchServeConfig.model_fields}
    if concurrency is not None:
        values["max_concurrency"] = concurrency
        is_free = config.num_prompts is None and not config.rate_profile
        if is_free and config.dataset_name.startswith("random"):
            values["num_prompts"] = max(config.requests_per_slot * concurrency, FEWEST_REQUESTS)
    if rate is not None:
        values["request_rate"] = rate
    if lengths is not None:
        values["random_input_len"], values["random_output_len"] = lengths
    place = Place(
        concurrency=concurrency,
        request_rate="inf" if rate is not None and math.isinf(rate) else rate,
        input_len=lengths and lengths[0],
        output_len=lengths and lengths[1],
        repetition=repetition,
    )
    return Todo(place, BenchServeConfig.parse(values))


def plan_of(config: BenchSweepConfig) -> dict[str, Any]:
    """What all points share, as JSON has it."""
    lists = [name for name in REPLACED if getattr(config, name)]
    if config.find is not None:
        lists.append("concurrency")
    swept = {other for name in lists for other in REPLACED[name]}
    values = config.model_dump(mode="json", exclude=NO_PART_OF_A_PLAN | swept)
    plan = {name: "inf" if value == math.inf else value for name, value in values.items()}
    fewest = {"fewest_requests": FEWEST_REQUESTS}
    return {"url": without_credentials(config.url), **plan, **fewest}


def kept(path: Path, plan: dict[str, Any]) -> dict[Place, SweepPoint]:
    """Points of an earlier sweep by their place, the last one of each. Raises ConfigError when the
    file holds something else, or points that were measured by another plan."""
    if not path.exists():
        return {}
    found: dict[Place, SweepPoint] = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            point = _read(line, f"--results {path}, line {number}")
            if point.plan != plan:
                raise ConfigError(
                    f"--results {path} holds points of another plan: "
                    f"{', '.join(differences(point.plan, plan))}; repeat its flags, or name "
                    "another file."
                )
            found[point.place] = point
    return found


def _read(line: str, where: str) -> SweepPoint:
    try:
        return SweepPoint.model_validate_json(line)
    except ValidationError as error:
        raise ConfigError(
            f"{where} is no point of a sweep ({error.errors()[0]['msg']}); remove the line, or "
            "name another file."
        ) from None


def differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """Each setting that changed: what it was and what it is."""
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name) or (name in old) != (name in new):
            before, after = (str(each[name]) if name in each else "swept" for each in (old, new))
            yield f"{name} was {before} and is {after}"


def run(
    todo: Sequence[Todo],
    plan: dict[str, Any],
    measure: Measure,
    say: Callable[[str], None],
    left: Callable[[BenchRun | None, Sequence[Todo]], str] = lambda *_: "",
) -> Iterator[SweepPoint]:
    """Measure one point after the other. A point without figures is a row like any other; an
    interrupted one is not, so that it is measured when the sweep is resumed. `left` says how long
    points will take, given the last run there was."""
    last = None
    for number, each in enumerate(todo, 1):
        say(f"point {number} of {len(todo)}: {each.place}{left(last, todo[number - 1 :])}")
        point = measured(each, plan, measure)
        last = point.run or last
        yield point


def measured(todo: Todo, plan: dict[str, Any], measure: Measure) -> SweepPoint:
    """One point, whatever comes of it. Raises KeyboardInterrupt when it was cut off."""
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    status: Status = "failed"
    result = None
    try:
        result = measure(todo.config, todo.place)
    except BenchFailure as error:
        detail = str(error)
    else:
        if result.interrupted:
            raise KeyboardInterrupt
        status, detail = verdict(result, todo.config.allow_failures)
    return SweepPoint(
        tetrad_version=__version__,
        started_at=started_at if result is None else result.started_at,
        place=todo.place,
        plan=plan,
        status=status,
        detail=detail,
        run=result,
    )


def verdict(result: BenchRun, allowed: int) -> tuple[Status, str]:
    """Whether the figures may be used, and why not."""
    if result.failed > allowed:
        first = result.failures[0]
        return "failures", (
            f"{result.failed} of {result.completed + result.failed} requests failed, {allowed} are "
            f"allowed (--allow-failures); most often {first.kind}: {first.example}"
        )
    if result.client is not None and result.client.invalid:
        return "invalid", f"The figures are INVALID: {result.client.invalid[0]}"
    return "ok", ""


def alone(results: Sequence[BenchRun], allowed: int) -> list[SweepPoint]:
    """Repetitions of one run, as the points of a sweep that varies nothing else."""
    points = []
    for repetition, result in enumerate(results, 1):
        status, detail = verdict(result, allowed)
        points.append(
            SweepPoint(
                tetrad_version=__version__,
                started_at=result.started_at,
                place=Place(repetition=repetition),
                plan={},
                status=status,
                detail=detail,
                run=result,
            )
        )
    return points
