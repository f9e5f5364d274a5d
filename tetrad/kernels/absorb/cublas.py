"""Absorbed queries by cuBLAS, which writes each head's product where it belongs."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels.backend import Backend
from tetrad.kernels.rope.triton import rotate_to
from tetrad.kernels.triton_support import why_not


def run(queries: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Two launches and no copy: the product's leading dimension is a row of the result, so that the
    rotated columns find room behind it."""
    num_tokens, num_heads, columns = queries.shape
    _, width, rank = weight.shape
    absorbed = queries.new_empty(num_tokens, num_heads, rank + columns - width)
    heads = queries[..., :width].transpose(0, 1)
    torch.bmm(heads, weight, out=absorbed[..., :rank].transpose(0, 1))
    rotate_to(absorbed[..., rank:], queries[..., width:], cos, sin, True)
    return absorbed


BACKEND = Backend("cublas", run, why_not)
