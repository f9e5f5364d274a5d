"""Each server's own names for the same figures."""

from __future__ import annotations

import json

import pytest

from tests.bench.mock_server import MockServer
from tests.cli.conftest import beside
from tetrad.bench.telemetry.server import ServerFigures, from_metrics, from_server_info

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.1
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 40.0
vllm:num_preemptions_total{engine="0",model_name="m"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 90.0
vllm:generation_tokens_total{engine="0",model_name="m"} 70.0
vllm:e2e_request_latency_seconds_bucket{le="0.3",model_name="m"} 5.0
python_gc_objects_collected_total{generation="0"} 11.0
"""
SGLANG = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",tp_rank="0",pp_rank="0",dp_rank="0"} 5.0
sglang:num_running_reqs{model_name="m",tp_rank="1",pp_rank="0",dp_rank="0"} 5.0
sglang:num_running_reqs{model_name="m",tp_rank="2",pp_rank="0",dp_rank="1"} 6.0
sglang:num_queue_reqs{model_name="m",tp_rank="0",pp_rank="0"} 9.0
sglang:token_usage{model_name="m",tp_rank="0",pp_rank="0"} 0.3
sglang:gen_throughput{model_name="m",tp_rank="0",pp_rank="0"} 1234.5
sglang:num_retracted_requests_total{model_name="m",tp_rank="0",pp_rank="0"} 2.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 11.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 4.0
sglang:prompt_tokens_total{is_streaming="true",model_name="m"} 100.0
sglang:generation_tokens_total{is_streaming="true",model_name="m"} 50.0
"""
LLAMACPP = """# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 8
llamacpp:requests_deferred 24
llamacpp:prompt_tokens_total 640
llamacpp:prompt_tokens_cached_total 160
llamacpp:tokens_predicted_total 256
"""


def test_vllm_sums_its_engines_and_takes_the_mean_of_shares():
    dialect, figures = from_metrics(VLLM)
    assert dialect == "vllm"
    assert figures == {
        "running": 7.0,
        "queued": 2.0,
        "cache_usage": pytest.approx(0.3),
        "retractions": 1.0,
        "prompt_tokens": 90.0,
        "looked_up_tokens": 100.0,
        "cached_tokens": 40.0,
        "generated_tokens": 70.0,
    }


def test_sglangs_ranks_of_one_engine_are_counted_once_and_sources_are_added():
    dialect, figures = from_metrics(SGLANG)
    assert dialect == "sglang"
    assert figures["running"] == 11.0
    assert figures["queued"] == 9.0
    assert figures["cached_tokens"] == 15.0
    assert figures["tokens_per_s"] == 1234.5
    assert figures["retractions"] == 2.0


def test_llamacpp_counts_computed_and_cached_tokens_and_tells_no_cache_usage():
    dialect, figures = from_metrics(LLAMACPP)
    assert dialect == "llamacpp"
    assert figures["running"] == 8.0
    assert figures["queued"] == 24.0
    assert (figures["computed_tokens"], figures["cached_tokens"]) == (640.0, 160.0)
    assert "cache_usage" not in figures


@pytest.mark.parametrize("text", ["", "{}", "<html>", "up 1\n", "sglang:num_running_reqs{a= 1\n"])
def test_what_is_no_known_exposition_tells_nothing(text: str):
    assert from_metrics(text) == ("", {})


def test_values_that_are_no_numbers_are_left_out():
    assert from_metrics("tetrad_running_requests NaN\ntetrad_waiting_requests 2\n")[1] == {
        "queued": 2.0
    }


def test_server_info_is_read_where_there_are_no_metrics():
    states = [{"last_gen_throughput": 10.0, "num_running_reqs": 2}, {"last_gen_throughput": 5.0}]
    text = json.dumps({"internal_states": states})
    assert from_server_info(text) == ("sglang", {"tokens_per_s": 15.0, "running": 2.0})
    for nothing in ("", "[]", "{}", '{"internal_states": 3}', '{"internal_states": [3]}'):
        assert from_server_info(nothing) == ("", {})


def test_a_connection_that_was_closed_is_opened_again():
    with beside(MockServer(metrics=LLAMACPP)) as url:
        server = ServerFigures(url, {})
        server.find()
        assert (server.route, server.dialect, server.why_none) == ("/metrics", "llamacpp", "")
        assert server._connection.sock is not None
        server._connection.sock.shutdown(2)
        assert server.read() is not None
    assert server.read() is None, "a server that is gone is a look that failed"
