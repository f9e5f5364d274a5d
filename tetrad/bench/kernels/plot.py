"""A log-log roofline: the ceilings of a run as lines, every timed cell as a point."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tetrad.bench.report.pyplot import require_matplotlib
from tetrad.core.records import KernelTiming

MARKERS = "osD^vP*X<>ph"


def draw_roofline(rows: Sequence[KernelTiming], path: Path) -> None:
    """Write a picture in the format of the name's ending, without cells that do no arithmetic."""
    plt = require_matplotlib("--plot")
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    ceilings = rows[0].ceilings
    points = [row for row in rows if row.tflops and row.flops]
    intensities = [row.flops / row.bytes for row in points] or [1.0]
    ridge = ceilings.gemm_tflops / ceilings.tb_per_s
    low, high = min(*intensities, ridge) / 4, max(*intensities, ridge) * 4
    axes.plot(
        [low, ridge, high],
        [low * ceilings.tb_per_s, ceilings.gemm_tflops, ceilings.gemm_tflops],
        color="black",
        label=f"{ceilings.tb_per_s:.3g} TB/s, {ceilings.gemm_tflops:.3g} TFLOP/s",
    )
    for place, name in enumerate(dict.fromkeys((row.op, row.backend) for row in points)):
        cells = [row for row in points if (row.op, row.backend) == name]
        axes.scatter(
            [row.flops / row.bytes for row in cells],
            [row.tflops for row in cells],
            marker=MARKERS[place % len(MARKERS)],
            label=f"{name[0]}, {name[1]}",
        )
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s")
    axes.set_title(f"{rows[0].device['name']}, {rows[0].model}, {rows[0].ranks}")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)
