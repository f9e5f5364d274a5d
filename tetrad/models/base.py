"""What all models have in common: what the engine may ask of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from tetrad.core.architectures import Arch
from tetrad.layers.batch import ForwardBatch
from tetrad.layers.cache import KvCache
from tetrad.layers.norm import Hidden
from tetrad.layers.source import WeightSource


class Model(ABC):
    """A loaded decoder: embedding, L layers, norm and head. Calling it computes one step."""

    arch: Arch
    layers: list[Any]
    """Called one after the other."""
    output: Callable[[Hidden, Tensor], Tensor]
    """Hidden states [T, D] and the wanted rows to their logits."""

    def __init__(self, source: WeightSource) -> None:
        self._ledger = source.ledger
        self.checkpoint_notes: tuple[str, ...] = ()
        """Sentences a person should see, such as where a checkpoint contradicts its metadata."""
        self.read_gb_per_s: float | None = None
        """How fast its files were read; None where weights were drawn."""

    @torch.inference_mode()
    def __call__(self, batch: ForwardBatch, cache: KvCache) -> Tensor:
        """Compute a step: write its keys to `cache`, return fp32 logits [R, V]; those of a
        pipeline's stage that is not the last are its hidden states."""
        return self.output(self.forward(batch, cache), batch.logit_rows)

    @abstractmethod
    def forward(self, batch: ForwardBatch, cache: KvCache) -> Hidden:
        """Hidden states [T, D] before the final norm; writes the step's keys to `cache`."""

    @property
    def weight_bytes(self) -> int:
        """Bytes all weights take on the device."""
        return sum(total.memory_bytes for total in self._ledger.totals.values())

    @property
    def weight_report(self) -> dict[str, dict[str, Any]]:
        """Stored format → num_tensors, stored_bytes, memory_bytes."""
        return {name: asdict(total) for name, total in sorted(self._ledger.totals.items())}
