"""A command line of `sglang.bench_serving` can be pasted: every flag works or says why not."""

from __future__ import annotations

import re

import pytest

from tests.house.all_flags import all_flags
from tests.house.source import ROOT
from tetrad.bench.options.serve import BenchServeConfig
from tetrad.cli.bench_flags import ACCEPTED, REASONS, full_name, reason

SGLANG_NUM_FLAGS = 87
"""`sglang.bench_serving` 0.5.23, dumped from its argparse; --help left out."""
OURS = {flag.removeprefix("bench/serve:") for flag in all_flags() if flag.startswith("bench/serve")}


def table() -> dict[str, str]:
    """Flag → what docs/benchmark.md says of it."""
    text = (ROOT / "docs" / "benchmark.md").read_text()
    rows = re.findall(r"^\| `(--[a-z-]+)` \| (.+) \|$", text, re.MULTILINE)
    return dict(rows)


def test_every_flag_of_sglang_is_there_or_has_a_reason():
    assert len(ACCEPTED) + len(REASONS) == SGLANG_NUM_FLAGS
    assert not set(ACCEPTED) & set(REASONS)
    assert set(ACCEPTED) <= OURS
    assert not OURS & set(REASONS)


def test_the_table_of_the_docs_is_whole():
    assert set(table()) == {*ACCEPTED, *REASONS}
    for flag, said in table().items():
        assert said.startswith("no: ") == (flag in REASONS), flag


def test_a_refusal_is_one_sentence_that_says_what_to_do():
    for flag, why in REASONS.items():
        assert reason(flag) == why
        assert not why.endswith(".")
        assert ". " not in why, flag


def test_abbreviations_are_sglangs():
    """Tetrad's own flags must not make one of SGLang's ambiguous."""
    assert full_name("--random-input") == "--random-input-len"
    assert full_name("--num-prompt") == "--num-prompts"
    assert full_name("--request") == "--request-rate"
    assert full_name("--profile") == "--profile"
    assert full_name("--gsp-num") is None
    assert full_name("--portt") is None


@pytest.mark.parametrize(
    ("pasted", "expected"),
    [
        (
            "--backend sglang --dataset-name random --random-input 256 --random-output 256 "
            "--num-prompt 64 --request-rate inf --disable-stream",
            {"random_input_len": 256, "random_output_len": 256, "num_prompts": 64},
        ),
        (
            "--backend sglang-oai --dataset-name generated-shared-prefix --gsp-num-groups 4 "
            "--gsp-prompts-per-group 8 --gsp-group-dist zipf --gsp-zipf 1.5 --request 5 --top-p .9",
            {"gsp_num_groups": 4, "gsp_zipf_alpha": 1.5, "request_rate": 5.0, "top_p": 0.9},
        ),
        (
            "--dataset-name mooncake --dataset-path t.jsonl --use-trace --mooncake-slow 2 "
            "--flush-cache --cache-report --tag a --header A=1 B=2 --token-ids-logprob 1 2",
            {"use_trace_timestamps": True, "header": ("A=1", "B=2"), "token_ids_logprob": (1, 2)},
        ),
    ],
)
def test_pasted_command_lines_are_understood(pasted: str, expected, tetrad, monkeypatch):
    seen: list[BenchServeConfig] = []

    def parse(values):
        seen.append(BenchServeConfig(**values))
        raise KeyboardInterrupt

    monkeypatch.setattr(BenchServeConfig, "parse", parse)
    assert tetrad("bench", "serve", *pasted.split())[0] == 130
    (config,) = seen
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"dataset_name": "sharegpt"}, "nothing is downloaded"),
        ({"gsp_group_distribution": "zipf"}, "--gsp-zipf-alpha go together"),
        ({"length_distribution": "normal", "random_range_ratio": 1}, "have --length-cv"),
        ({"use_trace_timestamps": True}, "needs --dataset-name mooncake"),
        ({"backend": "vllm", "return_routed_experts": True}, "is a field of /generate"),
        ({"rate_profile": ("5",)}, "write 5:30 for 5 requests"),
        ({"rate_profile": ("5:1",), "request_rate": 3}, "give one of them"),
        ({"rate_profile": ("5-0:1",)}, "must be above 0"),
    ],
)
def test_options_that_cannot_be(values, sentence: str):
    from tetrad.core.errors import ConfigError

    with pytest.raises(ConfigError, match=sentence):
        BenchServeConfig.parse(values)
