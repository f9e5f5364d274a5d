"""`tetrad bench serve` as a command: its block, its file, its exit code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from tests.bench.mock_server import MockServer
from tests.cli.conftest import beside
from tetrad.core.records import BenchRun


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "What is 3+5?", "output_len": 8}\n' * 4)
    return str(path)


def test_a_clean_run_prints_the_block_and_appends_a_line(tetrad, prompts, tmp_path):
    results = tmp_path / "results.jsonl"
    common = ["--dataset-name", "custom", "--dataset-path", prompts, "--output-file", str(results)]
    with beside(MockServer()) as url:
        for _ in range(2):
            more = ["--output-details", "--tag", "a", "--cache-report", "--burstiness", "inf"]
            code, out, err = tetrad("bench", "serve", "--base-url", url, *common, *more)
            assert code == 0
    assert out.startswith("\n============ Serving Benchmark Result ============\n")
    assert "Successful requests:                     4         " in out.splitlines()
    assert "output lengths: 4 requests, 32 tokens, mean 8.0, min 8, median 8, max 8" in err
    first, second = (json.loads(line) for line in results.read_text().splitlines())
    assert first["completed"] == second["completed"] == 4
    assert first["output_lens"] == [8, 8, 8, 8]
    assert first["tag"] == "a"
    assert first["cache_report"]["total_cached_tokens"] == 0
    record = BenchRun.model_validate(first["tetrad"])
    assert record.asked["burstiness"] == "inf"
    assert record.workload.wanted_tokens.mean == 8
    assert len(record.requests) == 4


@pytest.mark.parametrize(
    "behaviour",
    ["http 500", "error event", "truncated", "broken connection", "empty", "early stop"],
)
def test_any_failure_fails_the_command(behaviour: str, tetrad, prompts):
    arguments = ["--dataset-name", "custom", "--dataset-path", prompts, "--max-conc", "1"]
    with beside(MockServer(behaviour, healthy=2)) as url:
        code, out, err = tetrad("bench", "serve", "--base-url", url, *arguments)
    assert code == 6
    assert "Failed requests:                         3         " in out.splitlines()
    assert "3 of 4 requests failed:" in out
    assert "error: 3 of 4 requests failed, 0 are allowed (--allow-failures)." in err


def test_failures_may_be_allowed(tetrad, prompts):
    arguments = ["--dataset-name", "custom", "--dataset-path", prompts, "--max-conc", "1"]
    with beside(MockServer("http 500", healthy=3)) as url:
        code, _, _ = tetrad("bench", "serve", "--base-url", url, *arguments, "--allow-fail", "2")
    assert code == 0
    with beside(MockServer("http 500", healthy=3)) as url:
        code, _, _ = tetrad("bench", "serve", "--base-url", url, *arguments, "--allow-fail", "1")
    assert code == 6


def test_repetitions_are_told_together(tetrad, prompts, tmp_path):
    """Three blocks, three lines in the file, one table; the warm-up until steady comes once."""
    results = tmp_path / "results.jsonl"
    server = MockServer()
    arguments = ["--dataset-name", "custom", "--dataset-path", prompts, "--repeat", "3"]
    arguments += ["--output-file", str(results), "--warmup-requests", "0", "--warmup-until-steady"]
    with beside(server) as url:
        code, out, err = tetrad("bench", "serve", "--base-url", url, *arguments)
    assert code == 0
    assert out.count("Serving Benchmark Result") == 3
    assert len(results.read_text().splitlines()) == 3
    assert "3 runs with fresh prompts:" in out
    assert "run 3 of 3" in err
    rounds = err.count("warm-up round")
    assert 2 <= rounds <= 10
    assert len(server.bodies) == 4 * (3 + rounds)


def test_a_client_that_was_late_fails_the_command(tetrad, prompts, monkeypatch):
    monkeypatch.setattr("tetrad.bench.figures.selfcheck.MOST_UNREAD_SHARE", -1.0)
    arguments = ["--dataset-name", "custom", "--dataset-path", prompts]
    with beside(MockServer()) as url:
        code, out, err = tetrad("bench", "serve", "--base-url", url, *arguments)
    assert code == 6
    assert "INVALID: the client was too slow: bytes lay unread" in out
    assert "error: The figures are INVALID: bytes lay unread" in err


def test_help_has_every_formula(tetrad):
    code, out, _ = tetrad("bench", "serve", "--help")
    assert code == 0
    said = " ".join(out.split())
    assert "(E2E - TTFT) / (output tokens - 1)" in said
    assert "(Little's law)" in said


def test_nobody_there(tetrad, prompts):
    arguments = ["--dataset-name", "custom", "--dataset-path", prompts]
    url = "http://127.0.0.1:9"
    code, out, err = tetrad("bench", "serve", "--base-url", url, *arguments, "--ready", "0.1")
    assert code == 6
    assert out == ""
    waits, error = err.splitlines()
    assert waits.startswith(
        f"waiting up to 0.1 s (--ready-check-timeout-sec) for a server at {url}: cannot connect"
    )
    refused = "cannot connect to 127.0.0.1:9: Connection refused. Start one with"
    assert error.startswith(f"error: No server answers at {url}: {refused}")


def test_a_file_is_read_before_a_server_is_waited_for(tetrad, tmp_path):
    arguments = ["--dataset-name", "custom", "--base-url", "http://127.0.0.1:9", "--ready", "60"]
    began = time.monotonic()
    code, _, err = tetrad("bench", "serve", *arguments, "--dataset-path", str(tmp_path / "no"))
    assert (code, "there is no such file" in err) == (2, True)
    (tmp_path / "bad").write_text('{"prompt": "a"}\n{')
    code, _, err = tetrad("bench", "serve", *arguments, "--dataset-path", str(tmp_path / "bad"))
    assert (code, "line 2: not valid JSON" in err) == (2, True)
    assert time.monotonic() - began < 30


def test_results_are_not_put_where_they_cannot_be(tetrad, prompts, tmp_path):
    """Before a server is looked for."""
    arguments = ["--dataset-name", "custom", "--dataset-path", prompts]
    for flag in ("--output-file", "--html", "--csv"):
        code, _, err = tetrad("bench", "serve", *arguments, flag, str(tmp_path))
        assert (code, err) == (
            2, f"error: {flag} {tmp_path}: this is a folder; name a file in it.\n"
        )  # fmt: skip
    (tmp_path / "taken").mkdir()
    more = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "taken"]
    code, _, err = tetrad("bench", "serve", *arguments, *more)
    assert (code, "this is a folder" in err) == (2, True)


def test_a_full_disk_loses_that_file_alone(tetrad, prompts, tmp_path):
    """Every write to /dev/full fails for want of space."""
    html = tmp_path / "report.html"
    arguments = ["--dataset-name", "custom", "--dataset-path", prompts, "--html", str(html)]
    with beside(MockServer()) as url:
        for flag in ("--output-file", "--csv"):
            code, out, err = tetrad(
                "bench", "serve", "--base-url", url, *arguments, flag, "/dev/full"
            )
            assert code == 6
            last = err.splitlines()[-1]
            assert last.startswith(f"error: {flag} /dev/full cannot be written: No space left")
            assert "Successful requests:                     4 " in out
            assert "<html" in html.read_text()
            html.unlink()


def test_a_profile_is_shown_whole(tetrad, prompts):
    arguments = ["--dataset-name", "custom", "--dataset-path", prompts]
    with beside(MockServer()) as url:
        code, out, _ = tetrad(
            "bench", "serve", "--base-url", url, *arguments, "--rate-profile", "40:0.05", "20-80:1"
        )
    assert code == 0
    (row,) = (line for line in out.splitlines() if line.startswith("Traffic request rate:"))
    assert row.split(":", 1)[1].strip() == "40:0.05 20-80:1 (mean 31.0157)"


def test_abbreviations_are_taken_where_they_are_unique(tetrad, prompts):
    arguments = ["--dataset-n=custom", "--dataset-p", prompts, "--random-out=4"]
    with beside(MockServer()) as url:
        assert tetrad("bench", "serve", "--base-url", url, *arguments)[0] == 0
    code, _, err = tetrad("bench", "serve", "--dataset", "custom")
    assert code == 2
    assert "Unknown option: --dataset." in err


def test_ctrl_c_prints_what_was_measured_and_is_130(prompts):
    """The server hangs after two good answers; the rest is cut off."""
    arguments = ["--dataset-name", "custom", "--dataset-path", prompts, "--max-concurrency", "1"]
    script = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job may inherit 'ignore'
        "from tetrad.cli.main import main\nsys.exit(main())"
    )
    server = MockServer("hang", healthy=3)
    with (
        beside(server) as url,
        subprocess.Popen(
            [sys.executable, "-c", script, "bench", "serve", "--base-url", url, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as bench,
    ):
        while len(server.bodies) < 4:
            assert bench.poll() is None
            time.sleep(0.02)
        bench.send_signal(signal.SIGINT)
        out, err = bench.communicate()
    assert bench.returncode == 130, err
    assert "Successful requests:                     2         " in out.splitlines()
    assert "INTERRUPTED: the figures cover 2 of 4 requests; 2 were cut off." in out
    assert "Traceback" not in err


def test_a_host_that_nobody_knows_is_told_at_once(tetrad, prompts, monkeypatch):
    """However long the command would wait for a server that is starting."""

    async def resolve(*_arguments, **_options):
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr("aiohttp.resolver.DefaultResolver.resolve", resolve)
    common = ["--dataset-name", "custom", "--dataset-path", prompts]
    begun = time.monotonic()
    code, _, err = tetrad("bench", "serve", "--base-url", "http://no.such.host:30000", *common)
    assert time.monotonic() - begun < 30, "it waited for the host"
    assert code == 2
    assert "There is no host 'no.such.host' (http://no.such.host:30000)" in err
