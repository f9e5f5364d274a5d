"""Decode steps captured as CUDA graphs, so that the host launches a step with one call.

A graph is bound to a number of rows and to its tensors, so a step is padded to the next captured
size and copied into `StaticInputs`. There are two sets: *short* graphs, in which no sequence is
longer than what attention reads anyway, and *sparse* graphs, which select keys first. Steps that
are not decodes, or do not fit, run without graphs.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from tetrad.core.plan import StepPlan
from tetrad.engine.blocks import pages_for
from tetrad.engine.inputs import StaticInputs
from tetrad.layers.batch import ForwardBatch

_log = logging.getLogger(__name__)

Kind = Literal["short", "sparse"]
STEPS = ((4, 1), (8, 4), (256, 8), (512, 16), (1024, 32))
"""(size, distance of the sizes up to it) of the usual sizes; beyond the last 64."""


class CannotRecordError(Exception):
    """What stands in the way, as a sentence."""


class Recorder(Protocol):
    """Records work of the device: `engine.cuda_graph.CudaRecorder`, or a fake in tests."""

    def record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """What runs `step` again, and the tensor that then holds its result. Raises
        CannotRecordError, or torch.OutOfMemoryError."""
        ...

    def free_bytes(self) -> int:
        """Memory the device has left."""
        ...


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """What to record."""

    sizes: tuple[int, ...]
    """Rows of a step, rising."""
    short_tokens: int
    """Longest context of the short set."""
    context_tokens: int
    """Longest context of all."""
    scratch_page: int
    """A page that no sequence gets: padding is written there."""
    reserved_bytes: int = 0
    """Memory to leave for steps without a graph."""

    @property
    def limits(self) -> dict[Kind, int]:
        """Set → its longest context."""
        limits: dict[Kind, int] = {"short": min(self.short_tokens, self.context_tokens)}
        if self.context_tokens > self.short_tokens:
            limits["sparse"] = self.context_tokens
        return limits


@dataclass(frozen=True)
class Recorded:
    """One graph."""

    inputs: StaticInputs
    replay: Callable[[], None]
    logits: Tensor


def usual_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 8, 16, ... with growing distances, up to and with `most`."""
    sizes = {most}
    start = 0
    for end, distance in (*STEPS, (max(most, STEPS[-1][0]), 64)):
        sizes.update(range(start + distance, end + 1, distance))
        start = end
    return tuple(sorted(size for size in sizes if size <= most))


def thinned(sizes: Sequence[int], count: int) -> list[int]:
    """`count` of the rising `sizes`, evenly spread from the smallest to the largest; of one the
    smallest."""
    if count >= len(sizes):
        return list(sizes)
    if count < 2:
        return list(sizes[: max(0, count)])
    return [sizes[i * (len(sizes) - 1) // (count - 1)] for i in range(count)]


def _compute(model: Callable[[ForwardBatch], Tensor], inputs: StaticInputs) -> Tensor:
    return model(inputs.batch())


class DecodeGraphs:
    """Owns the graphs. `model` computes a batch's logits [R, V]."""

    def __init__(
        self,
        model: Callable[[ForwardBatch], Tensor],
        plan: GraphPlan,
        recorder: Recorder,
        device: torch.device,
    ) -> None:
        self._model = model
        self._plan = plan
        self._recorder = recorder
        self._device = device
        self._graphs: dict[Kind, dict[int, Recorded]] = {kind: {} for kind in plan.limits}
        self._told: set[str] = set()
        self.num_bytes = 0
        """Memory that recording took."""

    @property
    def sizes(self) -> dict[str, list[int]]:
        """Set → sizes that are recorded."""
        return {kind: sorted(graphs) for kind, graphs in self._graphs.items()}

    def record(self, say: Callable[[str], None]) -> None:
        """Record all, the largest first, so that the others find their memory there. What each of
        them costs on top the second size shows; the rest is thinned to what fits."""
        at_first = self._recorder.free_bytes()
        tables = {
            kind: torch.zeros(
                self._plan.sizes[-1], pages_for(limit), dtype=torch.int32, device=self._device
            )
            for kind, limit in self._plan.limits.items()
        }
        left, is_measured = list(self._plan.sizes), False
        while left:
            before = self._recorder.free_bytes()
            if not self._record_size(size := left.pop(), tables):
                break
            free_bytes = self._recorder.free_bytes()
            done = len(self._graphs["short"])
            if done == 2 and not is_measured and free_bytes < before:
                is_measured = True
                room = free_bytes - self._plan.reserved_bytes
                left = thinned(left, room // (before - free_bytes))
            say(f"recorded a decode step of {size}, {done} of {done + len(left)} sizes")
        self.num_bytes = at_first - self._recorder.free_bytes()

    def renew(self) -> None:
        """Record the same sizes again, as other kernels run from now on."""
        sizes = self.sizes["short"]
        self._graphs = {kind: {} for kind in self._graphs}
        self._plan = replace(self._plan, sizes=tuple(sizes))
        if sizes:
            self.record(_log.info)

    def run(self, plan: StepPlan, sampled: Tensor) -> Tensor | None:
        """Logits [R, V] of a step, valid until the next; None if it has to run without a graph.
        `sampled`: the tokens of the step before, see `inputs.as_read`."""
        graph = self._graph_for(plan)
        if graph is None:
            return None
        graph.inputs.fill(plan, sampled)
        graph.replay()
        return graph.logits[: plan.num_rows]

    def _graph_for(self, plan: StepPlan) -> Recorded | None:
        works, num_rows = plan.sequences, plan.num_rows
        if not all(len(work.token_ids) == 1 and work.sample for work in works):
            return None
        longest = int(plan.decodes.starts.max(initial=0)) + 1
        longest = max(longest, *(work.num_kv_tokens for work in works), 0)
        kind: Kind = "short" if longest <= self._plan.limits["short"] else "sparse"
        sizes = sorted(self._graphs[kind])
        place = bisect_left(sizes, num_rows)
        if place == len(sizes):
            if sizes:
                self._tell_once(f"Decode steps of more than {sizes[-1]} run without a graph.")
            return None
        return self._graphs[kind][sizes[place]]

    def _record_size(self, size: int, tables: dict[Kind, Tensor]) -> bool:
        """Both sets at one size. False, and no graph at all, if steps cannot be recorded."""
        try:
            for kind, limit in self._plan.limits.items():
                inputs = StaticInputs(tables[kind][:size], self._plan.scratch_page, limit)
                replay, logits = self._recorder.record(partial(_compute, self._model, inputs))
                self._graphs[kind][size] = Recorded(inputs, replay, logits)
        except CannotRecordError as error:
            self._tell_once(f"Decode steps run without CUDA graphs: {error}")
            for graphs in self._graphs.values():
                graphs.clear()
            return False
        except torch.OutOfMemoryError:
            self._tell_once(f"Decode steps of {size} run without a graph: memory ends there.")
            for graphs in self._graphs.values():
                graphs.pop(size, None)
        return True

    def _tell_once(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            _log.warning(sentence)
