"""The two ends of a rank's layers: token ids or what a stage hands on, and logits or the same."""

from __future__ import annotations

from torch import Tensor

from tetrad.core.arch import ModelArch
from tetrad.layers.embedding import Embedding
from tetrad.layers.norm import Hidden, RmsNorm, formed
from tetrad.layers.source import WeightSource


class Received:
    """A later stage's beginning."""

    def __init__(self, source: WeightSource) -> None:
        self.others = source.others

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] to [T, D], which the stage before has computed of them."""
        return self.others.receive(len(token_ids))


class OutputHead:
    """The last stage's end: norm and logits."""

    def __init__(self, arch: ModelArch, source: WeightSource) -> None:
        self.others = source.others
        self.norm = RmsNorm(source.at("model"), "norm", arch.hidden, arch.norm_eps)
        stored = source.stored("lm_head", arch.vocab // self.others.ranks.tp, arch.hidden)
        # Where the product comes in fp32, no pass over all logits is needed to make it that.
        self.product = source.ops.router if source.can_join([stored]) else source.ops.linear
        self.weight = source.prepared([stored], self.product)

    def __call__(self, hidden: Hidden, logit_rows: Tensor) -> Tensor:
        """[T, D] to fp32 logits [R, V]."""
        _, normed = self.norm.of(hidden[logit_rows])
        rows = self.others.gather_rows(normed)
        return self.others.join_vocab(self.product(rows, self.weight)).float()


class Handover:
    """An earlier stage's end."""

    def __init__(self, source: WeightSource) -> None:
        self.others = source.others

    def __call__(self, hidden: Hidden, _logit_rows: Tensor) -> Tensor:
        """[T, D], as it was handed on."""
        rows = formed(hidden)
        self.others.send(rows)
        return rows


def beginning_of(arch: ModelArch, source: WeightSource) -> Embedding | Received:
    """Of a model, or of the rank's stage."""
    if source.others.ranks.is_first_stage:
        return Embedding(source.at("model"), "embed_tokens", arch.vocab, arch.hidden)
    return Received(source)


def end_of(arch: ModelArch, source: WeightSource) -> OutputHead | Handover:
    """Of a model, or of the rank's stage."""
    return OutputHead(arch, source) if source.others.ranks.is_last_stage else Handover(source)
