"""`tetrad quantize SOURCE TARGET`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tetrad.cli.flags import verb
from tetrad.core.errors import UnsupportedError
from tetrad.formats.options import QuantizeConfig

if TYPE_CHECKING:
    from pathlib import Path

    from tetrad.formats.quantize_report import QuantizeReport


def _quantize(config: QuantizeConfig) -> int:
    """Write the checkpoint and print what it cost in accuracy and saved in bytes."""
    from tetrad.formats import quantizer
    from tetrad.formats.progress import ConsoleProgress

    device = _device(config.device)
    with ConsoleProgress("Quantising") as progress:
        report = quantizer.run(
            config.source,
            config.target,
            config.include,
            config.exclude,
            force=config.force,
            device=device,
            max_shard_bytes=int(config.max_shard_gb * 1e9),
            on_bytes=progress,
        )
    _print(report)
    print(f"Written to {config.target}; {_next_step(config.target)}")
    return 0


def _next_step(target: Path) -> str:
    if (target / "tokenizer.json").is_file():
        return f"start it with: tetrad serve {target}"
    return "it needs a tokenizer.json, which SOURCE does not have, before it can be served."


def _device(asked: str) -> str:
    import torch

    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("--device cuda: there is no CUDA device here; use --device cpu.")
    return asked


def _print(report: QuantizeReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Relative RMS error and size per kind of tensor", title_justify="left")
    table.add_column("tensor", overflow="fold")
    table.add_column("stored")
    for heading in ("count", "MB in", "MB out", "mean", "max"):
        table.add_column(heading, justify="right")
    for row in sorted(report.kinds.values(), key=lambda row: not row.quantized):
        errors = (f"{row.rms_error_mean:.4f}", f"{row.rms_error_max:.4f}")
        table.add_row(
            row.kind,
            "nvfp4" if row.quantized else "as is",
            str(row.count),
            f"{row.bytes_before / 1e6:,.2f}",
            f"{row.bytes_after / 1e6:,.2f}",
            *(errors if row.quantized else ("", "")),
        )
    table.add_section()
    before, after = report.bytes_before / 1e6, report.bytes_after / 1e6
    table.add_row("all", "", "", f"{before:,.2f}", f"{after:,.2f}", "", "")
    Console().print(table)


quantize = verb(QuantizeConfig, _quantize, positional=("source", "target"))
