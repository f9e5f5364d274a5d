"""Plan in, result out: the only place where the engine touches the model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tetrad.core.plan import StepPlan
from tetrad.engine.grammars import Masks
from tetrad.engine.graphs import DecodeGraphs, GraphPlan, Recorder
from tetrad.engine.inputs import NOTHING, as_read, build
from tetrad.engine.sampler import Draws, Sampler
from tetrad.kernels.select import OpSet
from tetrad.layers.batch import ForwardBatch
from tetrad.layers.cache import KvCache

ModelCall = Callable[[ForwardBatch, KvCache], Tensor]
"""A loaded model: logits [R, V] fp32 of a batch's `logit_rows`."""


class Runner:
    """Owns the model, its cache, the recorded decode steps and the sampler."""

    def __init__(self, model: ModelCall, cache: KvCache, ops: OpSet, device: torch.device) -> None:
        self.model = model
        self.cache = cache
        self.graphs: DecodeGraphs | None = None
        self._device = device
        self._sampler = Sampler(ops)
        self._nothing = self._sampled = NOTHING.to(device)
        """The tokens of the step launched last, on the device: see `as_read`."""

    def record_graphs(
        self, plan: GraphPlan, recorder: Recorder, say: Callable[[str], None]
    ) -> DecodeGraphs:
        """Record decode steps; those that fit a graph run from it from now on."""
        self.graphs = DecodeGraphs(
            lambda batch: self.model(batch, self.cache), plan, recorder, self._device
        )
        self.graphs.record(say)
        return self.graphs

    def renew_graphs(self) -> None:
        """Record again what is recorded, after a change of backends."""
        if self.graphs is not None:
            self.graphs.renew()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, masks: Callable[[], Masks | None] | None = None) -> Draws:
        """Start one step; nothing here waits for the device, but `masks` may, which is called when
        the model is launched. Rows whose logits are not finite are marked, not raised."""
        logits = self._logits(plan)
        draws = self._sampler(logits, plan, masks)
        self._sampled = as_read(self._nothing, draws.ids)
        return draws

    @torch.inference_mode()
    def compute(self, plan: StepPlan) -> Tensor:
        """Logits [R, V] of a step whose tokens are all known, without a graph."""
        return self.model(build(plan, self._device), self.cache)

    def _logits(self, plan: StepPlan) -> Tensor:
        if self.graphs is not None:
            logits = self.graphs.run(plan, self._sampled)
            if logits is not None:
                return logits
        return self.model(build(plan, self._device, self._sampled), self.cache)
