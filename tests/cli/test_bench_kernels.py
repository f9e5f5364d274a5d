"""`tetrad bench kernels` on a CPU: table, records, exit codes, mistakes."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tetrad.bench.kernels import block as kernels_block
from tetrad.cli.bench_kernels import figures, parts
from tetrad.core.records import BlockTime, CallTime, Ceilings, KernelTiming, LaunchTime
from tetrad.kernels.registry import OPS

QUICK = ("bench", "kernels", "--device", "cpu", "--tokens", "1,8", "--budget-s", "5")


def test_a_table_and_the_ceilings(tetrad):
    code, out, _ = tetrad(*QUICK, "--ops", "rms_norm,route", "--backends", "torch")
    assert code == 0
    for word in ("rms_norm", "route", "TFLOP/s", "TB/s", "of ceiling", "abacus", "4 of 32"):
        assert word in out
    assert "Ceilings of" in out
    assert "large product" in out


@pytest.mark.parametrize("width", [80, 110, 190])
def test_a_narrow_terminal_cuts_nothing(tetrad, monkeypatch, width: int):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, _ = tetrad(*QUICK, "--ops", "dense,sample")
    assert code == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()
    table = [line for line in plain if line.startswith(("┃", "│"))]
    assert all(len(line) <= width for line in table)
    assert "…" not in out
    assert all(word in table[0] for word in ("backend", "µs", "of ceiling"))


def test_more_than_the_ceiling_is_marked_and_told(tetrad, monkeypatch):
    """Once 130 % stood there like any other share."""
    product = Ceilings(copy_tb_per_s=1e-9, read_tb_per_s=1e-9, gemm_tflops=1e-9, launch_us=1.0)
    monkeypatch.setattr("tetrad.bench.kernels.run.measure_ceilings", lambda *_: product)
    code, out, _ = tetrad(*QUICK, "--ops", "rms_norm,dense", "--backends", "torch")
    assert code == 0
    rows = [line for line in out.splitlines() if line.startswith("│ rms_norm")]
    assert rows
    assert all(" % memory *" in row for row in rows)
    (line,) = [line for line in out.splitlines() if line.startswith("* ")]
    assert re.match(
        r"\* (\d+) of \1 rows \(dense by torch, rms_norm by torch\): above the ceiling of this "
        r"run, up to [\d,]+ %\. ",
        line,
    )
    best = Ceilings(copy_tb_per_s=1e3, read_tb_per_s=1e3, gemm_tflops=1e3, launch_us=1.0)
    monkeypatch.setattr("tetrad.bench.kernels.run.measure_ceilings", lambda *_: best)
    assert "*" not in tetrad(*QUICK, "--ops", "rms_norm", "--backends", "torch")[1]


def test_dense_products_come_first_and_refusals_are_told_once_an_op(tetrad):
    code, out, _ = tetrad(*QUICK, "--ops", "route,dense,experts")
    assert code == 0
    lines = out.splitlines()
    rows = [line.split()[1] for line in lines if line.startswith("│")]
    assert list(dict.fromkeys(rows)) == ["dense", "route", "experts"]
    assert {line.split("│")[5].strip() for line in lines if line.startswith("│ dense")} == {"torch"}
    assert any(line.startswith("route by triton; experts by gluon, triton, ") for line in lines)


def test_a_busy_machine_is_told(tetrad, monkeypatch):
    """Medians of whole time slices once looked like any others."""
    calm = CallTime.of([10.0, 11.0, 12.0], "wall")
    spread = calm.model_copy(update={"p10_us": 10.0, "p90_us": 4000.0})
    monkeypatch.setattr("tetrad.kernels.timer.WallTimer.time", lambda *_: spread)
    code, out, _ = tetrad(*QUICK, "--ops", "dense,rms_norm")
    assert code == 0
    (line,) = [line for line in out.splitlines() if "as beside other work" in line]
    assert re.match(r"(\d+) of \1 rows \(dense by torch, rms_norm by layer_norm, ", line)
    assert line.endswith(
        "times differ 400 fold between repeats, as beside other work: no figure of theirs can be "
        "relied on."
    )
    monkeypatch.setattr("tetrad.kernels.timer.WallTimer.time", lambda *_: calm)
    assert "beside other work" not in tetrad(*QUICK, "--ops", "rms_norm")[1]


def test_records_are_lines_of_json(tetrad, tmp_path: Path):
    path = tmp_path / "kernels.jsonl"
    arguments = ("--ops", "route,experts", "--tokens-per-expert", "2", "--output-file", str(path))
    assert tetrad(*QUICK, *arguments)[0] == 0
    assert tetrad(*QUICK, *arguments)[0] == 0
    lines = path.read_text().splitlines()
    records = [KernelTiming.model_validate(json.loads(line)) for line in lines]
    assert len(records) % 2 == 0
    timed = [r for r in records if r.status == "ok"]
    assert {(r.op, r.tokens) for r in timed} == {("route", 1), ("route", 8), ("experts", 16)}
    (experts,) = {r.tokens_per_expert for r in timed if r.op == "experts"}
    assert experts == 2
    assert "bench kernels" in records[0].command


def test_a_wrong_backend_is_shown_and_fails_the_run(tetrad, monkeypatch):
    right = OPS["rms_norm"].backends["torch"]
    wrong = replace(
        right, name="hasty", run=lambda x, weight, eps: right.run(x, weight, eps) * 1.01
    )
    broken = replace(OPS["rms_norm"], backends={"hasty": wrong, "torch": right})
    monkeypatch.setitem(OPS, "rms_norm", broken)
    code, out, err = tetrad(*QUICK, "--ops", "rms_norm")
    assert code == 6
    assert "WRONG" in out
    assert "rms_norm by hasty: wrong: relative error 0.01" in out
    assert "first rms_norm by hasty at 1 tokens" in err
    hasty = [line for line in out.splitlines() if "hasty" in line and "WRONG" in line]
    assert all("% " not in line for line in hasty)


def test_the_shapes_of_a_config_file_and_of_a_preset(tetrad, tmp_path: Path):
    from tests.factories import TINY_GLM

    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY_GLM))
    for model in (path, tmp_path):
        code, out, _ = tetrad(*QUICK, "--ops", "route", "--model", str(model))
        assert code == 0
        assert "2 of 8" in out
    code, out, _ = tetrad(*QUICK, "--ops", "route", "--model", "glm-5", "--ranks", "ep=8,tp=8")
    assert "8 of 256" in out
    assert "tp=8,ep=8" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ops", "expert"], "--ops expert: unknown name"),
        (["--ops", "rms_nrm"], "Did you mean 'rms_norm'?"),
        (["--backends", "tritn"], "Did you mean 'triton'?"),
        (["--ops", "moe_blok"], "Did you mean 'moe_block'?"),
        (
            ["--ops", "moe_block", "--routing", "uniform"],
            "a router cannot distribute tokens evenly",
        ),
        (
            ["--backends", "gluon", "--ops", "rope"],
            "none of the requested ops has this backend; rope",
        ),
        (["--model", "glm5"], "Did you mean 'glm-5'?"),
        (["--tokens", "1,x"], "--tokens 1,x: whole numbers from 1 on with commas"),
        (["--tokens", "0"], "whole numbers from 1 on"),
        (["--ranks", "pp=2"], "there is no 'pp', only tp and ep"),
        (["--ranks", "ep=5"], "32 experts cannot be dealt to 5 ranks"),
        (["--output-file", "no/such/f"], "there is no such folder"),
        (["--plot", "."], "this is a folder; name a file in it"),
        (["--budget-s", "0"], "--budget-s 0.0: input should be greater than 0"),
    ],
)
def test_a_mistake_is_one_sentence(tetrad, arguments: list[str], sentence: str):
    code, out, err = tetrad("bench", "kernels", "--device", "cpu", *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_where_nothing_can_run_it_says_so_and_fails(tetrad):
    arguments = ("--ops", "experts", "--backends", "gluon,triton", "--tokens", "8")
    code, _, err = tetrad("bench", "kernels", "--device", "cpu", "--budget-s", "1", *arguments)
    assert code == 6
    last = err.splitlines()[-1]
    assert last.startswith("error: No backend that was asked for can run here: experts by gluon: ")
    assert "on a CPU use 'torch'" in last


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is there"
)
def test_a_plot_without_matplotlib_is_a_sentence_before_any_work(tetrad, tmp_path: Path):
    code, out, err = tetrad(*QUICK, "--plot", str(tmp_path / "roof.png"))
    assert (code, out) == (2, "")
    assert 'pip install -e ".[plot]"' in err


def test_a_plot(tetrad, tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "roof.png"
    assert tetrad(*QUICK, "--ops", "rms_norm,linear", "--plot", str(path))[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_block_is_told_against_its_products(tetrad, monkeypatch):
    """A CPU has no profiler for it: the second table comes from records."""
    seen = BlockTime(grouped_us=100.0, ratio=2.5, target_us=127.0)
    arguments = ("--ops", "moe_block", "--backends", "torch")
    monkeypatch.setattr(kernels_block, "block_time", lambda launches, median_us: seen)
    code, out, _ = tetrad(*QUICK, *arguments)
    assert code == 0
    lines = [line for line in out.splitlines() if "2.50" in line]
    assert len(lines) == 2
    assert all("100.0" in line and "127.0, m" in line for line in lines)
    assert "against the two grouped products" in out


def test_comparing_without_humming_is_one_sentence(tetrad, monkeypatch):
    everything_else = SimpleNamespace(why_not=lambda _device: None)
    monkeypatch.setattr("tetrad.kernels.experts.humming.triton_support", everything_else)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    backends = {name: OPS["experts"].backends[name] for name in ("humming", "torch")}
    monkeypatch.setitem(OPS, "experts", replace(OPS["experts"], backends=backends))
    code, out, _ = tetrad(*QUICK, "--ops", "experts", "--compare")
    assert code == 0
    told = [line for line in out.splitlines() if "humming" in line]
    assert told == [
        "experts by humming: refused: the package is not installed; `pip install humming-kernels` "
        "installs it."
    ]


def test_what_was_compared_has_a_column():
    row = KernelTiming.model_construct(
        status="ok", time=CallTime.of([50.0], "graph", launches=7), tflops=1.0, tb_per_s=1.0,
        share=0.5, bound="memory", plateau_share=0.25, over_humming=0.625, error=1e-3,
        issued_flops=None,
    )  # fmt: skip
    assert figures(row, True)[-3:] == ("25 %", "62.5 %", "1.0e-03")
    assert figures(row)[-2:] == ("25 %", "1.0e-03")
    assert figures(row)[2] == "7"


def test_parts_of_a_call_fit_a_line():
    row = KernelTiming.model_construct(
        op="experts", backend="triton", case="32 experts", tokens=8,
        breakdown=[LaunchTime(name="x" * 90, us=1.25), LaunchTime(name="sum", us=3.0)],
    )  # fmt: skip
    assert parts(row) == f"experts by triton, 32 experts, 8 tokens, µs: {'x' * 40} 1.2, sum 3.0"


def test_two_runs_of_the_same_seed_use_the_same_shapes(tetrad, tmp_path: Path):
    path = tmp_path / "k.jsonl"
    for _ in range(2):
        tetrad(*QUICK, "--ops", "experts", "--routing", "skewed", "--output-file", str(path))
    first, second = (
        [json.loads(line)["shape"] for line in half]
        for half in _halves(path.read_text().splitlines())
    )
    assert first == second
    assert sum(first[-1]["rows_per_expert"]) == first[-1]["T"]


def _halves(lines: list[str]) -> tuple[list[str], list[str]]:
    return lines[: len(lines) // 2], lines[len(lines) // 2 :]
