"""Comparing results with what they should be. NaN never passes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far `actual` is from `expected`; all NaN when they cannot be compared."""

    relative_l2: float
    """|actual - expected| / |expected|, over all elements; absolute when expected is zero."""
    max_abs: float
    cosine: float
    is_exact: bool
    """Equal element by element, infinities at the same places included."""

    def passes(self, tolerance: float) -> bool:
        """Is the relative error within `tolerance`? False for NaN."""
        return self.relative_l2 <= tolerance


FAILED = Comparison(relative_l2=math.nan, max_abs=math.nan, cosine=math.nan, is_exact=False)


def compare(actual: Tensor, expected: Tensor) -> Comparison:
    """Compare in float64, where `expected` lies. Infinities (masked scores) must be at the same
    places."""
    if actual.shape != expected.shape:
        return FAILED
    ours, truth = (
        t.detach().to(expected.device, torch.float64).flatten() for t in (actual, expected)
    )
    infinite = truth.isinf()
    if not torch.equal(ours[infinite], truth[infinite]):
        return FAILED
    ours, truth = ours[~infinite], truth[~infinite]
    if not bool(ours.isfinite().all()) or truth.isnan().any():
        return FAILED
    difference = float(torch.linalg.vector_norm(ours - truth))
    size, ours_size = float(torch.linalg.vector_norm(truth)), float(torch.linalg.vector_norm(ours))
    product = size * ours_size
    return Comparison(
        relative_l2=difference / size if size else difference,
        max_abs=float((ours - truth).abs().max()) if len(truth) else 0.0,
        cosine=float(ours @ truth) / product if product else float(size == ours_size),
        is_exact=difference == 0.0,
    )
