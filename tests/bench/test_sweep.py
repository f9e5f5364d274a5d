"""Points of a sweep: which there are, which are left, what becomes of each."""

from __future__ import annotations

import pytest

from tests.bench.test_block import run as good_run
from tests.bench.test_selfcheck import checked
from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.sweep import run as sweep
from tetrad.bench.sweep.options import FEWEST_REQUESTS, BenchSweepConfig
from tetrad.core.errors import BenchFailure, ConfigError
from tetrad.core.records import BenchRun, FailureCount
from tetrad.core.sweep_records import Place, SweepPoint


def config(**options) -> BenchSweepConfig:
    return BenchSweepConfig.parse(options)


def test_every_pair_is_a_point_and_takes_every_flag_of_the_run():
    todo = sweep.points(config(concurrency="256,512", lengths="128/64,8/4", temperature=0.5))
    assert [str(each.place) for each in todo] == [
        "concurrency 256, lengths 128/64",
        "concurrency 256, lengths 8/4",
        "concurrency 512, lengths 128/64",
        "concurrency 512, lengths 8/4",
    ]
    first = todo[0].config
    assert type(first) is BenchServeConfig
    assert (first.max_concurrency, first.random_input_len, first.random_output_len) == (
        256,
        128,
        64,
    )
    assert (first.num_prompts, todo[2].config.num_prompts) == (1024, 2048)
    (alone,) = sweep.points(config(concurrency="1"))
    assert alone.config.num_prompts == FEWEST_REQUESTS
    assert first.temperature == 0.5


def test_repetitions_are_rows_of_their_own_with_prompts_of_their_own():
    seen: list[tuple[str, int]] = []
    todo = sweep.points(config(concurrency="8,16", repeat=2))

    def behave(each: BenchServeConfig, place: Place) -> BenchRun:
        seen.append((place.setting, place.repetition))
        return good_run()

    assert len(list(sweep.run(todo, {}, behave, lambda line: None))) == 4
    low, high = "concurrency 8", "concurrency 16"
    assert seen == [(low, 1), (low, 2), (high, 1), (high, 2)]
    assert [str(each.place) for each in todo] == [
        "concurrency 8", "concurrency 8, run 2", "concurrency 16", "concurrency 16, run 2",
    ]  # fmt: skip
    once, twice = config(concurrency="8"), config(concurrency="8", repeat=2)
    assert sweep.plan_of(once) == sweep.plan_of(twice)


