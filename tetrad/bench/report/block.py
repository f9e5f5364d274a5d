"""The result as text: SGLang's block, row for row, so that whatever reads it goes on reading it.

Rows and widths are those of `sglang.bench_serving`, trailing spaces included, with one row more,
"Failed requests:". Rows that a run cannot know are left out, and a note below says why.
"""

from __future__ import annotations

from collections.abc import Iterator

from tetrad.bench.figures import selfcheck, window
from tetrad.bench.report import telemetry as report_telemetry
from tetrad.core.records import BenchRun
from tetrad.core.spread import Spread

WIDTH = 50


def block(run: BenchRun, *, cache_report: bool = False) -> str:
    """The block between its two rules, without a line end after the last."""
    times = run.latencies
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}", *_totals(run), *_goodput(run)]
    lines += _section("End-to-End Latency", "E2E Latency", times.e2e_ms)
    lines += _section("Time to First Token", "TTFT", times.ttft_ms)
    lines += _section("Time per Output Token (excl. 1st token)", "TPOT", times.tpot_ms)
    lines += _section("Inter-Token Latency", "ITL", times.itl_ms)
    if times.itl_ms is not None and times.itl_ms.count:
        lines.append(_row("Max ITL (ms):", times.itl_ms.max))
    if cache_report:
        lines += _cache(run)
    return "\n".join([*lines, "=" * WIDTH])


def _goodput(run: BenchRun) -> list[str]:
    good = run.goodput
    if good is None:
        return []
    bounds = " ".join(f"{name}:{bound:g}" for name, bound in good.objectives_ms.items())
    return [
        f"{'Goodput':-^{WIDTH}}",
        _row("SLOs (ms):", bounds),
        _row("Request goodput (req/s):", good.requests_per_s),
        _row("SLO attainment (%):", good.attainment * 100),
        *(
            _row(f"{name.upper()} SLO attainment (%):", share * 100)
            for name, share in good.attainment_of.items()
        ),
    ]


def _cache(run: BenchRun) -> list[str]:
    lines = [f"{'Cache Hit Details':-^{WIDTH}}", _row("Total prompt tokens:", run.input_tokens)]
    if run.cached_tokens is None:
        return [*lines, _row("Total cached tokens:", "unknown")]
    lines.append(_row("Total cached tokens:", run.cached_tokens))
    return [*lines, f"{'Cache hit rate:':<40} {run.cache_hit_share:.1%}"]


def _row(label: str, value: float | str) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {shown:<10}"


def _section(title: str, name: str, spread: Spread | None) -> list[str]:
    if spread is None or spread.count == 0:
        return []
    return [
        f"{title:-^{WIDTH}}",
        _row(f"Mean {name} (ms):", spread.mean),
        _row(f"Median {name} (ms):", spread.median),
        _row(f"P90 {name} (ms):", spread.p90),
        _row(f"P95 {name} (ms):", spread.p95),
        _row(f"P99 {name} (ms):", spread.p99),
    ]


def _totals(run: BenchRun) -> Iterator[str]:
    yield _row("Backend:", run.backend)
    yield _row("Traffic request rate:", _rate(run))
    yield _row("Max request concurrency:", run.workload.max_concurrency or "not set")
    yield _row("Successful requests:", run.completed)
    yield _row("Failed requests:", run.failed)
    yield _row("Benchmark duration (s):", run.duration_s)
    yield _row("Total input tokens:", run.input_tokens)
    yield _row("Total input text tokens:", run.input_tokens)
    yield _row("Total generated tokens:", run.output_tokens)
    if run.output_tokens_retokenized is not None:
        yield _row("Total generated tokens (retokenized):", run.output_tokens_retokenized)
    yield _row("Request throughput (req/s):", run.request_throughput)
    yield _row("Input token throughput (tok/s):", run.input_throughput)
    yield _row("Output token throughput (tok/s):", run.output_throughput)
    if run.peak_output_tokens_per_s is not None:
        yield _row("Peak output token throughput (tok/s):", run.peak_output_tokens_per_s)
    yield _row("Peak concurrent requests:", run.peak_concurrency)
    yield _row("Total token throughput (tok/s):", run.input_throughput + run.output_throughput)
    yield _row("Concurrency:", run.concurrency)


def _rate(run: BenchRun) -> str:
    """Of a profile all its pieces, and the mean that they came to."""
    pieces = run.asked.get("rate_profile")
    mean = str(run.workload.request_rate)
    return f"{' '.join(pieces)} (mean {mean})" if pieces else mean


def _what_ran(run: BenchRun) -> list[str]:
    """The lengths as they were drawn, which a range ratio or a file makes other than asked."""
    load = run.workload
    said = [
        f"{name} mean {spread.mean:.1f} ({spread.min:.0f} to {spread.max:.0f})"
        for name, spread in (("prompts", load.prompt_tokens), ("outputs", load.wanted_tokens))
        if spread.count
    ]
    arrivals = f"; arrivals: {load.arrivals}" if load.arrivals else ""
    return [f"tokens asked for: {', '.join(said)}{arrivals}."] if said else []


