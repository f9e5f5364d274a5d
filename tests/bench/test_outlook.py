"""Before a comparison begins it is said what will be sent, and then how long that will take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench.mock_server import MockServer
from tetrad.bench.compare import outlook
from tetrad.bench.compare.options import BenchCompareConfig
from tetrad.bench.compare.outlook import at_rate, first_look, in_words, left, sent
from tetrad.bench.serve.plan import Plan
from tetrad.bench.workload.requests import Prompt, Seeds

A, B = "http://a:1", "http://b:1"


def plan(num_prompts: int = 2, due_s: float = 0.0) -> Plan:
    prompts = [Prompt(8, text="x")] * num_prompts
    config = BenchCompareConfig(a=A, b=B)
    return Plan(config, Seeds(1, 1), None, None, prompts, [], [due_s] * num_prompts)


class Quiet:
    """A `Watch` that keeps what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def say_once(self, line: str) -> None:
        self.lines.append(line)

    def begin(self, _num_requests: int) -> None:
        raise AssertionError("nothing is counted yet")

    def finished(self, _has_failed: bool) -> None:
        raise AssertionError("nothing is counted yet")

    def end(self) -> None:
        raise AssertionError("nothing is counted yet")


def test_what_is_sent_is_counted():
    assert sent(plan(), pairs=3) == (
        "to send: 6 runs, 3 to each server, of 2 prompts; 12 prompts and 96 output tokens in all"
    )


def test_what_is_left_is_each_server_s_own():
    assert left({}, [A, B]) == ""
    assert left({A: 100.0}, [A, B, B]) == ", about 5 min left"
    assert left({A: 10.0, B: 1000.0}, [A, B, B]) == ", about 34 min left"
    assert left({A: 10.0, B: 1000.0}, [A]) == ", about 10 s left"


def test_a_run_takes_as_long_as_its_tokens_or_its_arrivals():
    assert at_rate(plan(1000), 80.0) == 100.0
    assert at_rate(plan(due_s=600.0), 1e6) == 600.0
    assert at_rate(plan(), 0.0) > 1000.0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        *((0.4, "0 s"), (89.4, "89 s"), (90.0, "2 min"), (3569.0, "59 min")),
        *((3571.0, "1 h 0 min"), (12_000.0, "3 h 20 min")),
    ],
)
def test_durations_in_words(seconds: float, words: str):
    assert in_words(seconds) == words


async def test_both_are_warmed_up_with_whole_requests_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(outlook, "WARM_REQUESTS", 3)
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "What is 3+5?", "output_len": 50}\n' * 5)
    load: dict[str, Any] = {"dataset_name": "custom", "dataset_path": lines}
    first, second, watch = MockServer(), MockServer(), Quiet()
    async with first.running() as a, second.running() as b:
        found = await first_look(BenchCompareConfig.parse({"a": a, "b": b, **load}), watch)
        assert set(found) == {a, b}
        assert all(0 < run_s < 60 for run_s in found.values())
    sizes = [body["sampling_params"]["max_new_tokens"] for body in first.bodies + second.bodies]
    assert sizes == [50] * 6, "shorter ones have another rate"
    assert "What is 3+5?" not in {body["text"] for body in first.bodies}
    told = "\n".join(watch.lines)
    assert told.count("to send: 12 runs, 6 to each server, of 5 prompts") == 1
    assert told.index("to send") < told.index(f"warm-up, not counted: {a}")
    assert watch.lines[-1].startswith("warm-up: ")


async def test_without_warm_up_nothing_is_sent_before_the_first_run(tmp_path: Path):
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "What is 3+5?", "output_len": 50}\n')
    load = {"dataset_name": "custom", "dataset_path": lines, "warmup_requests": 0}
    first, second, watch = MockServer(), MockServer(), Quiet()
    async with first.running() as a, second.running() as b:
        assert await first_look(BenchCompareConfig.parse({"a": a, "b": b, **load}), watch) == {}
    assert first.bodies == second.bodies == []
    assert any(line.startswith("to send: ") for line in watch.lines)
