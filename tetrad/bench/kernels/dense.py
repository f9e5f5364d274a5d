"""Large dense products by torch (cuBLAS on a GPU): the plateau that others are compared with."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tetrad.core.arch import ModelArch
from tetrad.core.hardware import DeviceSnapshot
from tetrad.formats import e2m1
from tetrad.kernels.backend import Backend, Check, Op
from tetrad.kernels.contract import Argument, Case, Contract, case

NAME = "dense"
GPU_ROWS, CPU_ROWS = (1024, 4096, 8192), (64, 256)
BITS = {"fp4": 4.5, "fp8": 8.0, "bfloat16": 16.0, "float32": 32.0}
"""Of a number in each format, block scales included."""
SINCE: Mapping[str, tuple[int, int]] = {"fp8": (8, 9), "fp4": (10, 0)}
"""The first capability whose tensor cores know it: Ada, Blackwell."""
SCALE_BLOCK = 16
"""fp4 values that share a block scale."""
CHECKED_ROWS, CHECKED_COLUMNS = 4, 64


@dataclass(frozen=True)
class Operands:
    """x [T, in] and a weight [out, in] in a case's format; fp4 as two codes in a byte."""

    x: Tensor
    weight: Tensor
    format: str
    scales: tuple[Tensor, Tensor] | None
    """Of x and weight, all 1, where the format has some."""

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.x.nbytes + self.weight.nbytes

    def values(self, part: Tensor) -> Tensor:
        """float64 of a part of one of them."""
        return (e2m1.decode(part) if self.format == "fp4" else part).double()


def dense_cases(arch: ModelArch, dtype: torch.dtype, here: DeviceSnapshot) -> list[Case]:
    """Products of an expert's widths and of attention's output, in each format of the device."""
    hidden, inner = arch.hidden, arch.moe.intermediate
    widths = dict.fromkeys(
        ((2 * inner, hidden), (hidden, inner), (hidden, arch.mla.num_heads * arch.mla.v_dim))
    )
    here_since = here.compute_capability or (0, 0)
    formats = [str(dtype).removeprefix("torch.")]
    formats += [name for name, since in SINCE.items() if here_since >= since]
    return [
        Case(
            f"{out} x {width}, {stored}",
            {"T": rows, "out": out, "width": width, "format": stored},
            is_large=True,
        )
        for stored in formats
        for out, width in widths
        for rows in (GPU_ROWS if here.kind == "cuda" else CPU_ROWS)
    ]


def _inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Gaussian, or random codes; scales are 1."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(case.name.encode()))
    stored, width = case["format"], case["width"]

    def draw(rows: int, gain: float) -> Tensor:
        if stored == "fp4":
            size = (rows, width // 2)
            return torch.randint(256, size, generator=generator, device=device, dtype=torch.uint8)
        values = torch.randn(rows, width, generator=generator, device=device) * gain
        return values.to(torch.float8_e4m3fn if stored == "fp8" else dtype)

    gain = 1.0 if stored == "fp8" else width**-0.5
    x, weight = draw(case["T"], 1.0), draw(case["out"], gain)
    scales = None
    if stored in SINCE:
        scales = (_scales(stored, x), _scales(stored, weight))
    return {"operands": Operands(x, weight, stored, scales)}


def _scales(stored: str, part: Tensor) -> Tensor:
    """One for all of fp8; of fp4 one for each block, in cuBLAS's tiles of 128 by 4."""
    if stored == "fp8":
        return torch.ones((), device=part.device)
    blocks = part.shape[1] * 2 // SCALE_BLOCK
    number = -(-len(part) // 128) * 128 * (-(-blocks // 4) * 4)
    return torch.ones(number, device=part.device).to(torch.float8_e4m3fn)


def _cut(size: int, num: int) -> list[int]:
    """First, last and evenly between."""
    return [place * (size - 1) // max(1, num - 1) for place in range(min(num, size))]


def _outputs(result: Tensor) -> tuple[Tensor, ...]:
    rows, columns = _cut(len(result), CHECKED_ROWS), _cut(result.shape[1], CHECKED_COLUMNS)
    return (result[rows][:, columns],)


def _expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Some rows and columns in float64."""
    operands: Operands = inputs["operands"]
    x, weight = (_as_bytes_if_small(part) for part in (operands.x, operands.weight))
    rows, columns = _cut(len(x), CHECKED_ROWS), _cut(len(weight), CHECKED_COLUMNS)
    x, weight = x[rows].view(operands.x.dtype), weight[columns].view(operands.weight.dtype)
    return ((operands.values(x) @ operands.values(weight).T).cpu(),)


def _as_bytes_if_small(part: Tensor) -> Tensor:
    """Not every device can index small floats."""
    return part.view(torch.uint8) if part.element_size() == 1 else part


def _run(operands: Operands) -> Tensor:
    """[T, out] in bf16, or in the operands' type."""
    x, weight = operands.x, operands.weight
    if operands.scales is None:
        return torch.mm(x, weight.t())
    if operands.format == "fp4":
        x, weight = (part.view(torch.float4_e2m1fn_x2) for part in (x, weight))
    return torch._scaled_mm(
        x,
        weight.t(),
        scale_a=operands.scales[0],
        scale_b=operands.scales[1],
        out_dtype=torch.bfloat16,
        use_fast_accum=operands.format == "fp8",
    )


def _flops(case: Case) -> float:
    return float(2 * case["T"] * case["out"] * case["width"])


def _bytes(case: Case, size: int) -> float:
    operands = (case["T"] + case["out"]) * case["width"] * BITS[case["format"]] / 8
    return float(operands + case["T"] * case["out"] * min(size, 2 if "fp" in case["format"] else 4))


DENSE = Op(
    Contract(
        name=NAME,
        summary="x @ weight^T, large",
        arguments=(Argument("operands", "", "Operands", "x [T, in] and weight [out, in]"),),
        results=(Argument("y", "[T, out]", "bfloat16", "or the operands' type"),),
        cases=(case("small", T=8, out=32, width=64, format="float32"),),
        flops=_flops,
        bytes=_bytes,
        tolerance={"float32": 2e-6, "bfloat16": 1e-2},
    ),
    Check(_inputs, _expected, _outputs),
    {name: Backend(name, _run) for name in ("cublas", "torch")},
)
