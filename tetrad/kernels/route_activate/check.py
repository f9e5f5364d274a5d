"""Inputs beside each other in one matrix, and the answers of the two ops it stands for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tetrad.kernels.activation import check as activation
from tetrad.kernels.backend import Check
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw
from tetrad.kernels.route import check as route


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Logits with ties, as those of `route`; gate and up are Gaussian."""
    routing = route.inputs(case, dtype, device)
    draw = Draw.of(case, dtype, device)
    gate_up = draw.normal(case["T"], 2 * case["F"], dtype=torch.float32, std=3.0)
    joined = torch.cat([routing.pop("logits"), gate_up], dim=1)
    into = {name: routing.pop(name) for name in ("weights_into", "ids_into")}
    return {"joined": joined, **routing, "dtype": dtype, **into}


def expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """In float64."""
    num_experts = len(inputs["bias"])
    gate, up = inputs["joined"][:, num_experts:].chunk(2, dim=-1)
    routing = inputs | {"logits": inputs["joined"][:, :num_experts]}
    return *route.expected(routing), *activation.expected({"gate": gate, "up": up})


CHECK = Check(inputs, expected, outputs=tuple)
