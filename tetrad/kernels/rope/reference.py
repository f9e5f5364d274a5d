"""Rotary embedding in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels.backend import Backend


def run(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """A pair is one complex number, and rotating it is one multiplication."""
    wide = x.float()
    if interleaved:
        real, imaginary = wide[..., 0::2], wide[..., 1::2]
    else:
        real, imaginary = wide.chunk(2, dim=-1)
    turn = torch.complex(cos, sin).unsqueeze(1)
    rotated = torch.view_as_real(torch.complex(real, imaginary) * turn)
    return (rotated if interleaved else rotated.transpose(-1, -2)).flatten(-2).to(x.dtype)


BACKEND = Backend("torch", run)
