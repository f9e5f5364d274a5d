"""One layer of a Llama-like model, and its end."""

from __future__ import annotations

from torch import Tensor

from tetrad.core.llama_arch import LlamaArch
from tetrad.formats.weights import DenseWeight
from tetrad.layers.batch import ForwardBatch
from tetrad.layers.cache import KvCache
from tetrad.layers.gqa import GqaAttention
from tetrad.layers.linear import Linear, StackedLinears
from tetrad.layers.norm import Hidden, RmsNorm, Sum
from tetrad.layers.rope import Rotation
from tetrad.layers.source import WeightSource


class LlamaLayer:
    """h += attention(norm(h)); h += mlp(norm(h)). The next norm adds."""

    def __init__(self, arch: LlamaArch, layer: int, source: WeightSource) -> None:
        self.attention_norm = RmsNorm(source, "input_layernorm", arch.hidden, arch.norm_eps)
        self.attention = GqaAttention(arch, layer, source.at("self_attn"))
        self.mlp_norm = RmsNorm(source, "post_attention_layernorm", arch.hidden, arch.norm_eps)
        mlp = source.at("mlp")
        rows = {"gate_proj": arch.intermediate, "up_proj": arch.intermediate}
        self.gate_up = StackedLinears(mlp, rows, arch.hidden)
        self.down = Linear(mlp, "down_proj", arch.hidden, arch.intermediate)
        self.activation = source.ops.activation

    def __call__(
        self, hidden: Hidden, batch: ForwardBatch, rotation: Rotation, cache: KvCache
    ) -> Sum:
        """[T, D] to [T, D]."""
        before, normed = self.attention_norm.of(hidden)
        attended = self.attention(normed, batch, rotation, cache)
        after, normed = self.mlp_norm.of(Sum(attended, before))
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        return Sum(self.down(self.activation(gate, up)), after)


class LlamaHead:
    """Norm and logits; of a tied model by the embedding's own table."""

    def __init__(self, arch: LlamaArch, source: WeightSource, table: Tensor) -> None:
        self.norm = RmsNorm(source.at("model"), "norm", arch.hidden, arch.norm_eps)
        self.op = source.ops.linear
        name = "model.embed_tokens" if arch.is_tied else "lm_head"
        stored = source.stored(name, arch.vocab, arch.hidden)
        if arch.is_tied and isinstance(stored, DenseWeight):
            stored = DenseWeight(table)  # not a second time in memory
        self.weight = source.prepared([stored], self.op)

    def __call__(self, hidden: Hidden, logit_rows: Tensor) -> Tensor:
        """[T, D] to fp32 logits [R, V]."""
        _, normed = self.norm.of(hidden[logit_rows])
        logits: Tensor = self.op(normed, self.weight)
        return logits.float()