def remarks(run: BenchRun) -> list[str]:
    """Lines below the block: what failed, with an example each, and what a reader must know."""
    lines = []
    if run.interrupted:
        lines.append(
            f"INTERRUPTED: the figures cover {run.completed + run.failed} of "
            f"{run.workload.num_prompts} requests; {run.unfinished} were cut off."
        )
    if run.failed:
        lines.append(f"{run.failed} of {run.completed + run.failed} requests failed:")
    lines += [
        f"  {failure.count:>6} x {failure.kind:<12} e.g. request {failure.example_request}: "
        f"{failure.example}"
        for failure in run.failures
    ]
    lines += _what_ran(run)
    queue = run.latencies.queue_ms
    if run.workload.max_concurrency is not None and queue.count:
        lines.append(
            f"client queue: requests waited {queue.mean:.1f} ms on average, {queue.p99:.1f} ms "
            "(P99), for --max-concurrency; latencies begin when a request is sent."
        )
    lines += window.lines(run.further, run.steady)
    if run.telemetry is not None:
        arrived = run.output_tokens + run.output_tokens_of_failures
        lines += report_telemetry.lines(run.telemetry, arrived)
    lines += [f"note: {note}" for note in run.notes]
    return lines + (selfcheck.lines(run.client) if run.client is not None else [])


def sglang_keys(run: BenchRun) -> dict[str, object]:
    """The JSON object `sglang.bench_serving` would append to its output file, same names and order.

    An infinite rate is the string "inf", because `Infinity` is not JSON.
    """
    workload = run.workload
    keys: dict[str, object] = {
        "tag": run.asked.get("tag"),
        "backend": run.backend,
        "dataset_name": workload.dataset,
        "request_rate": workload.request_rate,
        "max_concurrency": workload.max_concurrency,
        "sharegpt_output_len": run.asked.get("sharegpt_output_len"),
        "random_input_len": workload.random_input_len,
        "random_output_len": workload.random_output_len,
        "random_range_ratio": workload.random_range_ratio,
        "server_info": run.server_info,
        "duration": run.duration_s,
        "completed": run.completed,
        "failed": run.failed,
        "total_input_tokens": run.input_tokens,
        "total_input_text_tokens": run.input_tokens,
        "total_input_vision_tokens": 0,
        "total_output_tokens": run.output_tokens,
        "total_output_tokens_retokenized": run.output_tokens_retokenized,
        "request_throughput": run.request_throughput,
        "input_throughput": run.input_throughput,
        "output_throughput": run.output_throughput,
        "total_throughput": run.input_throughput + run.output_throughput,
    }
    for name in ("e2e_latency", "ttft", "tpot", "itl"):
        keys |= _spread_keys(name, _named(run, name))
    keys |= {
        "concurrency": run.concurrency,
        "accept_length": None,
        "max_output_tokens_per_s": run.peak_output_tokens_per_s,
        "max_concurrent_requests": run.peak_concurrency,
    }
    if run.goodput is not None:
        keys |= {
            "goodput_slos_ms": run.goodput.objectives_ms,
            "request_goodput": run.goodput.requests_per_s,
            "slo_attainment": run.goodput.attainment,
            "slo_attainment_by_metric": run.goodput.attainment_of,
        }
    return keys


def _named(run: BenchRun, name: str) -> Spread | None:
    spread = getattr(run.latencies, "e2e_ms" if name == "e2e_latency" else f"{name}_ms")
    assert spread is None or isinstance(spread, Spread)
    return spread


def _spread_keys(name: str, spread: Spread | None) -> dict[str, object]:
    statistics = ("mean", "median", "std", "p90", "p95", "p99")
    return {f"{s}_{name}_ms": None if spread is None else getattr(spread, s) for s in statistics}


def cache_keys(run: BenchRun) -> dict[str, object]:
    """What SGLang adds for `--cache-report`; null where the server does not say."""
    share = None if run.cached_tokens is None else run.cache_hit_share * 100
    return {
        "cache_report": {
            "total_prompt_tokens": run.input_tokens,
            "total_cached_tokens": run.cached_tokens,
            "cache_hit_rate_pct": share,
        }
    }


def detail_keys(run: BenchRun) -> dict[str, object]:
    """What SGLang adds for `--output-details`: one entry per request; seconds where it has them."""
    records = run.requests
    return {
        "input_lens": [r.prompt_tokens for r in records],
        "output_lens": [r.output_tokens for r in records],
        "ttfts": [None if r.ttft_ms is None else r.ttft_ms / 1e3 for r in records],
        "itls": [[gap / 1e3 for gap in r.itls_ms] for r in records],
        "generated_texts": [r.text for r in records],
        "errors": ["" if r.failure is None else r.failure.message for r in records],
    }
