"""One rank's part of a stored weight, cut without decoding it."""

from __future__ import annotations

from typing import Literal

from tetrad.core.errors import CheckpointError
from tetrad.formats.weights import FP8_BLOCK, NVFP4_BLOCK, Fp8BlockWeight, Nvfp4Weight, Weight

Axis = Literal["out", "in"]
_PLACE = {"out": -2, "in": -1}


def share(weight: Weight, axis: Axis, part: int, num_parts: int) -> Weight:
    """Part `part` of `num_parts` equal ones of [..., out, in] along an axis.

    Raises CheckpointError where scales cannot be cut there: NVFP4 shares one among 16 columns, FP8
    in blocks among 128 rows and columns.
    """
    if num_parts == 1:
        return weight
    size = weight.shape[_PLACE[axis]]
    step = _step(weight, axis)
    if size % (num_parts * step):
        raise CheckpointError(
            f"A {weight.format_name} weight with {size} {'rows' if axis == 'out' else 'columns'} "
            f"cannot be cut into {num_parts} parts, because {step} of them share a scale."
        )
    cut = {
        name: tensor.chunk(num_parts, _PLACE[axis])[part].contiguous()
        if tensor.dim() == len(weight.shape)
        else tensor
        for name, tensor in weight.tensors().items()
    }
    return type(weight)(**cut)


def _step(weight: Weight, axis: Axis) -> int:
    """Numbers along the axis that share a scale."""
    if isinstance(weight, Fp8BlockWeight):
        return FP8_BLOCK
    return NVFP4_BLOCK if isinstance(weight, Nvfp4Weight) and axis == "in" else 1
