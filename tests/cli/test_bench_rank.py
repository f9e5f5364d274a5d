"""`tetrad bench rank` on a CPU: tables, records, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tetrad.core.rank_records import RankTiming

RANK = (
    *("bench", "rank", "--device", "cpu", "--budget-s", "0.2"),
    *("--tb-per-s", "0.01", "--tflops", "0.05"),
)
QUICK = (*RANK, "--batch", "8,16", "--context", "70")
EIGHT = ("--ranks", "tp=8,ep=8,attn_dp=8,rank=3")


def test_tables_and_what_they_mean(tetrad):
    code, out, _ = tetrad(*QUICK, *EIGHT)
    assert code == 0
    for word in (
        *("A step of 8 sequences", "A step of 16 sequences", "experts", "mla", "of limit"),
        *("tok/s with link", "rank=3", "6 of 6 layers", "0.01 TB/s", "as stated"),
        *("5 dispatch, 5 combine", "without overlap", "latency ms"),
        "bandwidth only: each µs of latency (--link-us) would add 0.012 ms",
    ):
        assert word in out, word


def test_latency_stands_beside_bandwidth(tetrad):
    code, out, _ = tetrad(*RANK, "--batch", "8", "--context", "70", *EIGHT, "--link-us", "2500")
    assert code == 0
    (row,) = [line for line in out.splitlines() if line.startswith("│     8 │")]
    assert row.split("│")[-3].strip() == "30.00"
    assert "without overlap, 2500 µs of latency each." in out
    assert "bandwidth only" not in out


def test_records_are_lines_of_json(tetrad, tmp_path: Path):
    path = tmp_path / "rank.jsonl"
    arguments = (*EIGHT, "--num-layers", "3", "--output-file", str(path))
    assert tetrad(*QUICK, *arguments)[0] == 0
    records = [
        RankTiming.model_validate(json.loads(line)) for line in path.read_text().splitlines()
    ]
    assert [(r.batch, r.sequences, r.num_layers, r.model_layers) for r in records] == [
        (8, 1, 3, 6),
        (16, 2, 3, 6),
    ]
    assert all(r.step.method == "wall" and r.ops for r in records)


def test_the_embedded_model_goes_by_its_name(tetrad):
    code, out, _ = tetrad(*RANK, "--batch", "1", "--context", "70", "--model", "abacus")
    assert code == 0
    assert "abacus, 6 of 6 layers" in out
    assert "Communication" not in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--ranks", "dp=8"), "--ranks dp=8: there is no 'dp', only tp, ep, pp, attn_dp, rank"),
        (("--ranks", "tp=2,pp=3,rank=3"), "stage 1 would begin with layer 2"),
        (("--ranks", "tp=2,rank=5"), "the layout has 2 ranks"),
        (("--batch", "8,x"), "--batch 8,x: whole numbers from 1 on"),
        (("--batch", ""), "at least one batch was expected"),
        (("--query-len", "300"), "--query-len 300 is more than --context 256"),
        (("--num-layers", "1"), "2 is the fewest with experts"),
        (("--context", "5000"), "knows 4096 positions; at most that works"),
        (("--model", "glm-55"), "there is no such file or folder"),
        (("--output-file", "nowhere/x"), "there is no such folder"),
        (("--output-file", "."), "this is a folder; name a file in it"),
        (("--moe-runner-backend", "tritan"), "no backend 'tritan'"),
        (("--ranks", ""), "a layout was expected, such as tp=8"),
        (("--batch", "1000000"), "sequences with 256 each take 623 GB, and cpu has"),
        (("--link-gb-per-s", "inf"), "--link-gb-per-s inf: input should be a finite number."),
        (("--link-us", "-1"), "--link-us -1.0: input should be greater than or equal to 0."),
        (("--link-gb-per-s", "nan"), "--link-gb-per-s nan: input should be a finite number."),
    ],
)
def test_mistakes_are_refused_in_one_sentence(tetrad, arguments: tuple[str, ...], sentence: str):
    code, _, err = tetrad(*RANK, *arguments)
    assert code != 0
    assert sentence in err
    assert "Traceback" not in err
