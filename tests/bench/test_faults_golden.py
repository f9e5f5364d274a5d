"""Every kind of failure in one run, and the very report that it gets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.bench.mock_server import MockServer
from tests.bench.test_failures import CASES, config, run
from tetrad.bench.report.block import block, remarks
from tetrad.core.records import BenchRun

GOLDEN = Path(__file__).with_name("golden_faults.txt")
BEHAVIOURS = ("good", *CASES, "hang", "truncated", "good")


def report(result: BenchRun) -> str:
    """Counts, failures and nothing that depends on the clock."""
    rows = [line for line in block(result).splitlines() if "requests:  " in line]
    rows += [line for line in block(result).splitlines() if line.startswith("Total generated")]
    shown = rows + [line for line in remarks(result) if "e.g. request" in line or "failed" in line]
    return (
        "\n".join(re.sub(r"\d+ bytes in \d+ lines", "N bytes in N lines", s) for s in shown) + "\n"
    )


@pytest.mark.parametrize("backend", ["tetrad", "vllm", "vllm-chat"])
async def test_the_report_of_every_fault(backend: str, tmp_path):
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "What is 3+5?", "output_len": 8}\n' * len(BEHAVIOURS))
    async with MockServer(BEHAVIOURS).running() as url:
        options = config(
            url, lines, backend=backend, max_concurrency=1, request_timeout_sec=0.5, model="m"
        )
        assert report(await run(options)) == GOLDEN.read_text()
