"""`tetrad bench rank`: one rank of a layout, its steps and their limits."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from tetrad.bench.rank.options import BenchRankConfig
from tetrad.cli.bench_files import check_writable
from tetrad.cli.bench_kernels import append, model_shapes, where
from tetrad.cli.flags import verb
from tetrad.cli.narrator import Narrator
from tetrad.cli.tables import show
from tetrad.core.errors import ConfigError
from tetrad.core.keys import key_format

if TYPE_CHECKING:
    from rich.table import Table

    from tetrad.bench.rank.run import RankBench
    from tetrad.core.rank_records import OpShare, RankTiming

LEAST_SHARE = 0.002
"""Of a step: ops that take less are one row of the table."""
SPARE_OF_OPS = (3, 2, 6)
"""Places of the columns that a narrow terminal may do without, the first first: launches, calls and
the limit, whose share is told."""
SPARE_OF_STEPS = (11, 9, 4, 3, 7, 10, 1)
"""As above: latency, bytes of links, launches, spread, ops, time of links and own sequences."""


def _bench_rank(config: BenchRankConfig) -> int:
    """Run, print, append."""
    from tetrad.bench.rank.run import run

    check_writable("--output-file", config.output_file)
    narrator = Narrator()
    rows = []
    try:
        for row in run(_plan(config), narrator.stage):
            narrator.stage("")
            rows.append(row)
            show(op_table(row), SPARE_OF_OPS)
            if config.output_file is not None:
                append(row, config.output_file)
    finally:
        if rows:
            show(step_table(rows), SPARE_OF_STEPS)
            for sentence in remarks(rows):
                print(sentence)
    return 0


def _plan(config: BenchRankConfig) -> RankBench:
    from tetrad.bench.rank.run import RankBench

    device, dtype = where(config.device, config.dtype)
    name, arch = model_shapes(config.model, device.type)
    config.layout.check_program(arch, "--ranks")
    if config.context > arch.max_position:
        raise ConfigError(
            f"--context {config.context}: {name} knows {arch.max_position} positions; at most that "
            "works."
        )
    return RankBench(
        arch=arch.first_layers(config.num_layers),
        model=name,
        model_layers=arch.num_layers,
        ranks=config.layout,
        batches=config.batches,
        query_len=config.query_len,
        context=config.context,
        routing=config.routing,
        seed=config.seed,
        forced={"experts": config.moe_runner_backend, "mla": config.attention_backend},
        tb_per_s=config.tb_per_s,
        tflops=config.tflops,
        link_gb_per_s=config.link_gb_per_s,
        link_call_us=config.link_us,
        dtype=dtype,
        keys=key_format(
            config.kv_cache_dtype,
            str(dtype).removeprefix("torch."),
            arch.mla.kv_lora_rank,
            arch.indexer.head_dim,
        ),
        device=device,
        budget_s=config.budget_s,
        command=shlex.join(["tetrad", *sys.argv[1:]]),
    )


def step_table(rows: list[RankTiming]) -> Table:
    """One row for each batch."""
    from rich.table import Table

    first = rows[0]
    title = (
        f"One rank of {first.ranks}: {first.model}, {first.num_layers} of {first.model_layers} "
        f"layers, {first.dtype}, keys in {first.kv_cache_dtype}, "
        f"{first.query_len} new of {first.context} keys, "
        f"{first.routing} routing"
    )
    table = Table(title=title, title_justify="left")
    for heading in (
        *("batch", "own", "ms a step", "p10 to p90", "launches", "limit ms", "of limit"),
        *("ops ms", "tok/s", "link MB", "link ms", "latency ms", "tok/s with link"),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        time = row.step
        table.add_row(
            str(row.batch),
            str(row.sequences),
            f"{time.median_us / 1e3:.2f}",
            f"{time.p10_us / 1e3:.2f} to {time.p90_us / 1e3:.2f}",
            "" if time.launches is None else str(time.launches),
            f"{row.limit_us / 1e3:.2f}",
            f"{100 * row.share:.0f} %",
            "" if row.ops_us is None else f"{row.ops_us / 1e3:.2f}",
            f"{row.tokens_per_s:,.0f}",
            f"{sum(row.link_bytes.values()) / 1e6:.1f}",
            f"{row.link_us / 1e3:.2f}",
            f"{row.latency_us / 1e3:.2f}" if row.latency_us else "",
            f"{row.tokens_per_s_with_link:,.0f}",
        )
    return table


def op_table(row: RankTiming) -> Table:
    """Where one step's time goes."""
    from rich.table import Table

    table = Table(title=f"A step of {row.batch} sequences, op by op", title_justify="left")
    for heading in ("part", "op"):
        table.add_column(heading, no_wrap=True)
    for heading in ("calls", "launches", "ms", "of ops", "limit ms", "of limit", "bound by"):
        table.add_column(heading, justify="right", no_wrap=True)
    whole_us = row.ops_us or row.limit_us
    small = [op for op in row.ops if max(op.us or 0.0, op.limit_us) < LEAST_SHARE * whole_us]
    for op in row.ops:
        if op not in small:
            table.add_row(op.part, op.op, *_figures(op, whole_us), _bound(op, row))
    if small:
        calls, launches = (sum(getattr(op, name) for op in small) for name in ("calls", "launches"))
        took_us = sum(op.us or 0.0 for op in small)
        table.add_row(
            f"{len(small)} smaller", "", str(calls), str(launches or ""), f"{took_us / 1e3:.3f}",
            f"{100 * took_us / whole_us:.1f} %",
        )  # fmt: skip
    return table


