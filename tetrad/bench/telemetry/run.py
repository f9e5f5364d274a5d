"""Telemetry of a run: the sampler's process from this side, and its samples on the run's time."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.telemetry.gpus import FIELDS
from tetrad.bench.telemetry.server import COUNTERS
from tetrad.core.telemetry_records import GpuSeries, SamplerCost, ServerSeries, Telemetry

READY_S = 20.0
FAREWELL_S = 20.0
"""Longer than the sampler waits for a server that does not answer."""
MOST_SAMPLES = 240
"""Of a record; more are joined in equal groups."""
THROTTLES = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clock setting",
    0x200: "board limit",
    0x400: "reliability",
}
"""NVML's clock event reasons, without idleness (1) and clocks that a person set (2)."""
Points = Sequence[tuple[float, float]]


@dataclass(slots=True)
class Seen:
    """What the sampler said."""

    found: dict[str, Any]
    samples: dict[str, Any] | None = None
    """None when there was nothing to watch, or when it ended early."""


class Sampler:
    """One sampler, from before the load until after it."""

    def __init__(self, process: asyncio.subprocess.Process, found: dict[str, Any]) -> None:
        self._process = process
        self._found = found

    async def seen(self) -> Seen:
        """Stop it by the end of its input; all that it saw."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            async with asyncio.timeout(FAREWELL_S):
                out = await self._process.stdout.read()
            return Seen(self._found, json.loads(out) if out else None)
        except (TimeoutError, ValueError, OSError):
            return Seen(self._found)


@asynccontextmanager
async def sampling(
    config: BenchServeConfig, headers: dict[str, str]
) -> AsyncIterator[Sampler | None]:
    """A sampler that has looked once; None where none is wanted or it does not start."""
    if config.disable_telemetry:
        yield None
        return
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tetrad.bench.telemetry.process"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        found = await _ready(process, config, headers)
        yield None if found is None else Sampler(process, found)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _ready(
    process: asyncio.subprocess.Process, config: BenchServeConfig, headers: dict[str, str]
) -> dict[str, Any] | None:
    job = {
        "url": config.url,
        "headers": headers,
        "period_s": config.telemetry_period_sec,
        "telemetry": config.telemetry,
        "gpus": config.telemetry_gpus,
    }
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(job).encode() + b"\n")
        async with asyncio.timeout(READY_S):
            return dict(json.loads(await process.stdout.readline()))
    except (TimeoutError, ValueError, OSError):
        return None


def telemetry(
    seen: Seen | None, *, origin: float, duration_s: float, output_tokens: int, period_s: float
) -> Telemetry | None:
    """The record. `origin` is the run's start by the samples' clock."""
    if seen is None:
        return None
    found, samples = seen.found, seen.samples or {}
    early = (
        "" if seen.samples or not (found["gpus"] or found["route"]) else "the sampler ended early"
    )
    gpu_samples = _placed(samples.get("gpus"), origin)
    times_s = [at for at, _ in _thinned_times(gpu_samples, duration_s)]
    gpus = [
        _gpu(facts, [(at, readings[place]) for at, readings in gpu_samples], duration_s)
        for place, facts in enumerate(found["gpus"])
        if gpu_samples
    ]
    energies = [gpu.energy_j for gpu in gpus if gpu.energy_j is not None]
    energy_j = sum(energies) if energies and len(energies) == len(gpus) else None
    server = _server(found, _placed(samples.get("server"), origin), duration_s)
    return Telemetry(
        period_s=period_s,
        gpu_times_s=times_s,
        gpus=gpus,
        why_no_gpus=found["why_no_gpus"] or early,
        energy_j=energy_j,
        mean_power_w=energy_j / duration_s if energy_j is not None and duration_s > 0 else None,
        energy_per_token_j=energy_j / output_tokens if energy_j and output_tokens else None,
        server=server,
        why_no_server=found["why_no_server"] or ("" if server else early),
        cost=_cost(samples) if samples else None,
    )


def _placed(watched: dict[str, Any] | None, origin: float) -> list[tuple[float, Any]]:
    return [(at - origin, value) for at, value in (watched or {}).get("samples", [])]


def _within(samples: Sequence[tuple[float, Any]], duration_s: float) -> list[tuple[float, Any]]:
    return [(at, value) for at, value in samples if 0 <= at <= duration_s]


def _groups(samples: Sequence[tuple[float, Any]]) -> list[Sequence[tuple[float, Any]]]:
    size = math.ceil(len(samples) / MOST_SAMPLES)
    return [samples[start : start + size] for start in range(0, len(samples), size or 1)]


def _thinned_times(
    samples: Sequence[tuple[float, Any]], duration_s: float
) -> list[tuple[float, Sequence[tuple[float, Any]]]]:
    """The run's samples in groups, each with its mean time."""
    groups = _groups(_within(samples, duration_s))
    return [(sum(at for at, _ in group) / len(group), group) for group in groups]


