"""What of this machine the engine may use: device and threads."""

from __future__ import annotations

import os
from typing import Literal

import torch

from tetrad.core.errors import UnsupportedError
from tetrad.kernels.host import usable_cores


def resolve_device(wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device to run on. Raises UnsupportedError for a GPU that is not there."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            "--device cuda: torch sees no GPU here; --device cpu runs without one."
        )
    has_gpu = wanted != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", 0) if has_gpu else torch.device("cpu")


def use_sensible_threads() -> None:
    """Give torch one thread for each physical core this process may use but one, which the API
    process needs; OMP_NUM_THREADS overrides. A second thread on two cores, asleep or spinning
    between the 280 products of a step, gained nothing beside other work on them."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() - 1))
