"""`tetrad bench sweep` as a command: its table, its files, and that it can be resumed."""

from __future__ import annotations

import csv
import json
import re

import pytest

from tests.bench.mock_server import MockServer
from tests.bench.test_block import run
from tests.cli.conftest import beside
from tetrad.bench.sweep.options import BenchSweepConfig
from tetrad.bench.sweep.run import alone
from tetrad.cli.bench_files import masked
from tetrad.cli.bench_sweep import show
from tetrad.core.records import Latencies
from tetrad.core.spread import Spread
from tetrad.core.sweep_records import Place, SweepPoint
from tetrad.data import embedded_model


@pytest.fixture
def arguments(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "What is 3+5?", "output_len": 8}\n' * 4)
    files = ["--results", str(tmp_path / "r.jsonl"), "--csv", str(tmp_path / "s.csv")]
    source = ["--dataset-name", "custom", "--dataset-path", str(path), "--warmup-requests", "0"]
    return ["bench", "sweep", *source, *files, "--html", str(tmp_path / "s.html"), "--ready", "0.1"]


def rows(path) -> list[SweepPoint]:
    return [SweepPoint.model_validate_json(line) for line in path.read_text().splitlines()]


def test_points_are_measured_once_and_new_ones_are_added(tetrad, arguments, tmp_path):
    server = MockServer()
    with beside(server) as url:
        arguments += ["--base-url", url, "--api-key", "geheim"]
        code, out, err = tetrad(*arguments, "--concurrency", "1,2")
        assert code == 0, err
        assert "point 1 of 2: concurrency 1\n" in err
        for line in ("tetrad at http", "prompt lengths: ", "output lengths: ", "arrivals: "):
            assert err.count(line) == 1
        assert re.search(r"point 2 of 2: concurrency 2, about \d+ s left\n", err)
        assert re.search(r"\npoints measured: 2, in \d+ s\n", err)
        assert len(server.bodies) == 8
        code, out, err = tetrad(*arguments, "--concurrency", "1,2,4")
    assert code == 0
    assert "2 of 3 points are in" in err
    assert re.search(r"\npoints measured: 1, in \d+ s\n", err)
    assert len(server.bodies) == 12
    for count in (1, 2, 4):
        assert f"concurrency {count}" in out
    kept = rows(tmp_path / "r.jsonl")
    assert [row.place.concurrency for row in kept] == [1, 2, 4]
    assert kept[0].run is not None
    assert kept[0].run.timeline is not None
    assert kept[0].run.machine["num_cores"] >= 1
    assert kept[0].run.requests == []
    written = "".join(p.read_text() for p in tmp_path.iterdir())
    assert "geheim" not in written
    with (tmp_path / "s.csv").open() as file:
        assert [row["max_concurrency"] for row in csv.DictReader(file)] == ["1", "2", "4"]
    assert "Serving benchmark: 3 runs" in (tmp_path / "s.html").read_text()


def test_a_failed_point_is_kept_and_run_again_only_when_asked(tetrad, arguments, tmp_path):
    with beside(MockServer("http 500", healthy=4)) as url:
        arguments += ["--base-url", url]
        code, out, err = tetrad(*arguments, "--concurrency", "1,2")
    assert code == 6
    assert "1 of 2 points are not clean (concurrency 2)" in err
    assert "concurrency 2: 4 of 4 requests failed" in out
    code, _, err = tetrad(*arguments, "--concurrency", "1,2")
    assert code == 6
    assert "2 of 2 points are in" in err
    code, _, err = tetrad(*arguments, "--concurrency", "1,2", "--retry-failed")
    assert code == 6
    assert "No server answers" in (tmp_path / "r.jsonl").read_text()
    assert [row.status for row in rows(tmp_path / "r.jsonl")] == ["ok", "failures", "failed"]
    assert "No server answers" in (tmp_path / "s.html").read_text()


def test_a_search_ends_with_a_sentence(tetrad, arguments, tmp_path):
    search = ["--find", "max-throughput", "--concurrency", "1,4"]
    with beside(MockServer()) as url:
        arguments += ["--base-url", url]
        code, out, err = tetrad(*arguments, *search, "--under", "ttft:60000,e2el:60000")
        assert code == 0, err
        assert "Most output throughput under P99 TTFT 60000 ms, P99 E2E 60000 ms: " in out
        num_points = len(rows(tmp_path / "r.jsonl"))
        assert 2 <= num_points <= 3
        code, out, err = tetrad(*arguments, *search, "--under", "median_e2el:0.001")
    assert code == 6
    assert "No concurrency keeps median E2E 0.001 ms: at concurrency 1 median E2E is" in err
    assert len(rows(tmp_path / "r.jsonl")) == num_points


