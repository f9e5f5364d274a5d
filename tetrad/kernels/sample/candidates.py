"""Sampling on a CPU, row by row: only the best few tokens are put in order, and none where no rule
asks for an order. A row whose rules keep more than these few is left to the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.core.hardware import DeviceSnapshot
from tetrad.kernels.backend import Backend
from tetrad.kernels.sample import reference

CANDIDATES = 256


def why_not(device: DeviceSnapshot) -> str | None:
    """It asks for numbers between its steps."""
    return None if device.kind == "cpu" else "waits for the device several times a row; a CPU can"


def run(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    uniform: Tensor | None = None,
) -> Tensor:
    """As the reference has it; sums are in float64."""
    ids = logits.argmax(dim=-1)
    if temperature is None:
        return ids
    assert top_k is not None
    assert top_p is not None
    assert min_p is not None
    assert uniform is not None
    rules = zip(*(rule.tolist() for rule in (temperature, top_k, top_p, min_p)), strict=True)
    for row, (heat, count, share, least) in enumerate(rules):
        if heat == 0:
            continue
        if (count <= 0 or count >= logits.shape[1]) and share >= 1 and least <= 0:
            ids[row] = _of_all(logits[row], heat, uniform[row])
            continue
        found = _of_best(logits[row], heat, count, share, least, uniform[row])
        if found is None:
            one = slice(row, row + 1)
            found = reference.run(
                logits[one], temperature[one], top_k[one], top_p[one], min_p[one], uniform[one]
            )
        ids[row] = found
    return ids


def _of_all(logits: Tensor, heat: float, uniform: Tensor) -> Tensor:
    """A token of a row [V] that no rule cuts."""
    running = (logits.double() / heat).softmax(dim=-1).cumsum(dim=-1)
    found = torch.searchsorted(running, uniform.double() * running[-1], right=True)
    # Where rounding ran past the end: the last token that has a share.
    return found.minimum(torch.searchsorted(running, running[-1]))


def _of_best(
    logits: Tensor, heat: float, count: int, share: float, least: float, uniform: Tensor
) -> Tensor | None:
    """A token of a row [V] under its rules; None if they may keep more than the best few."""
    best, ids = logits.topk(min(CANDIDATES, len(logits)))
    if count > len(ids):
        return None
    ids, order = ids.sort()
    best, order = best[order].sort(descending=True, stable=True)
    ids = ids[order]
    weights = ((best.double() - best[0]) / heat).exp()
    if count > 0:
        weights[count:] = 0
        total = weights.sum()
    else:
        total = ((logits.double() - best[0]) / heat).exp().sum()
    before = weights.cumsum(dim=0) - weights
    kept = (before < share * total) & (weights >= least * weights[0]) & (weights > 0)
    last = int(kept.sum()) - 1
    if len(ids) < len(logits) and bool(best[last] <= best[-1]):
        return None
    ids, order = ids[: last + 1].sort()
    running = weights[: last + 1][order].cumsum(dim=0)
    found = torch.searchsorted(running, uniform.double() * running[-1], right=True)
    return ids[found.clamp(max=last)]


BACKEND = Backend("candidates", run, why_not)
