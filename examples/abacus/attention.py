"""Sparse latent attention: an indexer points at keys, attention looks only there.

In training the indexer's teacher is attention itself: where the heads of its own layer, and of the
layers that share its choice, would look if they could see every earlier position. Shapes: B rows,
T positions that ask, S positions that answer, H heads.
"""

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from kernels import NEVER, Kernels, divergence, head_sum, index_scores
from torch import Tensor, nn

INDEXER_NORM_EPS = 1e-6


@dataclass(frozen=True)
class ModelConfig:
    """The part of config.json that shapes the computation; names are Hugging Face's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_types: list[str]
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    rms_norm_eps: float
    rope_parameters: dict[str, float | str]

    @classmethod
    def load(cls, folder: Path) -> "ModelConfig":
        """From the folder's config.json."""
        values = json.loads((folder / "config.json").read_text())
        return cls(**{f.name: values[f.name] for f in fields(cls)})

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key in attention."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


@dataclass(frozen=True)
class Rope:
    """Cosines and sines of every position, [T, dim / 2]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def build(cls, num_positions: int, dim: int, theta: float, device: torch.device) -> "Rope":
        """Angles position * theta^(-2i/dim)."""
        inverse = theta ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
        angles = torch.arange(num_positions, device=device, dtype=torch.float32)[:, None] * inverse
        return cls(angles.cos(), angles.sin())

    def rotate(self, x: Tensor) -> Tensor:
        """Turn the interleaved pairs (0,1), (2,3), … of x [..., T, dim]."""
        even, odd = x[..., 0::2].float(), x[..., 1::2].float()
        turned = (even * self.cos - odd * self.sin, even * self.sin + odd * self.cos)
        return torch.stack(turned, -1).flatten(-2).to(x.dtype)


def linear(in_dim: int, out_dim: int) -> nn.Linear:
    """A projection; GLM has no biases."""
    return nn.Linear(in_dim, out_dim, bias=False)


# --- Selecting keys -------------------------------------------------------------------------------


@dataclass
class Selection:
    """What one indexer chose, for its own layer and the layers that share it."""

    index: tuple[Tensor, Tensor, Tensor]  # queries, keys and head weights
    allowed: Tensor  # [B or 1, 1, T, S]
    attended: list[Tensor] = field(default_factory=list)  # each [B, sampled T, S]


@dataclass
class Context:
    """What one forward pass carries from layer to layer."""

    rope: Rope
    visible: Tensor  # [B or 1, T, S]: earlier positions of the same conversation
    real: Tensor | None  # [B, T]: not padding; None when nothing is
    sampled: Tensor | None  # positions whose attention the indexers imitate; None: do not teach
    num_keys: int
    sparse: bool
    kernels: Kernels
    selections: list[Selection] = field(default_factory=list)

    @property
    def current(self) -> Selection:
        """What the last indexer chose."""
        return self.selections[-1]

    def select(self, index: tuple[Tensor, Tensor, Tensor]) -> None:
        """Begin a new selection."""
        allowed = self.visible
        if self.sparse:
            with torch.no_grad():
                scores = index_scores(*index).masked_fill(~self.visible, NEVER)
                allowed = allowed & self.kernels.top_positions(scores, self.num_keys)
        self.selections.append(Selection(index, allowed[:, None]))

    def observe(self, q: Tensor, k: Tensor) -> None:
        """Note where attention looks, for the index loss."""
        if self.sampled is not None:
            visible = self.visible[:, None, self.sampled]
            seen = head_sum(q.detach()[:, :, self.sampled], k.detach(), visible)
            self.current.attended.append(seen)

    def index_losses(self) -> list[Tensor]:
        """How far each indexer is from where its layers look, per sampled position."""
        assert self.sampled is not None
        losses = []
        for choice in self.selections:
            q, k, weights = choice.index
            scores = index_scores(q[:, :, self.sampled], k, weights[:, :, self.sampled])
            target = torch.stack(choice.attended).sum(0)
            losses.append(divergence(target, scores, self.visible[:, self.sampled]))
        return losses

    def again(self) -> "Context":
        """The same positions, with no selection yet."""
        return replace(self, selections=[])


class Indexer(nn.Module):
    """Scores every earlier position for relevance, cheaply."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.rope_dim = config.qk_rope_head_dim
        self.wq_b = linear(config.q_lora_rank, self.num_heads * self.head_dim)
        self.wk = linear(config.hidden_size, self.head_dim)
        self.k_norm = nn.LayerNorm(self.head_dim, eps=INDEXER_NORM_EPS)
        self.weights_proj = linear(config.hidden_size, self.num_heads)

    def rotate(self, x: Tensor, rope: Rope) -> Tensor:
        """RoPE on the first dimensions of a head."""
        return torch.cat((rope.rotate(x[..., : self.rope_dim]), x[..., self.rope_dim :]), -1)

    def forward(self, x: Tensor, q_latent: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, T, d], keys [B, S, d], head weights [B, H, T] with all scales in them."""
        q = self.wq_b(q_latent).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.wk(x)).to(q.dtype)
        weights = self.weights_proj(x).transpose(1, 2)
        scale = self.num_heads**-0.5 * self.head_dim**-0.5
        return self.rotate(q, rope), self.rotate(k, rope), weights * scale


class Attention(nn.Module):
    """Multi-head latent attention. Only layers with an indexer of their own have one."""

    def __init__(self, config: ModelConfig, has_indexer: bool) -> None:
        super().__init__()
        self.config = config
        num_heads, eps = config.num_attention_heads, config.rms_norm_eps
        self.q_a_proj = linear(config.hidden_size, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps)
        self.q_b_proj = linear(config.q_lora_rank, num_heads * config.qk_head_dim)
        kv_dim = config.kv_lora_rank + config.qk_rope_head_dim
        self.kv_a_proj_with_mqa = linear(config.hidden_size, kv_dim)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, eps)
        kv_head_dim = config.qk_nope_head_dim + config.v_head_dim
        self.kv_b_proj = linear(config.kv_lora_rank, num_heads * kv_head_dim)
        self.o_proj = linear(num_heads * config.v_head_dim, config.hidden_size)
        self.indexer = Indexer(config) if has_indexer else None

    def queries(self, q_latent: Tensor, rope: Rope) -> Tensor:
        """[B, H, T, nope + rope], scaled."""
        config = self.config
        q = self.q_b_proj(q_latent).unflatten(-1, (config.num_attention_heads, -1)).transpose(1, 2)
        nope, turning = q.split((config.qk_nope_head_dim, config.qk_rope_head_dim), -1)
        return torch.cat((nope, rope.rotate(turning)), -1) * config.qk_head_dim**-0.5

    def keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """[B, H, S, nope + rope] and [B, H, S, v]; the rotated part is one for all heads."""
        config = self.config
        latent, turning = self.kv_a_proj_with_mqa(x).split(
            (config.kv_lora_rank, config.qk_rope_head_dim), -1
        )
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        kv = kv.unflatten(-1, (config.num_attention_heads, -1)).transpose(1, 2)
        nope, values = kv.split((config.qk_nope_head_dim, config.v_head_dim), -1)
        shared = rope.rotate(turning)[:, None].expand(*nope.shape[:-1], -1)
        return torch.cat((nope, shared), -1), values

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Attend where this layer's indexer, or the last one before it, points."""
        rope = context.rope
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        if self.indexer is not None:
            # The indexer learns from its own loss alone and teaches the model nothing.
            context.select(self.indexer(x.detach(), q_latent.detach(), rope))
        q, (k, v) = self.queries(q_latent, rope), self.keys_values(x, rope)
        context.observe(q, k)
        out = context.kernels.attend(q, k, v, context.current.allowed)
        return self.o_proj(out.transpose(1, 2).flatten(2))
