"""Grouped-query attention."""

from __future__ import annotations

from torch import Tensor

from tetrad.core.llama_arch import LlamaArch
from tetrad.layers.batch import ForwardBatch
from tetrad.layers.cache import KvCache
from tetrad.layers.linear import Linear, StackedLinears
from tetrad.layers.rope import Rotation
from tetrad.layers.source import WeightSource


class GqaAttention:
    """One layer's attention (GQA: Ainslie et al. 2023)."""

    def __init__(self, arch: LlamaArch, layer: int, source: WeightSource) -> None:
        gqa = arch.gqa
        self.arch, self.layer, self.ops = gqa, layer, source.ops
        rows = {"q_proj": gqa.query_width, "k_proj": gqa.key_width, "v_proj": gqa.key_width}
        self.qkv = StackedLinears(source, rows, arch.hidden)
        self.o = Linear(source, "o_proj", arch.hidden, gqa.query_width)

    def __call__(
        self, x: Tensor, batch: ForwardBatch, rotation: Rotation, cache: KvCache
    ) -> Tensor:
        """[T, D] to [T, D]. Writes the step's keys and values to `cache`."""
        pool = cache.keys_values[self.layer]
        queries, _ = self.ops.qkv(self.qkv(x), *rotation, batch.slots, pool)
        attended = self.ops.gqa(queries, pool, batch.ragged, self.arch.softmax_scale)
        return self.o(attended.flatten(1))
