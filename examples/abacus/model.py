"""Abacus in plain torch, for training and as an independent check of the engine.

The architecture is GLM-5's: latent attention over the keys a sparse indexer selects (attention.py),
a sigmoid router over small experts, one shared expert, a dense first layer, and one more layer
(MTP) that predicts the token after next. Module names are the checkpoint's tensor names.

All experts are computed for all tokens: they are tiny, and three large matrix products beat 96
small ones. Shapes: B rows, T positions, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from attention import Attention, Context, ModelConfig, RMSNorm, Rope, linear
from kernels import Kernels
from torch import Tensor, nn

SAMPLE_STRIDE = 4


# --- Feed-forward ---------------------------------------------------------------------------------


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, inner_dim: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(dim, inner_dim), linear(dim, inner_dim)
        self.down_proj = linear(inner_dim, dim)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:  # noqa: ARG002
        """Same shape as `x`; takes a context to stand in for `MoE`."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Chooses experts by biased scores and weighs them by unbiased ones."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        # Tokens per expert since the trainer last looked.
        self.register_buffer("loads", torch.zeros(config.n_routed_experts), persistent=False)

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        """Weights [B, T, E], zero for experts not chosen."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        biased = scores.detach() + self.e_score_correction_bias
        chosen = biased.topk(self.config.num_experts_per_tok, dim=-1).indices
        mask = torch.zeros_like(scores).scatter_(-1, chosen, 1.0)
        if self.training:
            self.loads += (mask if real is None else mask * real[..., None]).sum((0, 1))
        weights = scores * mask
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.config.routed_scaling_factor


class Experts(nn.Module):
    """All experts at once; `fake_quantise` rounds the weights as NVFP4 would."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        num, dim, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_proj = nn.Parameter(torch.empty(num, inner, dim))
        self.up_proj = nn.Parameter(torch.empty(num, inner, dim))
        self.down_proj = nn.Parameter(torch.empty(num, dim, inner))
        self.fake_quantise: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Sum of the chosen experts' outputs, by weight."""
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        if self.fake_quantise is not None:
            gate, up, down = self.fake_quantise(gate, up, down)
        inner = F.silu(F.linear(x, gate.flatten(0, 1))) * F.linear(x, up.flatten(0, 1))
        inner = inner.unflatten(-1, gate.shape[:2]) * weights[..., None].to(inner.dtype)
        return F.linear(inner.flatten(-2), down.transpose(0, 1).flatten(1))


class MoE(nn.Module):
    """Routed experts, and one that every token takes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate, self.experts = Router(config), Experts(config)
        self.shared_experts = MLP(config.hidden_size, config.moe_intermediate_size)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Same shape as `x`."""
        return self.experts(x, self.gate(x, context.real)) + self.shared_experts(x)


# --- The model ------------------------------------------------------------------------------------


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each on a residual."""

    def __init__(self, config: ModelConfig, has_indexer: bool, dense: bool) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(dim, eps), RMSNorm(dim, eps)
        self.self_attn = Attention(config, has_indexer)
        self.mlp = MLP(dim, config.intermediate_size) if dense else MoE(config)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Same shape as `x`."""
        x = x + self.self_attn(self.input_layernorm(x), context)
        return x + self.mlp(self.post_attention_layernorm(x), context)


class SharedHead(nn.Module):
    """The MTP layer's own norm before the common lm_head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class MtpLayer(DecoderLayer):
    """From h_t and the embedding of token t+1 to the hidden state that predicts token t+2."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, has_indexer=True, dense=False)
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(dim, eps), RMSNorm(dim, eps)
        self.eh_proj = linear(2 * dim, dim)
        self.shared_head = SharedHead(config)

    def draft(self, next_embeddings: Tensor, hidden: Tensor, context: Context) -> Tensor:
        """Embedding first, hidden second."""
        x = self.eh_proj(torch.cat((self.enorm(next_embeddings), self.hnorm(hidden)), -1))
        return self.shared_head.norm(self.forward(x, context))


class Backbone(nn.Module):
    """Everything under `model.` in the checkpoint; the MTP layer is the last of `layers`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers: list[nn.Module] = [
            DecoderLayer(config, kind == "full", dense=index < config.first_k_dense_replace)
            for index, kind in enumerate(config.indexer_types)
        ]
        self.layers = nn.ModuleList([*layers, MtpLayer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


@dataclass
class Output:
    """What one pass gives; `drafts[t]` predicts token t+2."""

    logits: Tensor
    context: Context
    drafts: Tensor | None = None
    draft_context: Context | None = None


class Abacus(nn.Module):
    """The whole model."""

    def __init__(self, config: ModelConfig, kernels: Kernels | None = None) -> None:
        super().__init__()
        self.config = config
        self.kernels = kernels or Kernels()
        self.model = Backbone(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        self.sparse = True
        # Training teaches the indexers at every fourth position, beginning here.
        self.register_buffer("sample_offset", torch.zeros((), dtype=torch.int64), persistent=False)

    def context(self, ids: Tensor, documents: Tensor | None) -> Context:
        """Who may see whom: earlier positions, of the same document if rows hold several."""
        config, num_tokens = self.config, ids.shape[1]
        theta = float(config.rope_parameters["rope_theta"])
        visible = torch.ones(1, num_tokens, num_tokens, dtype=torch.bool, device=ids.device).tril()
        real, sampled = None, None
        if documents is not None:
            visible = visible & (documents[:, :, None] == documents[:, None, :])
            real = documents >= 0
        if self.training:
            sampled = torch.arange(0, num_tokens, SAMPLE_STRIDE, device=ids.device)
            sampled = sampled + self.sample_offset
        rope = Rope.build(num_tokens, config.qk_rope_head_dim, theta, ids.device)
        return Context(rope, visible, real, sampled, config.index_topk, self.sparse, self.kernels)

    def forward(
        self, ids: Tensor, documents: Tensor | None = None, with_drafts: bool = False
    ) -> Output:
        """Logits for ids [B, T]; with drafts, also the MTP layer's (the last position's is void).

        `documents` numbers the conversations packed into each row, -1 for padding. Positions run
        through the row: RoPE only sees differences.
        """
        context = self.context(ids, documents)
        embeddings = self.model.embed_tokens(ids)
        hidden = embeddings
        *layers, mtp = self.model.layers
        for layer in layers:
            hidden = layer(hidden, context)
        hidden = self.model.norm(hidden)
        output = Output(self.lm_head(hidden), context)
        if with_drafts:
            output.draft_context = context.again()
            drafted = mtp.draft(embeddings.roll(-1, 1), hidden, output.draft_context)
            output.drafts = self.lm_head(drafted)
        return output

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Normal weights of std fan_in^-0.5, smaller where they write to the residual stream."""
        generator = torch.Generator().manual_seed(seed)
        depth_scale = (2 * len(self.model.layers)) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            std = 1.0 if "embed_tokens" in name else parameter.shape[-1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                std *= depth_scale
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