def _figures(op: OpShare, whole_us: float) -> tuple[str, ...]:
    timed = ("", "") if op.us is None else (f"{op.us / 1e3:.3f}", f"{100 * op.us / whole_us:.1f} %")
    limit = f"{op.limit_us / 1e3:.3f}" if op.limit_us else ""
    share = "" if op.share is None else f"{100 * op.share:.0f} %"
    return (str(op.calls or ""), str(op.launches or ""), *timed, limit, share)


def _bound(op: OpShare, row: RankTiming) -> str:
    if not op.limit_us:
        return ""
    reads_longer = op.bytes / row.tb_per_s >= op.flops / row.tflops
    return "memory" if reads_longer else "compute"


def remarks(rows: list[RankTiming]) -> list[str]:
    """What a reader must know besides the tables."""
    first = rows[0]
    stated = "measured in this run" if first.ceilings else "as stated"
    lines = [
        f"Limits count weights and keys at {first.tb_per_s:.3g} TB/s and useful operations at "
        f"{first.tflops:.3g} TFLOP/s ({stated}), whichever takes longer, op by op; activations are "
        "not counted.",
        *_communication(first),
        f"Weights {first.weight_bytes / 1e9:.2f} GB, drawn; keys of the largest step "
        f"{max(row.cache_bytes for row in rows) / 1e9:.2f} GB.",
    ]
    for row in rows:
        if row.step.note:
            lines.append(f"Batch {row.batch}: no CUDA graph, as the step {row.step.note}.")
        lines += [f"Batch {row.batch}: {note}." for note in row.notes]
    return lines


def _communication(row: RankTiming) -> list[str]:
    """Nothing where one rank is all there are."""
    if not row.link_calls:
        return []
    named = ", ".join(f"{number} {name}" for name, number in row.link_calls.items())
    latency = f"{row.link_call_us:g} µs of latency each"
    if not row.link_call_us:
        per_us = sum(row.link_calls.values()) / 1e3
        latency = f"bandwidth only: each µs of latency (--link-us) would add {per_us:g} ms"
    return [
        f"ms a step is without communication, which is not sent: {named} a step are priced by "
        f"their bytes at {row.link_gb_per_s:g} GB/s, without overlap, {latency}."
    ]


bench_rank = verb(BenchRankConfig, _bench_rank)
