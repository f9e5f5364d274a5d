"""Goodput counts what met every bound, and its section is SGLang's."""

from __future__ import annotations

import pytest

from tests.bench.test_block import run
from tetrad.bench.figures.goodput import goodput, parse_objectives
from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.report.block import block, sglang_keys
from tetrad.bench.serve.summary import disagreement
from tetrad.core.errors import ConfigError
from tetrad.core.records import BenchRun, Failure, RequestRecord


def request(index: int, ttft_ms: float, tpot_ms: float | None, e2e_s: float, **more):
    return RequestRecord(
        index=index,
        prompt_tokens=1,
        output_tokens=1 if tpot_ms is None else 2,
        due_s=0.0,
        sent_s=0.0,
        ended_s=e2e_s,
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        **more,
    )


REQUESTS = [
    request(0, 125, 125, 0.375),
    request(1, 0, 0, 0.1, failure=Failure(kind="empty", message="no token")),
    request(2, 500, 125, 0.625),
    request(3, 125, 250, 0.625),
    request(4, 250, None, 0.25),
]


def test_a_request_is_good_when_every_bound_holds_and_it_did_not_fail():
    found = goodput({"ttft": 300, "tpot": 150, "e2el": 500}, REQUESTS, 2.0)
    assert found.requests_per_s == 2 / 2.0
    assert found.attainment == pytest.approx(2 / 5)
    assert found.attainment_of == pytest.approx({"ttft": 3 / 5, "tpot": 3 / 5, "e2el": 2 / 5})


def test_the_section_and_the_keys_are_sglangs():
    found = goodput({"ttft": 300, "tpot": 150.5}, REQUESTS, 2.0)
    lines = block(run(goodput=found)).splitlines()
    start = lines.index("---------------------Goodput----------------------")
    assert lines[start - 1].startswith("Concurrency:")
    assert lines[start + 1 : start + 6] == [
        "SLOs (ms):                               ttft:300 tpot:150.5",
        "Request goodput (req/s):                 1.00      ",
        "SLO attainment (%):                      40.00     ",
        "TTFT SLO attainment (%):                 60.00     ",
        "TPOT SLO attainment (%):                 60.00     ",
    ]
    keys = sglang_keys(run(goodput=found))
    assert list(keys)[-4:] == [
        "goodput_slos_ms",
        "request_goodput",
        "slo_attainment",
        "slo_attainment_by_metric",
    ]
    assert "request_goodput" not in sglang_keys(run())


def test_bounds_in_words():
    assert parse_objectives(("ttft:500", "tpot:50.5", "e2e:9")) == {
        "ttft": 500.0,
        "tpot": 50.5,
        "e2el": 9.0,
    }


@pytest.mark.parametrize("word", ["itl:10", "ttft", "ttft:", "ttft:fast", "ttft:0", "ttft:inf"])
def test_what_is_no_bound_is_named(word: str):
    with pytest.raises(ConfigError, match="is no objective; write ttft:500"):
        BenchServeConfig.parse({"goodput": (word,)})


def test_bounds_that_cannot_be():
    with pytest.raises(ConfigError, match="e2el has two bounds"):
        BenchServeConfig.parse({"goodput": ("e2e:1", "e2el:2")})
    with pytest.raises(ConfigError, match="--goodput ttft needs a stream"):
        BenchServeConfig.parse({"goodput": ("ttft:1", "e2el:2"), "disable_stream": True})


def test_what_was_asked_is_told_without_secrets():
    values = {
        "burstiness": float("inf"),
        "num_prompts": 3,
        "api_key": "k",
        "authorization": "a",
        "header": ("X=1",),
    }
    assert BenchServeConfig.parse(values).asked == {
        "num_prompts": 3,
        "burstiness": "inf",
    }


def of_a_file(of_random_prompts: BenchRun) -> BenchRun:
    workload = of_random_prompts.workload.model_copy(update={"dataset": "custom"})
    return of_random_prompts.model_copy(update={"workload": workload})


def test_counts_that_disagree_are_flagged():
    agree = run(output_tokens=1000, output_tokens_retokenized=990)
    assert list(disagreement(of_a_file(agree))) == []
    apart = run(output_tokens=1000, output_tokens_retokenized=900, token_source="server")
    (note,) = disagreement(of_a_file(apart))
    assert list(disagreement(apart)) == []
    far = run(output_tokens=1000, output_tokens_retokenized=400, token_source="server")
    assert len(list(disagreement(far))) == 1
    assert "1000 output tokens, the client's tokenizer 900 for the same text, 10.0% apart" in note
