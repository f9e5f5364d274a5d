"""Each kind of load against the real server: every request answered, every token counted."""

from __future__ import annotations

import json

import pytest

from tests.e2e.conftest import Served, has_measured
from tests.e2e.test_commands import tetrad
from tetrad.core.records import BenchRun

TALKS = [
    {"conversations": [{"value": f"What is {i}+5?"}, {"value": f"{i} + 5 = {i + 5}"}]}
    for i in range(4)
]
TRACE = [
    {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]},
    {"timestamp": 300, "input_length": 540, "output_length": 3, "hash_ids": [1, 3]},
]
GROUPS = (
    "--dataset-name generated-shared-prefix --gsp-num-groups 2 --gsp-prompts-per-group 2 "
    "--gsp-system-prompt-len 128 --gsp-question-len 9 --gsp-output-len 4 --gsp-num-turns 2"
)


@pytest.mark.parametrize(
    ("flags", "num_requests", "cached"),
    [
        (GROUPS, 8, 4 * 128),
        (f"{GROUPS} --backend sglang-oai-chat --max-concurrency 1", 8, 4 * 128),
        ("--dataset-name mooncake --dataset-path TRACE --use-trace --max-conc 1", 2, 512),
        ("--dataset-name mooncake --dataset-path TRACE --backend sglang-oai-chat", 2, 0),
        ("--dataset-name sharegpt --dataset-path TALKS --apply-chat-template --return-log", 4, 0),
        ("--dataset-name random --dataset-path TALKS --num-prompts 3 --random-input 40", 3, 0),
        ("--rate-profile 10:0.2 10-30:0.2 --burstiness inf --random-input 20", 7, 0),
    ],
)
def test_a_load_of_each_kind(flags: str, num_requests, cached, served: Served, tmp_path):
    for name, lines in (("TALKS", TALKS), ("TRACE", TRACE)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(json.dumps(line) for line in lines))
        flags = flags.replace(name, str(path))
    results = tmp_path / "results.jsonl"
    words = [*flags.split(), "--random-output", "6", "--output-file", str(results)]
    done = tetrad("bench", "serve", "--base-url", served.url, *words)
    assert has_measured(done), done.stdout + done.stderr
    run = BenchRun.model_validate(json.loads(results.read_text())["tetrad"])
    assert (run.completed, run.failed, run.token_source) == (num_requests, 0, "server")
    assert run.output_tokens == round(run.workload.wanted_tokens.mean * num_requests)
    assert (run.cached_tokens or 0) >= cached
    if "chat" not in flags.replace("chat-template", ""):
        assert run.input_tokens == round(run.workload.prompt_tokens.mean * num_requests)
