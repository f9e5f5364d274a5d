"""What a reader sees of telemetry: lines below the block, rows and charts of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tetrad.bench.report.charts import Axis, Chart, Curve
from tetrad.core.telemetry_records import GpuSeries, ServerSeries, Telemetry, Values

GIB = 2**30
MOST_CURVES = 6
"""GPUs of which each has a curve; of more the mean is drawn, and the least and the most dashed."""
OTHER_TRAFFIC_SHARE = 0.02
GPU_HEADINGS = (
    *("GPU", "power W", "of", "SM MHz", "of", "memory MHz", "busy", "memory busy", "GiB used"),
    *("of", "°C", "energy kJ", "lower clocks"),
)


def lines(seen: Telemetry, arrived_tokens: int) -> list[str]:
    """What to print; `arrived_tokens` are all output tokens that the client received."""
    told: list[str] = []
    if seen.server is not None:
        told += _server_lines(seen.server, arrived_tokens)
    else:
        told.append(f"no figures of the server: {seen.why_no_server}")
    told += [_gpu_line(gpu) for gpu in seen.gpus]
    if not seen.gpus:
        told.append(f"no GPU: {seen.why_no_gpus}")
    if seen.energy_j is not None and seen.mean_power_w is not None:
        each = seen.energy_per_token_j
        per_token = "" if each is None else f", {each:.3g} J for each output token"
        told.append(f"energy {seen.energy_j:,.0f} J, {seen.mean_power_w:,.0f} W{per_token}")
    if (cost := seen.cost) is not None:
        looks = []
        if cost.gpu_reads:
            looks.append(f"{cost.gpu_reads} looks at GPUs of {cost.gpu_read_ms:.1f} ms")
        if cost.server_reads:
            looks.append(
                f"{cost.server_reads} at the server of {cost.server_read_ms:.1f} ms (longest "
                f"{cost.longest_server_read_ms:.1f} ms, {cost.failed_server_reads} failed)"
            )
        told.append(
            f"the sampler used {cost.cpu_s:.2f} s of CPU, {cost.share:.1%} of a core: "
            f"{', '.join(looks)}"
        )
    return [f"telemetry: {line}" for line in told]


def _server_lines(server: ServerSeries, arrived_tokens: int) -> Iterator[str]:
    parts = []
    for name, values, show in (
        ("running", server.running, _number),
        ("queued", server.queued, _number),
        ("KV cache", server.cache_usage, _percent),
        ("output tok/s", server.tokens_per_s, _number),
    ):
        if known := _known(values):
            parts.append(f"{name} {show(_mean(known))} (most {show(max(known))})")
    if server.retractions is not None:
        parts.append(f"{server.retractions} retractions")
    if server.cache_hit_share is not None:
        parts.append(f"{server.cache_hit_share:.1%} of prompt tokens cached")
    yield f"the server's {server.source} ({server.dialect}): {', '.join(parts) or 'no sample'}"
    counted = server.generated_tokens
    if server.silent_s > 0:
        yield (
            f"the server told nothing in the last {server.silent_s:.1f} s of the run, as one does "
            "that has ended; its totals stop there"
        )
    elif (
        counted is not None and abs(counted - arrived_tokens) > OTHER_TRAFFIC_SHARE * arrived_tokens
    ):
        yield (
            f"the server generated {counted} tokens where {arrived_tokens} arrived here: it has "
            "other clients, or tokens that it drops or counts late"
        )


def _gpu_line(gpu: GpuSeries) -> str:
    name, watts, limit, sm, most_sm, _, busy, _, used, total, degrees, _, why_lower = gpu_row(gpu)
    return (
        f"{name}: {watts} of {limit} W, SM {sm} of {most_sm} MHz, busy {busy}, {used} of {total} "
        f"GiB, {degrees} °C; lower clocks: {why_lower or 'none'}"
    )


def gpu_row(gpu: GpuSeries) -> list[str]:
    """Means over the run, in the order of GPU_HEADINGS; what is not known is left empty."""
    total = gpu.memory_total_bytes
    return [
        f"GPU {gpu.index} {gpu.name}",
        _shown(gpu.power_w, _number),
        _number(gpu.power_limit_w),
        _shown(gpu.sm_mhz, _number),
        _number(gpu.max_sm_mhz),
        _shown(gpu.memory_mhz, _number),
        _shown(gpu.busy, _percent),
        _shown(gpu.memory_busy, _percent),
        _shown(gpu.memory_used_bytes, lambda used: f"{(used or 0) / GIB:.1f}"),
        "" if total is None else f"{total / GIB:.1f}",
        _shown(gpu.temperature_c, _number),
        "" if gpu.energy_j is None else f"{gpu.energy_j / 1e3:,.2f}",
        ", ".join(f"{name} {share:.0%} of the time" for name, share in gpu.throttle.items()),
    ]


def _known(values: Values) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _shown(values: Values, show: Callable[[float | None], str]) -> str:
    known = _known(values)
    return show(_mean(known)) if known else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def telemetry_charts(seen: Telemetry, time: Axis) -> Iterator[Chart]:
    """The server's figures and the GPUs' over the run's time."""
    if (server := seen.server) is not None:
        yield from _server_charts(server, time)
    for title, name, scale in (
        ("GPU power, W", "power_w", 1.0),
        ("SM clock, MHz", "sm_mhz", 1.0),
        ("GPU busy, % of the time", "busy", 100.0),
        ("GPU memory in use, GiB", "memory_used_bytes", 1 / GIB),
    ):
        columns = [[_times(value, scale) for value in getattr(gpu, name)] for gpu in seen.gpus]
        if any(_known(column) for column in columns):
            names = [f"GPU {gpu.index}" for gpu in seen.gpus]
            yield Chart(title, time, title, _curves(names, columns, seen.gpu_times_s))


def _server_charts(server: ServerSeries, time: Axis) -> Iterator[Chart]:
    for title, shown in (
        ("requests, as the server counts", {"running": server.running, "queued": server.queued}),
        ("KV cache in use, %", {"": [_times(value, 100.0) for value in server.cache_usage]}),
        ("output tokens per second, as the server counts", {"": server.tokens_per_s}),
    ):
        drawn = [
            Curve(name, list(zip(server.times_s, values, strict=True)), colour)
            for colour, (name, values) in enumerate(shown.items())
            if _known(values)
        ]
        if drawn:
            yield Chart(title, time, title, drawn)


def _times(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def _curves(
    names: Sequence[str], columns: Sequence[Values], times_s: Sequence[float]
) -> list[Curve]:
    if len(columns) <= MOST_CURVES:
        return [
            Curve(name, list(zip(times_s, column, strict=True)), colour)
            for colour, (name, column) in enumerate(zip(names, columns, strict=True))
        ]
    rows = [[v for v in row if v is not None] for row in zip(*columns, strict=True)]
    ways: tuple[tuple[str, Callable[[Sequence[float]], float]], ...] = (
        (f"mean of {len(columns)}", _mean), ("least", min), ("most", max),
    )  # fmt: skip
    return [
        Curve(
            name,
            [(at, join(row) if row else None) for at, row in zip(times_s, rows, strict=True)],
            colour,
            is_dashed=colour > 0,
        )
        for colour, (name, join) in enumerate(ways)
    ]
