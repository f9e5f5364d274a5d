"""The shapes of a Llama-like model: grouped-query attention and a dense gated MLP in every layer.

Beside the axis letters of `core/arch.py`: H query heads, G heads of keys and values, W numbers a
head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from tetrad.core.arch import Llama3Arch, Reader, RopeArch, eos_ids
from tetrad.core.errors import CheckpointError

MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class GqaArch:
    """Grouped-query attention: `num_heads / num_kv_heads` query heads share one key and value."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def softmax_scale(self) -> float:
        """Multiplies query . key."""
        return float(self.head_dim**-0.5)

    @property
    def query_width(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LlamaArch:
    """Everything about a model's shape that the house needs."""

    num_layers: int
    hidden: int
    vocab: int
    intermediate: int
    norm_eps: float
    max_position: int
    rope: RopeArch
    gqa: GqaArch
    is_tied: bool
    """Is the output matrix the embedding?"""
    eos_ids: tuple[int, ...]
    model_type: str = "llama"
    num_mtp_layers: int = 0
    first_layer: int = 0

    def __post_init__(self) -> None:
        """Raises CheckpointError for shapes that no such model has."""
        gqa = self.gqa
        sizes = (self.num_layers, self.hidden, self.vocab, self.intermediate, self.max_position)
        if min(*sizes, gqa.num_heads, gqa.num_kv_heads, gqa.head_dim) < 1:
            raise CheckpointError("A size of the model's shape is 0; each must be at least 1.")
        if self.num_layers > MOST_LAYERS:
            raise CheckpointError(f"The model claims {self.num_layers} layers; none has so many.")
        for name, value in (
            ("epsilon of its norms", self.norm_eps),
            ("rotary base", self.rope.theta),
        ):
            if not (math.isfinite(value) and value > 0):
                raise CheckpointError(f"The model's {name} is {value}; it must be above 0.")
        if gqa.num_heads % gqa.num_kv_heads:
            raise CheckpointError(
                f"{gqa.num_heads} query heads cannot share {gqa.num_kv_heads} heads of keys evenly."
            )
        if gqa.head_dim % 2:
            raise CheckpointError(f"Heads of {gqa.head_dim} numbers do not form pairs to rotate.")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LlamaArch:
        """Build from a parsed config.json of LlamaForCausalLM. Raises CheckpointError."""
        read = Reader(config)
        for bias in ("attention_bias", "mlp_bias"):
            if config.get(bias):
                raise CheckpointError(f"config.json: {bias} is not supported; false is.")
        if (activation := config.get("hidden_act", "silu")) != "silu":
            raise CheckpointError(f"hidden_act {activation!r} is not supported; 'silu' is.")
        hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
        head_dim = read.integer("head_dim", hidden // max(heads, 1))
        max_position = read.integer("max_position_embeddings")
        return cls(
            num_layers=read.integer("num_hidden_layers"),
            hidden=hidden,
            vocab=read.integer("vocab_size"),
            intermediate=read.integer("intermediate_size"),
            norm_eps=read.number("rms_norm_eps"),
            max_position=max_position,
            rope=_rope(config, head_dim, max_position),
            gqa=GqaArch(heads, read.integer("num_key_value_heads", heads), head_dim),
            is_tied=bool(config.get("tie_word_embeddings", False)),
            eos_ids=eos_ids(read),
        )

    def first_layers(self, num_layers: int | None) -> LlamaArch:
        """The same model with its first `num_layers` only; None, or more than it has: all."""
        if num_layers is None or num_layers >= self.num_layers:
            return self
        return replace(self, num_layers=num_layers)


def _rope(config: dict[str, Any], head_dim: int, max_position: int) -> RopeArch:
    params = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = params.get("rope_theta", config.get("rope_theta", 10_000.0))
    kind = params.get("rope_type", params.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise CheckpointError(f"rope type {kind!r} is not supported; 'default' and 'llama3' are.")
    if kind == "default":
        return RopeArch(float(theta), head_dim, max_position)
    try:
        bent = Llama3Arch(
            factor=float(params["factor"]),
            low_freq_factor=float(params["low_freq_factor"]),
            high_freq_factor=float(params["high_freq_factor"]),
            original_max_position=int(params["original_max_position_embeddings"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: rope type 'llama3' lacks {error}.") from None
    return RopeArch(float(theta), head_dim, max_position, llama3=bent)
