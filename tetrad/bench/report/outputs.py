"""Results for other people's readers: vLLM's JSON and a table for a spreadsheet."""

from __future__ import annotations

import csv
import datetime
import io
import re
from collections.abc import Sequence
from typing import Any

from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.report.block import sglang_keys
from tetrad.core.records import BenchRun
from tetrad.core.spread import Spread
from tetrad.core.sweep_records import SweepPoint

NOT_IN_A_TABLE = ("tag", "server_info", "goodput_slos_ms", "slo_attainment_by_metric")
FORMULA_BEGINNINGS = ("=", "+", "-", "@", "\t", "\r")


def vllm_keys(run: BenchRun, config: BenchServeConfig, now: datetime.datetime) -> dict[str, Any]:
    """The JSON object of `vllm bench serve --save-result`, same names and order, with `-e2el` and
    P90 and P95 asked for. `now` is the time of its `date`."""
    workload = run.workload
    keys: dict[str, Any] = {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": run.backend,
        "backend": run.backend,
        "label": config.tag,
        "model_id": run.model,
        "tokenizer_id": None if config.tokenizer is None else str(config.tokenizer),
        "num_prompts": workload.num_prompts,
        "request_rate": workload.request_rate,
        "burstiness": "inf" if config.burstiness == float("inf") else config.burstiness,
        "max_concurrency": workload.max_concurrency,
        "duration": run.duration_s,
        "completed": run.completed,
        "failed": run.failed,
        "total_input_tokens": run.input_tokens,
        "total_output_tokens": run.output_tokens,
        "request_throughput": run.request_throughput,
        "request_goodput": None if run.goodput is None else run.goodput.requests_per_s,
        "output_throughput": run.output_throughput,
        "total_token_throughput": run.input_throughput + run.output_throughput,
        "max_output_tokens_per_s": run.peak_output_tokens_per_s,
        "max_concurrent_requests": run.peak_concurrency,
        "rtfx": 0.0,
    }
    times = run.latencies
    named = (("ttft", times.ttft_ms), ("tpot", times.tpot_ms), ("itl", times.itl_ms))
    for name, spread in (*named, ("e2el", times.e2e_ms)):
        keys |= _spread_keys(name, spread)
    keys |= {
        "latencies": [None if r.failure else r.ended_s - r.sent_s for r in run.requests],
        "queue_times": [r.sent_s - r.due_s for r in run.requests],
    }
    return keys | (_detail_keys(run) if config.save_detailed else {})


def _spread_keys(name: str, spread: Spread | None) -> dict[str, Any]:
    statistics = ("mean", "median", "std", "p90", "p95", "p99")
    return {f"{s}_{name}_ms": None if spread is None else getattr(spread, s) for s in statistics}


def _detail_keys(run: BenchRun) -> dict[str, Any]:
    """What `--save-detailed` keeps: one entry for each request, times in seconds."""
    records = run.requests
    return {
        "input_lens": [r.prompt_tokens for r in records],
        "output_lens": [r.output_tokens for r in records],
        "start_times": [r.sent_s for r in records],
        "ttfts": [None if r.ttft_ms is None else r.ttft_ms / 1e3 for r in records],
        "itls": [[gap / 1e3 for gap in r.itls_ms] for r in records],
        "generated_texts": [r.text for r in records],
        "errors": ["" if r.failure is None else r.failure.message for r in records],
    }


def vllm_file_name(run: BenchRun, config: BenchServeConfig, now: datetime.datetime) -> str:
    """As vLLM names the file; what a server calls its model must not leave the folder."""
    workload = run.workload
    cap = "" if workload.max_concurrency is None else f"-concurrency{workload.max_concurrency}"
    model = (run.model or "model").rsplit("/", 1)[-1]
    label = config.tag or run.backend
    name = f"{label}-{workload.request_rate}qps{cap}-{model}-{now:%Y%m%d-%H%M%S}.json"
    return re.sub(r"[^\w.-]", "_", name)


def table(points: Sequence[SweepPoint]) -> str:
    """CSV with a heading and a row for each point: SGLang's keys, and what came of it. A point
    without figures has its settings and its sentence."""
    text = io.StringIO()
    rows = [_row(point) for point in points]
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _row(point: SweepPoint) -> dict[str, object]:
    run, place = point.run, point.place
    row: dict[str, object] = {
        "point": str(place) or "run 1",
        "started_at": point.started_at,
        "status": point.status,
        "detail": point.detail,
    }
    if run is None:
        settings = {
            "request_rate": place.request_rate,
            "max_concurrency": place.concurrency,
            "random_input_len": place.input_len,
            "random_output_len": place.output_len,
        }
        row |= {key: value for key, value in settings.items() if value is not None}
    else:
        figures = {k: v for k, v in sglang_keys(run).items() if k not in NOT_IN_A_TABLE}
        row |= {"url": run.url, "model": run.model, **figures}
        if run.telemetry is not None and run.telemetry.energy_j is not None:
            seen = run.telemetry
            row |= {
                "mean_power_w": seen.mean_power_w,
                "energy_per_token_j": seen.energy_per_token_j,
            }
    return {key: _harmless(value) for key, value in row.items()}


def _harmless(value: object) -> object:
    """A spreadsheet takes a text that begins like a formula for one, whoever wrote it."""
    is_formula = isinstance(value, str) and value.startswith(FORMULA_BEGINNINGS)
    return f"'{value}" if is_formula else value
