"""Which device and how many threads the engine may use on this machine."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from tetrad.core.errors import UnsupportedError
from tetrad.kernels.host import usable_cores
from tetrad.layers.batch import ForwardBatch
from tetrad.layers.cache import KvCache
from tetrad.models.base import Model

MANY_CORES = 4
LARGE_STEP_BYTES = 256_000_000
"""Tokens of a step times bytes of the weights. On two cores two threads are slower than one for
Abacus (41 MB) and 1 token, a little faster for 8, and by half for one token of 427 MB."""


def resolve_device(wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device to run on. Raises UnsupportedError for a GPU that is not there."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            "--device cuda: torch sees no GPU here; --device cpu runs without one."
        )
    has_gpu = wanted != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", 0) if has_gpu else torch.device("cpu")


def use_sensible_threads() -> int:
    """Let torch use the physical cores that this process may use, and tell how many threads that
    is; OMP_NUM_THREADS overrides."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(sensible_threads(usable_cores()))
    return torch.get_num_threads()


def sensible_threads(num_cores: int) -> int:
    """All of few cores: the API process interrupts a step's threads for less than a core is worth.
    Of MANY_CORES or more, all but one."""
    return num_cores if num_cores < MANY_CORES else num_cores - 1


LEAST_BUSY = 0.5
"""Share of a step's time that the thread which launches it computes. When it is less, another
thread has no core to itself, and is waited for once in each of a layer's operations."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 32.0
"""How long all steps then have one thread, and how long at most if it happens again and again."""


class SpreadModel:
    """A model on a CPU: its large steps on all threads, its small ones on one.

    Threads meet after each of a layer's operations. In a step of few numbers that costs more than
    the other threads save, and where other work has a core it takes many times as long.
    """

    def __init__(
        self,
        model: Model,
        num_threads: int,
        clock: Callable[[], float] = time.monotonic,
        own_time: Callable[[], float] = time.thread_time,
    ) -> None:
        """`own_time`: seconds that the calling thread has computed."""
        self._model, self._num_threads = model, num_threads
        self._clock, self._own_time = clock, own_time
        self._alone_until = -math.inf
        self._pause_s = FIRST_PAUSE_S

    def __call__(self, batch: ForwardBatch, cache: KvCache) -> Tensor:
        """As the model itself. What comes after it, such as sampling, has the same threads."""
        began, computed = self._clock(), self._own_time()
        is_large = len(batch.token_ids) * self._model.weight_bytes >= LARGE_STEP_BYTES
        is_spread = is_large and began >= self._alone_until
        torch.set_num_threads(self._num_threads if is_spread else 1)
        logits = self._model(batch, cache)
        if is_spread:
            took_s = self._clock() - began
            self._judge(self._own_time() - computed >= LEAST_BUSY * took_s)
        return logits

    def _judge(self, has_cores: bool) -> None:
        if has_cores:
            self._pause_s = FIRST_PAUSE_S
        else:
            self._alone_until = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
