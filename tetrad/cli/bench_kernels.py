"""`tetrad bench kernels`: the kernel timer with a table, the records, a plot."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from tetrad.bench.kernels.options import BenchKernelsConfig
from tetrad.cli.bench_files import check_writable
from tetrad.cli.flags import verb
from tetrad.cli.narrator import Narrator
from tetrad.cli.tables import show
from tetrad.core.errors import BenchFailure, ConfigError, UnsupportedError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from rich.table import Table

    from tetrad.bench.kernels.run import KernelBench
    from tetrad.core.arch import ModelArch
    from tetrad.core.records import KernelTiming
    from tetrad.core.spread import Record

SPARE = ("issued", "p10 to p90", "launches", "TB/s", "plateau", "per expert", "error")
"""Columns that a narrow terminal may do without, the first first."""
MOST_SHARE = 1.005
"""Of a ceiling; more shows as above 100 %."""
NAME_WIDTH = 40
"""Of a kernel's name; C++ ones would fill the screen."""


def _bench_kernels(config: BenchKernelsConfig) -> int:
    """Time, print, append. A wrong or failed cell is a BenchFailure."""
    from tetrad.bench.kernels.plot import draw_roofline
    from tetrad.bench.kernels.run import run, worst
    from tetrad.bench.report.pyplot import require_matplotlib

    for flag, path in (("--output-file", config.output_file), ("--plot", config.plot)):
        check_writable(flag, path)
    if config.plot is not None:
        require_matplotlib("--plot")
    plan = _plan(config)
    narrator = Narrator()
    rows = []
    for row in run(plan, narrator.stage):
        rows.append(row)
        if config.output_file is not None:
            append(row, config.output_file)
    narrator.stage("")
    _print(rows)
    if config.plot is not None:
        draw_roofline(rows, config.plot)
        print(f"roofline drawn to {config.plot}", file=sys.stderr)
    if config.output_file is not None:
        print(f"{len(rows)} records appended to {config.output_file}", file=sys.stderr)
    if sentence := worst(rows):
        raise BenchFailure(sentence)
    return 0


def _plan(config: BenchKernelsConfig) -> KernelBench:
    from tetrad.bench.kernels import dense as kernels_dense
    from tetrad.bench.kernels.run import KernelBench, op_names
    from tetrad.core.ranks import Ranks
    from tetrad.kernels.registry import OPS
    from tetrad.kernels.shapes import Load

    device, dtype = where(config.device, config.dtype)
    backends = dict.fromkeys(name for op in OPS.values() for name in op.backends)
    _known("--ops", config.op_names, op_names())
    _known("--backends", config.backend_names, backends)
    asked = config.op_names or op_names()
    # What others are compared with comes first.
    ops = tuple(sorted(asked, key=lambda op: op != kernels_dense.NAME))
    _some_backend(config, ops)
    name, arch = model_shapes(config.model, device.type)
    ranks = Ranks(**config.rank_counts)
    ranks.check(arch)
    loads = [
        Load(tokens, config.routing or "random", config.context) for tokens in config.token_counts
    ]
    expert_loads = [
        Load(0, config.routing or "uniform", config.context, tokens_per_expert=each)
        for each in config.tokens_per_expert_counts
    ]
    return KernelBench(
        ops=ops,
        backends=config.backend_names,
        arch=arch,
        model=name,
        ranks=ranks,
        loads=tuple(loads),
        expert_loads=tuple(expert_loads or loads),
        dtype=dtype,
        device=device,
        budget_s=config.budget_s,
        command=shlex.join(["tetrad", *sys.argv[1:]]),
        breakdown=config.breakdown,
        compare=config.compare,
    )


