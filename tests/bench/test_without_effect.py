"""Flags that the chosen dataset does not read are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.options.without_effect import READ_BY, without_effect
from tetrad.bench.sweep.options import BenchSweepConfig


@pytest.mark.parametrize(
    ("flags", "sentences"),
    [
        ({"random_input_len": 64, "random_range_ratio": 1.0}, []),
        (
            {"gsp_output_len": 4, "cache_bust": True},
            ["--cache-bust, --gsp-output-len have no effect with --dataset-name random-ids."],
        ),
        (
            {"dataset_name": "sharegpt", "dataset_path": Path("x"), "random_input_len": 64},
            ["--random-input-len has no effect with --dataset-name sharegpt."],
        ),
        ({"dataset_name": "custom", "dataset_path": Path("x"), "random_output_len": 64}, []),
        ({"dataset_offset": 4}, ["--dataset-offset has no effect without --dataset-path."]),
        ({"length_cv": 0.2}, ["--length-cv has no effect on uniform lengths."]),
        ({"length_cv": 0.2, "length_distribution": "normal"}, []),
        ({"top_logprobs_num": 2}, ["--top-logprobs-num has no effect without --return-logprob."]),
        (
            {"burstiness": 2.0},
            ["--burstiness has no effect on requests that are sent all at once."],
        ),
        ({"burstiness": 2.0, "request_rate": 4.0}, []),
        ({"burstiness": 2.0, "rate_profile": ("2:5",)}, []),
        (
            {
                "burstiness": 2.0,
                "dataset_name": "mooncake",
                "dataset_path": Path("x"),
                "use_trace_timestamps": True,
            },
            ["--burstiness has no effect with a trace's time stamps."],
        ),
    ],
)
def test_flags_that_nothing_reads_are_named(flags: dict[str, Any], sentences: list[str]):
    assert list(without_effect(BenchServeConfig(**flags))) == sentences


@pytest.mark.parametrize(("rates", "is_told"), [("1,inf", False), ("inf", True)])
def test_gaps_of_a_sweep_s_rates_are_drawn(rates: str, is_told: bool):
    config = BenchSweepConfig(request_rates=rates, burstiness=2.0)
    assert bool(list(without_effect(config))) == is_told


def test_every_name_is_a_field():
    assert READ_BY.keys() <= BenchServeConfig.model_fields.keys()
