"""Figures beside SGLang's, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from tests.bench.test_block import run
from tests.house.source import ROOT
from tetrad.bench.figures.definitions import DEFINITIONS
from tetrad.bench.figures.measure import Answer, answer
from tetrad.bench.figures.repeats import figure, interval, repeats, table
from tetrad.bench.figures.window import further, in_flight, lines, steady, steady_span
from tetrad.bench.load.backends import Reading, read_chat
from tetrad.bench.load.wire import Trace
from tetrad.bench.workload.requests import Prompt, Seeds


def made(index: int, sent_s: float, *stamps: tuple[float, int], **reading) -> Answer:
    trace = Trace(index, sent_s=sent_s, ended_s=stamps[-1][0])
    tokens = sum(count for _, count in stamps)
    read = Reading(stamps=list(stamps), counts_tokens=True, output_tokens=tokens, **reading)
    return answer(trace, read, Prompt(tokens), None, None, stream=True)


def test_figures_of_two_requests():
    """E2E 1.0 s of 4 tokens and 2.0 s of 5: 250 and 400 ms a token; chunk gaps 500, 1000 ms."""
    both = [made(0, 0.0, (0.5, 1), (1.0, 3)), made(1, 1.0, (2.0, 2), (3.0, 3), answer_s=3.0)]
    found = further(both, 4.0, stream=True)
    assert found.normalised_ms.mean == pytest.approx(325)
    assert found.itl_chunk_ms is not None
    assert found.itl_chunk_ms.count == 2
    assert found.itl_chunk_ms.mean == pytest.approx(750)
    assert found.ttat_ms is not None
    assert found.ttat_ms.count == 1
    assert found.ttat_ms.mean == pytest.approx(2000)
    assert found.mean_in_flight == pytest.approx(3.0 / 4.0)
    assert in_flight([both[1].record], 2.0, 4.0) == pytest.approx(0.5)
    assert in_flight([both[1].record], 2.0, 2.0) == 0.0


def test_the_answer_begins_after_the_reasoning():
    def read(*deltas) -> Reading:
        reading = Reading()
        for time_s, delta in enumerate(deltas):
            read_chat(reading, float(time_s), {"choices": [{"delta": delta}]})
        return reading

    thought, said = {"reasoning_content": "hm"}, {"content": "8"}
    assert read(thought, thought, said, said).answer_s == 2.0
    assert read(thought, {"tool_calls": [{"function": {"name": "add"}}]}).answer_s == 1.0
    assert read(said, said).answer_s is None, "without reasoning TTFT says it"
    assert read(thought).answer_s is None


def test_the_steady_part_lies_between_ramps():
    """Ten streams begin at 1..10 s and end at 21..30 s: nine or more run from 9 to 22 s."""
    assert steady_span([(1.0 + i, 21.0 + i) for i in range(10)]) == (9.0, 22.0)
    assert steady_span([(1.0, 2.0)]) is None
    assert steady_span([]) is None
    assert steady_span([(1.0, 1.0), (1.0, 1.0)]) is None


def test_tokens_of_the_steady_part_are_those_that_came_in_it():
    one = made(0, 0.0, (1.0, 1), (2.0, 1), (3.0, 1), (9.0, 1))
    two = made(1, 0.0, (2.0, 1), (3.0, 2), (4.0, 4))
    found = steady([one, two])
    assert found is not None
    assert (found.begun_s, found.ended_s) == (2.0, 4.0)
    assert (found.output_tokens, found.output_throughput) == (7, 3.5)
    assert (found.completed, found.mean_in_flight) == (1, 2.0)
    assert found.ttft_ms.count == 0
    told = lines(None, found)
    assert told[0].startswith("steady from 2.00 to 4.00 s: 3.50 output tok/s, in flight 2.00")
    assert "TTFT" not in told[0]


def test_an_interval_holds_the_median_and_not_more_than_the_range():
    low, high = interval([10.0, 11.0, 12.0, 13.0, 100.0])
    assert low == 10.0
    assert high == 100.0
    assert interval([5.0]) == (5.0, 5.0)
    assert interval([7.0] * 6) == (7.0, 7.0)
    close = figure("x", [float(value) for value in range(100, 131)])
    assert close.median == 115.0
    assert 105 < close.low < 115 < close.high < 125
    assert close.spread == pytest.approx(30 / 115)


def test_the_table_of_repetitions():
    runs = [run(duration_s=seconds) for seconds in (1.0, 1.25, 2.0)]
    rows = table(repeats(runs))
    assert rows[0].startswith("3 runs with fresh prompts:")
    assert rows[1].split()[:5] == ["Output", "token", "throughput", "(tok/s)", "3276.80"]
    assert not any("Steady" in row for row in rows), "no run has a steady part"
    assert "fewer than 5 runs" in rows[-1]


def test_repetitions_have_other_prompts_and_the_same_shape():
    seeds = Seeds(shape=1, content=1)
    drawn = [seeds.of_run(number) for number in range(3)]
    assert drawn[0] == seeds
    assert {s.shape for s in drawn} == {1}
    assert len({s.content for s in drawn} | {s.content + 1 for s in drawn}) == 6
    other = Seeds(shape=3, content=3)
    assert not {s.content for s in drawn} & {other.of_run(number).content for number in range(3)}


def test_every_definition_is_in_the_docs():
    text = " ".join((ROOT / "docs" / "benchmark.md").read_text().split())
    missing = [name for name, line in DEFINITIONS.items() if f"| {name} | {line} |" not in text]
    assert not missing
