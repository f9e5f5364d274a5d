"""`tetrad bench compare` as a command."""

from __future__ import annotations

import re

from tests.bench.mock_server import MockServer
from tests.cli.conftest import beside


def test_two_servers_in_turns(tetrad, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is 3+5?", "output_len": 8}\n' * 4)
    load = ["--dataset-name", "custom", "--dataset-path", str(prompts), "--warmup-requests", "0"]
    first, second = MockServer(), MockServer()
    with beside(first) as a, beside(second) as b:
        code, out, err = tetrad("bench", "compare", a, b, "--pairs", "3", *load)
    assert code == 0
    assert err.index("to send: 6 runs, 3 to each server, of 4 prompts") < err.index("pair 1 of 3")
    assert f"pair 1 of 3: {a}\n" in err
    assert re.search(f"pair 1 of 3: {re.escape(b)}, about \\d+ s left\n", err)
    assert len(first.bodies) == len(second.bodies) == 12
    assert "3 pairs of runs, A B and B A by turns:" in out
    assert "Output token throughput (tok/s)" in out
    assert tetrad("bench", "compare", a)[0] == 2


def test_a_server_that_fails_is_not_compared(tetrad, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is 3+5?", "output_len": 8}\n' * 4)
    load = ["--dataset-name", "custom", "--dataset-path", str(prompts), "--warmup-requests", "0"]
    with beside(MockServer()) as a, beside(MockServer("http 500")) as b:
        code, out, err = tetrad("bench", "compare", a, b, "--pairs", "3", *load)
    assert code == 6
    assert f"pair 1 of 3: {a}\n" in err
    assert f"pair 3 of 3: {b}, about " in err
    assert "pairs of runs" not in out
    assert "error: 4 of 4 requests failed" in err