def where(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Device and type of activations, "auto" resolved. Raises UnsupportedError."""
    import torch

    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise UnsupportedError(
            "--device cuda: torch finds no CUDA device here; --device cpu works."
        )
    found = torch.device("cpu" if device == "cpu" or not has_cuda else "cuda")
    if dtype == "auto":
        dtype = "bfloat16" if found.type == "cuda" else "float32"
    chosen: torch.dtype = getattr(torch, dtype)
    return found, chosen


def _some_backend(config: BenchKernelsConfig, ops: Sequence[str]) -> None:
    """Refuse backends that none of the ops asked for has, and a block that no router routes."""
    from tetrad.bench.kernels import block as kernels_block
    from tetrad.kernels.registry import OPS

    if kernels_block.NAME in config.op_names and config.routing == "uniform":
        raise ConfigError(
            f"--ops {kernels_block.NAME} --routing uniform: a router cannot distribute tokens "
            "evenly; random and skewed work."
        )
    having = {**OPS, kernels_block.NAME: OPS["experts"]}
    found = {op: having[op].backends for op in ops if op in having}
    wanted = set(config.backend_names)
    if wanted and found and wanted.isdisjoint(chain(*found.values())):
        op, names = next(iter(found.items()))
        raise ConfigError(
            f"--backends {config.backends}: none of the requested ops has this backend; {op} has "
            f"{', '.join(names)}."
        )


def _known(flag: str, names: Sequence[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{flag} {name}: unknown name; known are {', '.join(known)}.{nearest(name, known)}"
            )


def model_shapes(name: str | None, device_kind: str) -> tuple[str, ModelArch]:
    """What to call the model, and its shapes."""
    from tetrad.core.arch import ModelArch
    from tetrad.core.errors import ConfigError
    from tetrad.core.presets import PRESETS, shapes_of
    from tetrad.data import NAME, model_folder

    if name is None:
        name = NAME if device_kind == "cpu" else PRESETS[0]
    if name == NAME:
        return NAME, ModelArch.from_folder(model_folder(Path(name)))
    arch = shapes_of(name)
    if not isinstance(arch, ModelArch):
        raise ConfigError(
            f"--model {name}: {arch.model_type} has no experts and no latent attention, whose "
            f"kernels are timed here; {NAME} and {', '.join(PRESETS)} work."
        )
    return name, arch


def append(row: Record, path: Path) -> None:
    """One line of JSON."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row.model_dump(mode="json")) + "\n")


def _print(rows: list[KernelTiming]) -> None:
    table = _table(rows)
    headings = [column.header for column in table.columns]
    show(table, [headings.index(name) for name in SPARE])
    ceilings, device = rows[0].ceilings, rows[0].device
    print(
        f"Ceilings of {device['name']} in this run: copy {ceilings.copy_tb_per_s:.3g} TB/s, "
        f"read {ceilings.read_tb_per_s:.3g} TB/s, large product {ceilings.gemm_tflops:.3g} TFLOP/s;"
        f" an empty call takes {ceilings.launch_us:.3g} µs."
    )
    if blocks := _blocks(rows):
        show(blocks)
    for row in rows:
        if row.breakdown:
            print(parts(row))
    for sentence in remarks(rows):
        print(sentence)


def parts(row: KernelTiming) -> str:
    """The launches of a call in one line."""
    listed = ", ".join(f"{each.name[:NAME_WIDTH]} {each.us:.1f}" for each in row.breakdown)
    return f"{row.op} by {row.backend}, {row.case}, {row.tokens} tokens, µs: {listed}"


def remarks(rows: list[KernelTiming]) -> list[str]:
    """What a reader must know besides the table: one sentence for each reason, with its rows."""
    by_reason: dict[str, dict[str, dict[str, None]]] = {}
    for row in rows:
        note = row.detail or (row.time.note if row.time else "")
        if note:
            reason = f"{'no CUDA graph' if row.status == 'ok' else row.status}: {note}"
            by_reason.setdefault(reason, {}).setdefault(row.op, {})[row.backend] = None
    return [
        "; ".join(f"{op} by {', '.join(names)}" for op, names in ops.items()) + f": {reason}."
        for reason, ops in by_reason.items()
    ] + [*_passing(rows), *_disturbed(rows)]


def _passing(rows: list[KernelTiming]) -> Iterator[str]:
    """That a share above 100 % is none, and what it comes from."""
    timed = [row for row in rows if row.share is not None]
    found = [row for row in timed if _mark(row)]
    if found:
        named = dict.fromkeys(f"{row.op} by {row.backend}" for row in found)
        most = max(100 * (row.share or 0.0) for row in found)
        yield (
            f"* {len(found)} of {len(timed)} rows ({', '.join(named)}): above the ceiling of this "
            f"run, up to {most:,.0f} %. What they read lay in a cache, a short burst ran at a "
            "higher clock, or others used the machine while the ceiling was measured: compare "
            "µs, not shares."
        )


def _disturbed(rows: list[KernelTiming]) -> Iterator[str]:
    """The warning that `bench rank` gives, of all such rows at once."""
    from tetrad.core.records import disturbance

    timed = [(f"{row.op} by {row.backend}", row.time) for row in rows if row.time is not None]
    wide = [(name, time) for name, time in timed if disturbance([time], "") is not None]
    if warning := disturbance([time for _, time in wide], "theirs"):
        named = dict.fromkeys(name for name, _ in wide)
        yield f"{len(wide)} of {len(timed)} rows ({', '.join(named)}): {warning}."


def _blocks(rows: list[KernelTiming]) -> Table | None:
    """Whole blocks beside the grouped products in them; None without any."""
    from rich.table import Table

    found = [row for row in rows if row.block is not None and row.time is not None]
    if not found:
        return None
    title = "From router to residual, against the two grouped products in it; target 1.15 x + 12 µs"
    table = Table(title=title, title_justify="left")
    for heading in ("shape", "tokens", "backend", "µs", "launches", "products", "ratio", "target"):
        is_word = heading in ("shape", "backend")
        table.add_column(heading, justify="left" if is_word else "right", no_wrap=True)
    for row in found:
        assert row.block is not None
        assert row.time is not None
        missed_us = row.time.median_us - row.block.target_us
        table.add_row(
            row.case,
            str(row.tokens),
            row.backend,
            f"{row.time.median_us:.1f}",
            _count(row.time.launches),
            f"{row.block.grouped_us:.1f}",
            f"{row.block.ratio:.2f}",
            f"{row.block.target_us:.1f}, "
            + (f"missed by {missed_us:.1f}" if missed_us > 0 else "met"),
        )
    return table


def _table(rows: list[KernelTiming]) -> Table:
    from rich.table import Table

    first = rows[0]
    rows = [row for row in rows if row.status != "refused"]
    title = f"{first.model}, {first.ranks}, {first.dtype}"
    table = Table(title=title, title_justify="left")
    for heading in ("op", "shape"):
        table.add_column(heading)
    for heading in ("tokens", "per expert"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("backend")
    is_compared = any(row.over_humming is not None for row in rows)
    for heading in (
        "µs",
        "p10 to p90",
        "launches",
        "TFLOP/s",
        "issued",
        "TB/s",
        "of ceiling",
        "plateau",
        *(["of humming"] if is_compared else []),
        "error",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for place, row in enumerate(rows):
        is_last = place + 1 == len(rows) or rows[place + 1].op != row.op
        per_expert = "" if row.tokens_per_expert is None else f"{row.tokens_per_expert:.3g}"
        table.add_row(
            row.op, row.case, str(row.tokens), per_expert, row.backend, *figures(row, is_compared),
            end_section=is_last,
        )  # fmt: skip
    return table


def figures(row: KernelTiming, is_compared: bool = False) -> tuple[str, ...]:
    """The right half of a table row. A cell without a time says why where the time would stand."""
    compared = (_share(row.over_humming),) if is_compared else ()
    error = "" if row.error is None else f"{row.error:.1e}"
    if row.time is None:
        word = row.status.upper() if row.status in ("wrong", "failed") else row.status
        return word, "", "", "", "", "", "", "", *compared, error
    assert row.share is not None
    issued = row.issued_flops
    return (
        f"{row.time.median_us:.1f}",
        f"{row.time.p10_us:.1f} to {row.time.p90_us:.1f}",
        _count(row.time.launches),
        _rate(row.tflops),
        "" if issued is None else _rate(issued / row.time.median_us / 1e6),
        _rate(row.tb_per_s),
        f"{100 * row.share:.0f} % {row.bound}{_mark(row)}",
        _share(row.plateau_share),
        *compared,
        error,
    )


def _mark(row: KernelTiming) -> str:
    """Of what passes its ceiling."""
    return " *" if row.share is not None and row.share > MOST_SHARE else ""


def _count(number: int | None) -> str:
    return "" if number is None else str(number)


def _share(value: float | None) -> str:
    """In per cent."""
    return "" if value is None else f"{100 * value:.3g} %"


def _rate(value: float | None) -> str:
    """Three digits, and no powers of ten."""
    if value is None or value == 0:
        return "-"
    return f"{value:#.3g}" if value >= 1e-3 else "<0.001"


bench_kernels = verb(BenchKernelsConfig, _bench_kernels)