@pytest.mark.parametrize("points", [["1,2", "--repeat", "2"], ["1,4", "--find", "max-throughput"]])
def test_with_a_seed_no_point_has_the_prompts_of_another(tetrad, tmp_path, points: list[str]):
    """Later points once found every prompt in the cache of the server."""
    load = ["--seed", "5", "--random-input-len", "9", "--random-output-len", "8", "--ready", "0.1"]
    model = ["--tokenizer", str(embedded_model()), "--results", str(tmp_path / "r.jsonl")]
    sent = []
    for _ in range(2):
        server = MockServer()
        with beside(server) as url:
            where = ["--base-url", url, "--concurrency", *points]
            code, _, err = tetrad("bench", "sweep", *load, *model, *where)
        assert code == 0, err
        assert ("point 1 of 4: concurrency 1, about " in err) == ("--repeat" in points)
        sent.append([str(body["input_ids"]) for body in server.bodies])
        (tmp_path / "r.jsonl").unlink()
    assert len(set(sent[0])) == len(sent[0]) >= 22
    assert set(sent[0][:22]) == set(sent[1][:22]), "the same sweep sends the same prompts"


def test_points_that_measured_the_cache_are_told(capsys):
    def told(dataset: str, *tokens: int) -> str:
        workload = run().workload.model_copy(update={"dataset": dataset})
        runs = [run(workload=workload, cached_tokens=cached) for cached in tokens]
        points = [
            point.model_copy(update={"place": Place(concurrency=2**number)})
            for number, point in enumerate(alone(runs, 0))
        ]
        show(points, BenchSweepConfig.parse({"concurrency": "1,2,4"}))
        return str(capsys.readouterr().out)

    said = told("random", 0, 7127, 4096)
    assert "2 of 3 runs found their prompts" in said
    assert "prefix cache, concurrency 2 87.0% of the tokens" in said
    assert "--cache-bust" not in said
    assert "--cache-bust begins each differently" in told("custom", 0, 8192)
    assert "prefix cache" not in told("random", 0, 400)
    assert "prefix cache" not in told("generated-shared-prefix", 0, 8000)


def test_a_changed_plan_stops_before_any_request(tetrad, arguments):
    server = MockServer()
    with beside(server) as url:
        arguments += ["--base-url", url, "--concurrency", "1"]
        assert tetrad(*arguments)[0] == 0
        code, _, err = tetrad(*arguments, "--temperature", "0.5")
    assert code == 2
    assert "another plan: temperature was 0.0 and is 0.5" in err
    assert len(server.bodies) == 4


def test_an_unknown_flag_of_sglang_says_why(tetrad):
    code, _, err = tetrad("bench", "sweep", "--concurrency", "1", "--profile")
    assert code == 2
    assert "tetrad bench sweep has no --profile: a profiled run" in err


def test_serve_writes_vllms_file_and_the_report(tetrad, arguments, tmp_path):
    reports = ["--html", str(tmp_path / "s.html"), "--csv", str(tmp_path / "s.csv")]
    files = [*arguments[2:6], *reports]
    saved = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "v.json"]
    lines = ["--output-file", str(tmp_path / "o.jsonl")]
    with beside(MockServer()) as url:
        code, _, _ = tetrad("bench", "serve", "--base-url", url, *files, *saved, *lines)
    assert code == 0
    assert len(json.loads((tmp_path / "v.json").read_text())["latencies"]) == 4
    line = json.loads((tmp_path / "o.jsonl").read_text())
    assert line["tetrad"]["requests"] == []
    assert line["tetrad"]["command"].startswith("tetrad bench serve --base-url")
    assert "Serving benchmark" in (tmp_path / "s.html").read_text()


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        (["--html", "/nowhere/a.html"], "--html /nowhere/a.html: there is no such folder."),
        (
            ["--save-result", "--result-dir", "/nowhere"],
            "--result-dir /nowhere: this is not a writable folder",
        ),
        (["--save-result", "--result-filename", "../a"], "it must be a name without folders"),
        (["--save-detailed"], "--save-detailed is about the file of --save-result"),
    ],
)
def test_what_cannot_be_written_is_told_before_the_load(flag, sentence: str, tetrad):
    code, _, err = tetrad("bench", "serve", *flag)
    assert code == 2
    assert sentence in err


def test_secrets_of_a_command_line_are_masked():
    secret = "--api-k s1 --port 1 --header A=s2 B=s3 --auth=s4 --model s5 --header=C=s6"
    shown = "--api-k *** --port 1 --header A=*** B=*** --auth=*** --model s5 --header=C=***"
    assert " ".join(masked(secret.split())) == shown


def test_large_figures_do_not_squeeze_the_points_name_out(capsys):
    """At 170 columns, five-digit latencies once left no room for the first column."""
    wide = Spread(count=9, mean=1e6, median=987654.3, p99=1234567.8)
    times = Latencies(e2e_ms=wide, ttft_ms=wide, tpot_ms=wide, itl_ms=wide, queue_ms=Spread())
    place = Place(concurrency=2048, request_rate=999.0, input_len=1024, output_len=1024)
    point = alone([run(latencies=times)], 0)[0].model_copy(update={"place": place})
    show([point], BenchSweepConfig.parse({"concurrency": "1"}))
    assert "concurrency 2048, rate 999.0, lengths 1024/1024" in capsys.readouterr().out


def test_a_narrow_terminal_shows_what_matters(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "90")
    point = alone([run()], 0)[0].model_copy(update={"place": Place(concurrency=16)})
    show([point], BenchSweepConfig.parse({"concurrency": "16"}))
    out = capsys.readouterr().out
    assert "concurrency 16" in out
    assert "output tok/s" in out
    assert "total tok/s" not in out.splitlines()[1]
    assert "total tok/s" in out.splitlines()[-1]
