"""The experts of one layer as the checkpoint stores them."""

from __future__ import annotations

from dataclasses import dataclass

from tetrad.formats.weights import HoldsTensors, Weight


@dataclass(frozen=True, eq=False)
class ExpertWeights(HoldsTensors):
    """Three stacks, each in its own format.

    Gate and up stay apart because nothing makes them agree: their global scales may differ, even
    their formats. A backend's `prepare` may join them in whatever layout it computes with.
    """

    gate: Weight
    """[E, F, D]"""
    up: Weight
    """[E, F, D]"""
    down: Weight
    """[E, D, F]"""
    num_routed: int | None = None
    """Experts that the tokens choose among, where other ranks hold some; None: these alone."""

    @property
    def num_experts(self) -> int:
        return self.gate.shape[0]
