"""The printed block and the JSON keys are SGLang's, to the byte and to the name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tetrad.bench.report.block import block, cache_keys, detail_keys, remarks, sglang_keys
from tetrad.core.records import BenchRun, FailureCount, Latencies, RequestRecord, Workload
from tetrad.core.spread import Spread

GOLDEN = Path(__file__).with_name("golden_block.txt")

SGLANG_KEYS = [
    "tag",
    "backend",
    "dataset_name",
    "request_rate",
    "max_concurrency",
    "sharegpt_output_len",
    "random_input_len",
    "random_output_len",
    "random_range_ratio",
    "server_info",
    "duration",
    "completed",
    "total_input_tokens",
    "total_input_text_tokens",
    "total_input_vision_tokens",
    "total_output_tokens",
    "total_output_tokens_retokenized",
    "request_throughput",
    "input_throughput",
    "output_throughput",
    "total_throughput",
    "mean_e2e_latency_ms",
    "median_e2e_latency_ms",
    "std_e2e_latency_ms",
    "p90_e2e_latency_ms",
    "p95_e2e_latency_ms",
    "p99_e2e_latency_ms",
    "mean_ttft_ms",
    "median_ttft_ms",
    "std_ttft_ms",
    "p90_ttft_ms",
    "p95_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "std_tpot_ms",
    "p90_tpot_ms",
    "p95_tpot_ms",
    "p99_tpot_ms",
    "mean_itl_ms",
    "median_itl_ms",
    "std_itl_ms",
    "p90_itl_ms",
    "p95_itl_ms",
    "p99_itl_ms",
    "concurrency",
    "accept_length",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
]
"""In the order sglang 0.5.23 writes them."""


def spread(mean, median, p90, p95, p99, most=0.0) -> Spread:
    return Spread(count=64, mean=mean, median=median, p90=p90, p95=p95, p99=p99, max=most)


def run(**changes) -> BenchRun:
    """The run whose block sglang 0.5.23 printed; see tests/bench/golden_block.txt."""
    workload = Workload(
        dataset="random-ids",
        num_prompts=64,
        random_input_len=128,
        random_output_len=64,
        random_range_ratio=1.0,
        prompt_tokens=Spread.of([128] * 64),
        wanted_tokens=Spread.of([64] * 64),
        seed=42,
        content_seed=42,
        request_rate="inf",
        max_concurrency=16,
        stream=True,
        ignore_eos=True,
    )
    whole = BenchRun(
        tetrad_version="0.1.0",
        started_at="2026-11-29T12:00:00+00:00",
        backend="sglang",
        url="http://127.0.0.1:30000",
        model="m",
        server_info={"version": "0.5.23"},
        workload=workload,
        duration_s=8192 / 6281.31,
        completed=64,
        failed=0,
        input_tokens=8192,
        output_tokens=4096,
        output_tokens_retokenized=4096,
        token_source="server",
        latencies=Latencies(
            e2e_ms=spread(321.0, 321.07, 322.44, 322.70, 323.32),
            ttft_ms=spread(5.28, 5.34, 7.0, 7.34, 8.0),
            tpot_ms=spread(5.01, 5.01, 5.02, 5.02, 5.02),
            itl_ms=spread(5.01, 5.0, 5.07, 5.13, 6.19, 8.72),
            queue_ms=Spread(),
        ),
        peak_output_tokens_per_s=3136.0,
        peak_concurrency=64,
        concurrency=15.75,
    )
    return whole.model_copy(update=changes)


def test_the_block_is_sglangs_to_the_byte():
    assert block(run()) + "\n" == GOLDEN.read_text()


def test_rows_without_a_cap_and_with_a_rate():
    free = run().workload.model_copy(update={"max_concurrency": None, "request_rate": 4.0})
    lines = block(run(workload=free)).splitlines()
    assert "Traffic request rate:                    4.0       " in lines
    assert "Max request concurrency:                 not set   " in lines


def test_rows_that_cannot_be_known_are_left_out():
    latencies = run().latencies.model_copy(
        update={"ttft_ms": None, "tpot_ms": None, "itl_ms": None}
    )
    text = block(
        run(latencies=latencies, peak_output_tokens_per_s=None, output_tokens_retokenized=None)
    )
    for row in ("TTFT", "TPOT", "ITL", "Peak output", "retokenized", "Inter-Token", "Time"):
        assert row not in text
    assert "Mean E2E Latency (ms):                   321.00    " in text.splitlines()


def test_keys_are_sglangs_in_its_order():
    keys = [key for key in sglang_keys(run()) if key != "failed"]
    assert keys == SGLANG_KEYS


def test_the_record_survives_json_and_an_unknown_key_does_not():
    line = json.dumps({**sglang_keys(run()), "tetrad": run().model_dump(mode="json")})
    assert "Infinity" not in line
    assert "NaN" not in line
    parsed = json.loads(line)
    assert parsed["output_throughput"] == pytest.approx(3140.66, abs=0.01)
    assert parsed["request_rate"] == "inf"
    assert BenchRun.model_validate(parsed["tetrad"]) == run()
    with pytest.raises(ValueError, match="extra"):
        BenchRun.model_validate(parsed["tetrad"] | {"from_the_future": 1})


def test_details_are_one_entry_a_request_in_seconds():
    one = RequestRecord(
        index=0,
        prompt_tokens=8,
        output_tokens=2,
        due_s=0.0,
        sent_s=0.0,
        ended_s=0.3,
        ttft_ms=200.0,
        itls_ms=[100.0],
        text="8",
    )
    details = detail_keys(run(requests=[one]))
    assert details == {
        "input_lens": [8],
        "output_lens": [2],
        "ttfts": [0.2],
        "itls": [[0.1]],
        "generated_texts": ["8"],
        "errors": [""],
    }


def test_remarks_show_each_kind_of_failure_with_an_example():
    count = FailureCount(kind="truncated", count=2, example="after 3 of 8", example_request=5)
    lines = remarks(run(failed=2, completed=62, failures=[count], notes=["a note"]))
    assert lines == [
        "2 of 64 requests failed:",
        "       2 x truncated    e.g. request 5: after 3 of 8",
        "tokens asked for: prompts mean 128.0 (128 to 128), outputs mean 64.0 (64 to 64).",
        "note: a note",
    ]


def test_what_ran_is_told_as_it_was_drawn():
    """A range ratio of 0 halves lengths; unknown ones are left out, and arrivals told."""
    update = {"prompt_tokens": Spread(), "wanted_tokens": Spread.of([1, 9]), "arrivals": "Poisson"}
    lines = remarks(run(workload=run().workload.model_copy(update=update)))
    assert "tokens asked for: outputs mean 5.0 (1 to 9); arrivals: Poisson." in lines


def test_cache_report_is_sglangs_section():
    known = run(cached_tokens=4096, input_tokens=8192)
    *_, title, total, cached, rate, _ = block(known, cache_report=True).splitlines()
    assert title == "----------------Cache Hit Details-----------------"
    assert total == "Total prompt tokens:                     8192      "
    assert cached == "Total cached tokens:                     4096      "
    assert rate == "Cache hit rate:                          50.0%"
    assert cache_keys(known)["cache_report"] == {
        "total_prompt_tokens": 8192,
        "total_cached_tokens": 4096,
        "cache_hit_rate_pct": 50.0,
    }
    silent = block(run(cached_tokens=None), cache_report=True)
    assert "Total cached tokens:                     unknown   " in silent
    assert "Cache hit rate" not in silent


def test_the_wait_in_the_client_is_told_apart():
    waited = run().latencies.model_copy(update={"queue_ms": Spread.of([10.0, 30.0])})
    for cap in (4, None):
        workload = run().workload.model_copy(update={"max_concurrency": cap})
        lines = remarks(run(latencies=waited, workload=workload))
        told = any("waited 20.0 ms on average, 29.8 ms (P99)" in line for line in lines)
        assert told == (cap is not None)
