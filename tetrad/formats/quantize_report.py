"""What quantising cost in accuracy and saved in bytes, per kind of tensor."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from tetrad.formats.weights import Nvfp4Weight

REPORT_NAME = "quantize_report.json"
_VERSION = 1
_ERROR_FIELDS = {"rms_error_sum", "rms_error_mean", "rms_error_max", "worst"}


@dataclass
class KindReport:
    """All tensors of one kind. `rms_error_*` are 0 for tensors that were kept as they are."""

    kind: str
    """Module name with numbers replaced by *, without the prefix of the layer."""
    quantized: bool
    count: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    rms_error_sum: float = field(default=0.0, repr=False)
    rms_error_max: float = 0.0
    worst: str = ""
    """The module with the largest error."""

    @property
    def rms_error_mean(self) -> float:
        """Mean over tensors of |dequantised - original| / |original| (Frobenius norms)."""
        return self.rms_error_sum / self.count if self.count else 0.0


@dataclass
class QuantizeReport:
    """Filled while quantising. `kinds` is keyed by the kind's name."""

    source: str
    include: list[str]
    exclude: list[str]
    kinds: dict[str, KindReport] = field(default_factory=dict)

    def keep(self, kind: str, nbytes: int) -> None:
        """Count a tensor that was copied as it is."""
        row = self._row(kind, quantized=False)
        row.count += 1
        row.bytes_before += nbytes
        row.bytes_after += nbytes

    def quantize(self, kind: str, module: str, matrix: Tensor, weight: Nvfp4Weight) -> None:
        """Count a quantised `matrix` and measure the relative error of `weight` against it."""
        row = self._row(kind, quantized=True)
        error = relative_rms_error(weight.dequantize(torch.float32), matrix.float())
        row.count += 1
        row.bytes_before += matrix.nbytes
        row.bytes_after += weight.nbytes
        row.rms_error_sum += error
        if error >= row.rms_error_max:
            row.rms_error_max, row.worst = error, module

    @property
    def bytes_before(self) -> int:
        """Bytes of all tensors of the source."""
        return sum(row.bytes_before for row in self.kinds.values())

    @property
    def bytes_after(self) -> int:
        """Bytes of all tensors written."""
        return sum(row.bytes_after for row in self.kinds.values())

    def to_json(self) -> str:
        """The report as an indented JSON object."""
        rows = []
        for row in self.kinds.values():
            values = {**asdict(row), "rms_error_mean": row.rms_error_mean}
            left_out = {"rms_error_sum"} if row.quantized else _ERROR_FIELDS
            rows.append({key: value for key, value in values.items() if key not in left_out})
        value = {
            "version": _VERSION,
            "source": self.source,
            "format": "nvfp4",
            "include": self.include,
            "exclude": self.exclude,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "kinds": rows,
        }
        return json.dumps(value, indent=2) + "\n"

    def _row(self, kind: str, *, quantized: bool) -> KindReport:
        key = f"{kind} ({'nvfp4' if quantized else 'kept'})"
        return self.kinds.setdefault(key, KindReport(kind, quantized))


def kind_of(name: str) -> str:
    """'model.layers.7.mlp.experts.12.gate_proj.weight' → 'mlp.experts.*.gate_proj'."""
    short = re.sub(r"^model\.(layers\.\d+\.)?", "", name.removesuffix(".weight"))
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", short)


def relative_rms_error(approximate: Tensor, exact: Tensor) -> float:
    """|approximate - exact| / |exact| in Frobenius norms; 0 when both are zero."""
    norm = float(torch.linalg.vector_norm(exact))
    return float(torch.linalg.vector_norm(approximate - exact)) / norm if norm else 0.0
