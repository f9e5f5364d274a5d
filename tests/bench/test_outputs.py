"""vLLM's JSON keys to the name and order, and a table that a spreadsheet may open."""

from __future__ import annotations

import csv
import datetime
import io
import json

from tests.bench.test_block import run
from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.report.outputs import table, vllm_file_name, vllm_keys
from tetrad.bench.sweep.run import alone
from tetrad.core.records import Failure, RequestRecord
from tetrad.core.sweep_records import Place

NOW = datetime.datetime(2026, 11, 29, 12, 0, 1)
TIMES = ("ttft", "tpot", "itl", "e2el")
STATISTICS = ("mean", "median", "std", "p90", "p95", "p99")
VLLM_KEYS = [
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts"),
    *("request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed"),
    *("total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput"),
    *("output_throughput", "total_token_throughput", "max_output_tokens_per_s"),
    *("max_concurrent_requests", "rtfx"),
    *(f"{statistic}_{time}_ms" for time in TIMES for statistic in STATISTICS),
    *("latencies", "queue_times"),
]
"""Of vLLM 0.33.0 with P90, P95 and e2el asked for."""
DETAILS = [
    *("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors"),
]


def requests() -> list[RequestRecord]:
    good = RequestRecord(
        index=0, prompt_tokens=128, output_tokens=2, due_s=0.0, sent_s=0.5, ended_s=1.5,
        ttft_ms=400.0, itls_ms=[600.0], text="a b",
    )  # fmt: skip
    failure = Failure(kind="timeout", message="nothing came")
    return [good, good.model_copy(update={"ttft_ms": None, "failure": failure})]


def test_keys_are_vllms_and_the_file_is_json():
    keys = vllm_keys(run(), BenchServeConfig(save_result=True), NOW)
    assert list(keys) == VLLM_KEYS
    assert keys["date"] == "20261129-120001"
    assert keys["request_rate"] == "inf"
    assert keys["p99_e2el_ms"] == 323.32
    json.dumps(keys, allow_nan=False)


def test_details_come_only_when_asked_for():
    config = BenchServeConfig(save_result=True, save_detailed=True)
    keys = vllm_keys(run(requests=requests()), config, NOW)
    assert list(keys) == VLLM_KEYS + DETAILS
    assert keys["latencies"] == [1.0, None]
    assert keys["queue_times"] == [0.5, 0.5]
    assert keys["ttfts"] == [0.4, None]
    assert keys["itls"] == [[0.6], [0.6]]
    assert keys["errors"] == ["", "nothing came"]


def test_a_model_name_does_not_leave_the_folder():
    config = BenchServeConfig(save_result=True)
    named = vllm_file_name(run(model="org/GLM-5"), config, NOW)
    assert named == "sglang-infqps-concurrency16-GLM-5-20261129-120001.json"
    strange = vllm_file_name(run(model="../..\\a b\x00"), config, NOW)
    assert "/" not in strange
    assert "\\" not in strange
    assert "\x00" not in strange


def test_the_table_has_a_row_for_every_point_and_no_formula():
    good = alone([run(model="=cmd()")], 0)[0]
    failed = good.model_copy(
        update={"run": None, "status": "failed", "detail": "-x", "place": Place(concurrency=8)}
    )
    first, second = csv.DictReader(io.StringIO(table([good, failed])))
    assert first["model"] == "'=cmd()"
    assert float(first["output_throughput"]) == run().output_throughput
    assert (first["status"], second["status"]) == ("ok", "failed")
    assert second["detail"] == "'-x"
    assert (second["max_concurrency"], second["output_throughput"]) == ("8", "")
