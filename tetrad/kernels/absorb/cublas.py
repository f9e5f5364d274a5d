"""Absorbed queries by cuBLAS, with the rotation in a launch of its own."""

from __future__ import annotations

from torch import Tensor

from tetrad.kernels.backend import Backend
from tetrad.kernels.head_linear.cublas import multiply_to
from tetrad.kernels.rope.triton import rotate_to
from tetrad.kernels.triton_support import why_not


def run(queries: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Two launches and no copy: the product leaves room for the rotated columns behind it."""
    num_tokens, num_heads, columns = queries.shape
    _, width, rank = weight.shape
    absorbed = queries.new_empty(num_tokens, num_heads, rank + columns - width)
    multiply_to(absorbed[..., :rank], queries[..., :width], weight)
    rotate_to(absorbed[..., rank:], queries[..., width:], cos, sin, True)
    return absorbed


BACKEND = Backend("cublas", run, why_not)
