"""One decoder layer."""

from __future__ import annotations

from torch import Tensor

from tetrad.core.arch import ModelArch
from tetrad.layers.batch import ForwardBatch
from tetrad.layers.cache import KvCache
from tetrad.layers.mla import MlaAttention
from tetrad.layers.mlp import Mlp
from tetrad.layers.moe import Moe
from tetrad.layers.moe_ranks import moe_of
from tetrad.layers.norm import Hidden, RmsNorm, Sum
from tetrad.layers.rope import Rotation
from tetrad.layers.source import WeightSource


class DecoderLayer:
    """h += attention(norm(h)); h += mlp(norm(h)). The first layers have a dense MLP."""

    def __init__(self, arch: ModelArch, layer: int, source: WeightSource) -> None:
        self.attention_norm = RmsNorm(source, "input_layernorm", arch.hidden, arch.norm_eps)
        self.attention = MlaAttention(arch, layer, source.at("self_attn"))
        self.mlp_norm = RmsNorm(source, "post_attention_layernorm", arch.hidden, arch.norm_eps)
        self.mlp: Mlp | Moe
        if layer < arch.moe.first_dense_layers:
            self.mlp = Mlp(source.at("mlp"), arch.hidden, arch.dense_intermediate)
        else:
            self.mlp = moe_of(arch, source.at("mlp"))
        self.place_for = self.mlp.place_for
        self.others = source.others

    def __call__(
        self,
        hidden: Hidden,
        batch: ForwardBatch,
        rotation: Rotation,
        cache: KvCache,
        selected: Tensor | None = None,
    ) -> tuple[Hidden, Tensor | None]:
        """hidden [T, D] to [T, D], and the key choice that holds after this layer."""
        before, normed = self.attention_norm.of(hidden)
        attended, selected = self.attention(normed, batch, rotation, cache, selected)
        place = self.place_for(len(before))
        after, normed = self.mlp_norm.of(Sum(self.others.all_reduce(attended), before), place)
        return self.mlp(normed, after, batch.is_padding), selected
