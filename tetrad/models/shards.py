"""A checkpoint as one rank sees it: asked for the shapes of its share, it gives its share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tetrad.core.ranks import Ranks
from tetrad.formats.shares import Axis, share
from tetrad.formats.weights import Weight
from tetrad.layers.source import StoredWeights

Cut = tuple[Axis, int, int]
"""Axis, part, number of parts."""

_HEADS: dict[str, Axis] = {"q_b_proj": "out", "kv_b_proj": "out", "o_proj": "in"}
_COLUMNS: dict[str, Axis] = {"gate_proj": "out", "up_proj": "out", "down_proj": "in"}


@dataclass(frozen=True)
class RankWeights:
    """Shapes asked for are the rank's, those of the checkpoint the model's."""

    whole: StoredWeights
    ranks: Ranks

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Every rank has all of what is never quantised."""
        return self.whole.tensor(name, shape)

    def linear(self, module: str, shape: tuple[int, int]) -> Weight:
        """The rank's rows or columns."""
        cut = cut_of(module, self.ranks)
        return share(self.whole.linear(module, _whole(shape, cut)), *cut)

    def linears(self, modules: Sequence[str], shape: tuple[int, int]) -> Weight:
        """The same of several, stacked."""
        cut = cut_of(modules[0], self.ranks)
        return share(self.whole.linears(modules, _whole(shape, cut)), *cut)


def _whole(shape: tuple[int, int], cut: Cut) -> tuple[int, int]:
    """The model's shape, from the rank's."""
    out, width = shape
    axis, _, num_parts = cut
    return (out * num_parts, width) if axis == "out" else (out, width * num_parts)


def cut_of(module: str, ranks: Ranks) -> Cut:
    """How a module's weight lies over the ranks; in one part where each has all of it."""
    *above, name = module.split(".")
    if name == "lm_head":
        return "out", ranks.rank % ranks.tp, ranks.tp
    if name in _HEADS and above[-1] == "self_attn":
        return _HEADS[name], ranks.attn_part, ranks.attn_tp
    if name in _COLUMNS and "experts" in above:
        return _COLUMNS[name], ranks.expert_part, ranks.expert_tp
    if name in _COLUMNS:
        return _COLUMNS[name], ranks.attn_part, ranks.attn_tp
    return "out", 0, 1
