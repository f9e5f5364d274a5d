"""Rotary embedding in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels.backend import Backend


def run(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """A pair is one complex number, and rotating it is one multiplication."""
    width = 2 * cos.shape[1]
    wide = x[..., :width].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if interleaved:
        pairs = wide.view(*wide.shape[:-1], -1, 2)
    else:
        pairs = wide.view(*wide.shape[:-1], 2, -1).transpose(-1, -2).contiguous()
    turn = torch.complex(cos, sin).unsqueeze(1)
    rotated = torch.view_as_real(torch.view_as_complex(pairs) * turn)
    rotated = (rotated if interleaved else rotated.transpose(-1, -2)).flatten(-2).to(x.dtype)
    return torch.cat([rotated, x[..., width:]], dim=-1)


BACKEND = Backend("torch", run)