def test_rates_are_points_and_keep_the_usual_number_of_requests():
    todo = sweep.points(config(request_rates="0.5,inf"))
    assert [each.config.request_rate for each in todo] == [0.5, float("inf")]
    assert [each.place.request_rate for each in todo] == [0.5, "inf"]
    assert todo[0].config.num_prompts is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "a sweep needs its points"),
        ({"concurrency": "0"}, "'0' must be a whole number above 0"),
        ({"concurrency": "8,8"}, "8 is there twice"),
        ({"request_rates": "nan"}, "'nan' must be a number above 0"),
        ({"lengths": "128"}, "'128' must be PROMPT/OUTPUT"),
        ({"concurrency": "8", "max_concurrency": 4}, "takes the place of --max-concurrency"),
        ({"request_rates": "8", "request_rate": 4}, "takes the place of --request-rate"),
        ({"lengths": "8/8", "random_input_len": 4}, "takes the place of --random-input-len"),
        ({"under": "ttft:5", "concurrency": "8"}, "give --find max-throughput too"),
        ({"find": "max-throughput", "concurrency": "8"}, "between two limits"),
        ({"find": "max-throughput", "concurrency": "8,2"}, "give them in order"),
        ({"find": "max-throughput", "lengths": "8/2"}, "leave --lengths out"),
        ({"find": "max-throughput", "under": "ttft"}, "'ttft' must be ttft, tpot, itl"),
        (
            {"find": "max-throughput", "under": "ttft:1", "disable_stream": True},
            "can only bound e2el",
        ),
        ({"concurrency": "8,64", "num_prompts": 9}, "never puts 64 requests in flight"),
        (
            {"concurrency": "8", "save_result": True, "result_filename": "a"},
            "every point writes its own",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(options, sentence: str):
    with pytest.raises(ConfigError, match="(?i)" + sentence):
        config(**options)


def test_secrets_and_where_results_go_are_no_part_of_the_plan():
    plain = sweep.plan_of(config(concurrency="8", base_url="http://h:1"))
    other = config(
        concurrency="8,16",
        base_url="http://h:1/v1",
        api_key="secret",
        header=("A=secret",),
        csv="x.csv",
        disable_tqdm=True,
    )
    assert sweep.plan_of(other) == plain
    assert "secret" not in str(plain)
    assert "max_concurrency" not in plain
    hidden = sweep.plan_of(config(concurrency="8", base_url="http://user:secret@h:1"))
    assert hidden["url"] == "http://***@h:1"


def measured(todo, behaviour, plan=None) -> list[SweepPoint]:
    return list(sweep.run(todo, plan or {}, lambda each, _: behaviour(each), lambda line: None))


def test_a_point_without_figures_is_a_row_and_the_next_one_is_measured():
    def behave(each: BenchServeConfig) -> BenchRun:
        if each.max_concurrency == 8:
            raise BenchFailure("No server answers.")
        if each.max_concurrency == 64:
            late = checked().model_copy(update={"invalid": ["the client was late."]})
            return good_run(client=late)
        if each.max_concurrency == 16:
            failures = [FailureCount(kind="timeout", count=2, example="slow", example_request=1)]
            return good_run(failed=2, completed=62, failures=failures)
        return good_run()

    rows = measured(sweep.points(config(concurrency="8,16,32,64")), behave)
    assert [row.status for row in rows] == ["failed", "failures", "ok", "invalid"]
    assert rows[0].run is None
    assert rows[0].detail == "No server answers."
    assert rows[1].detail.startswith("2 of 64 requests failed, 0 are allowed")
    assert rows[2].run == good_run()
    assert rows[3].detail == "The figures are INVALID: the client was late."


def test_an_interrupt_ends_the_sweep_and_its_point_is_no_row():
    rows = sweep.run(
        sweep.points(config(concurrency="8,16")),
        {},
        lambda each, _: good_run(interrupted=each.max_concurrency == 16),
        lambda line: None,
    )
    assert next(rows).place.concurrency == 8
    with pytest.raises(KeyboardInterrupt):
        next(rows)


def test_kept_points_are_found_by_their_place_and_the_last_one_counts(tmp_path):
    options = config(concurrency="8,16")
    plan = sweep.plan_of(options)
    rows = measured(sweep.points(options), lambda each: good_run(), plan)
    again = rows[0].model_copy(update={"detail": "again"})
    path = tmp_path / "r.jsonl"
    path.write_text("".join(row.model_dump_json() + "\n" for row in (*rows, again)))
    found = sweep.kept(path, plan)
    assert found == {rows[0].place: again, rows[1].place: rows[1]}
    assert sweep.kept(tmp_path / "none.jsonl", plan) == {}


def test_a_changed_plan_is_told_by_name_and_value(tmp_path):
    old, new = config(concurrency="8"), config(request_rates="1", temperature=0.5)
    path = tmp_path / "r.jsonl"
    (row,) = measured(sweep.points(old), lambda each: good_run(), sweep.plan_of(old))
    path.write_text(row.model_dump_json() + "\n")
    with pytest.raises(ConfigError) as told:
        sweep.kept(path, sweep.plan_of(new))
    for part in (
        "temperature was 0.0 and is 0.5",
        "request_rate was inf and is swept",
        "max_concurrency was swept and is None",
    ):
        assert part in str(told.value)


def test_a_line_that_is_no_point_is_named(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"kind": "bench_run"}\n')
    with pytest.raises(ConfigError, match="line 1 is no point of a sweep"):
        sweep.kept(path, {})


def test_a_place_says_what_varies():
    assert str(Place(request_rate="inf")) == "rate inf"
    assert str(Place()) == ""