def _gpu(
    facts: dict[str, Any], samples: Sequence[tuple[float, Any]], duration_s: float
) -> GpuSeries:
    groups = [group for _, group in _thinned_times(samples, duration_s)]
    columns = {
        name: [_mean([reading[place] for _, reading in group]) for group in groups]
        for place, name in enumerate(FIELDS)
        if name not in ("energy_j", "throttle_bits")
    }
    bits_at = FIELDS.index("throttle_bits")
    energy_j, source = _energy(samples, duration_s)
    rest: dict[str, Any] = {**facts, **columns}
    return GpuSeries(
        **rest,
        throttle_bits=[_joined([reading[bits_at] for _, reading in group]) for group in groups],
        throttle=_shares([reading[bits_at] for _, reading in _within(samples, duration_s)]),
        energy_j=energy_j,
        energy_source=source,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _joined(bits: Sequence[int | None]) -> int | None:
    known = [each for each in bits if each is not None]
    joined = 0
    for each in known:
        joined |= each
    return joined if known else None


def _shares(bits: Sequence[int | None]) -> dict[str, float]:
    known = [each for each in bits if each is not None]
    counts = {name: sum(bool(each & bit) for each in known) for bit, name in THROTTLES.items()}
    return {name: count / len(known) for name, count in counts.items() if count}


def _energy(samples: Sequence[tuple[float, Any]], duration_s: float) -> tuple[float | None, Any]:
    """Joules between 0 and `duration_s`, and how they are known."""
    for name, source, over in (("energy_j", "counter", _rise), ("power_w", "power", _integral)):
        place = FIELDS.index(name)
        points = [(at, reading[place]) for at, reading in samples if reading[place] is not None]
        if len(points) > 1:
            return over(points, duration_s), source
    return None, None


def _rise(points: Points, duration_s: float) -> float:
    return value_at(points, duration_s) - value_at(points, 0.0)


def _integral(points: Points, duration_s: float) -> float:
    inner = [(at, value) for at, value in points if 0 < at < duration_s]
    ends = [(at, value_at(points, at)) for at in (0.0, duration_s)]
    line = [ends[0], *inner, ends[1]]
    return sum((b - a) * (before + after) / 2 for (a, before), (b, after) in pairwise(line))


def value_at(points: Points, time_s: float) -> float:
    """Between two samples on the line through them, beyond the ends that of the end."""
    place = bisect_right([at for at, _ in points], time_s)
    if place in (0, len(points)):
        return points[min(place, len(points) - 1)][1]
    (before_s, before), (after_s, after) = points[place - 1], points[place]
    return before + (after - before) * (time_s - before_s) / (after_s - before_s)


def _server(
    found: dict[str, Any], samples: Sequence[tuple[float, Any]], duration_s: float
) -> ServerSeries | None:
    if not samples:
        return None
    samples = _with_rates(samples)
    groups = _thinned_times(samples, duration_s)
    columns: dict[str, Any] = {
        name: [_mean([figures.get(name) for _, figures in group]) for _, group in groups]
        for name in ("running", "queued", "cache_usage", "tokens_per_s")
    }
    eve = [figures for at, figures in samples if at <= 0] or [samples[0][1]]
    totals = {name: _difference(eve[-1], samples[-1][1], name) for name in COUNTERS}
    looked_up, computed = totals.pop("looked_up_tokens"), totals.pop("computed_tokens")
    if computed is not None:
        totals["prompt_tokens"] = computed + (totals["cached_tokens"] or 0)
    base, cached = looked_up or totals["prompt_tokens"], totals["cached_tokens"]
    counted: dict[str, Any] = totals
    return ServerSeries(
        source=found["route"],
        dialect=found["dialect"],
        times_s=[at for at, _ in groups],
        **columns,
        **counted,
        cache_hit_share=cached / base if base and cached is not None else None,
        silent_s=max(0.0, duration_s - samples[-1][0]),
    )


def _with_rates(samples: Sequence[tuple[float, Any]]) -> list[tuple[float, dict[str, float]]]:
    """Of a server with a counter of tokens and no gauge of their rate: that since the last look."""
    rated = [samples[0]]
    for (before_s, before), (at, figures) in pairwise(samples):
        rise = _difference(before, figures, "generated_tokens")
        if "tokens_per_s" in figures or rise is None or at <= before_s:
            rated.append((at, figures))
        else:
            rated.append((at, {**figures, "tokens_per_s": rise / (at - before_s)}))
    return rated


def _difference(before: dict[str, float], after: dict[str, float], name: str) -> int | None:
    """How far a counter rose. One that was not there before had not been counted yet."""
    if name not in after or after[name] < before.get(name, 0.0):
        return None
    return round(after[name] - before.get(name, 0.0))


def _cost(samples: dict[str, Any]) -> SamplerCost:
    took = {name: (samples[name] or {}).get("took_s", []) for name in ("gpus", "server")}
    server = samples["server"] or {"samples": []}
    return SamplerCost(
        cpu_s=samples["cpu_s"],
        share=samples["cpu_s"] / samples["span_s"] if samples["span_s"] > 0 else 0.0,
        gpu_reads=len(took["gpus"]),
        gpu_read_ms=(_mean(took["gpus"]) or 0.0) * 1e3,
        server_reads=len(took["server"]),
        server_read_ms=(_mean(took["server"]) or 0.0) * 1e3,
        longest_server_read_ms=max(took["server"], default=0.0) * 1e3,
        failed_server_reads=len(took["server"]) - len(server["samples"]),
    )
