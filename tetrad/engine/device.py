"""What of this machine the engine may use: device and threads."""

from __future__ import annotations

import os
from typing import Literal

import torch

from tetrad.core.architectures import Arch
from tetrad.core.errors import UnsupportedError
from tetrad.core.llama_arch import LlamaArch
from tetrad.kernels.host import usable_cores


def resolve_device(wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device to run on. Raises UnsupportedError for a GPU that is not there."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            "--device cuda: torch sees no GPU here; --device cpu runs without one."
        )
    has_gpu = wanted != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", 0) if has_gpu else torch.device("cpu")


def use_sensible_threads(arch: Arch) -> None:
    """Give torch one thread for each physical core this process may use but one, which the API
    process needs; OMP_NUM_THREADS overrides.

    Of two cores a model without experts takes both: its products are large enough to share, and its
    threads sleep while they wait, so that the API process finds a core when it has something to do.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        cores = usable_cores()
        shares_both = cores == 2 and isinstance(arch, LlamaArch)
        torch.set_num_threads(cores if shares_both else max(1, cores - 1))
