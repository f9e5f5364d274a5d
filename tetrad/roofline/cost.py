"""What a step of one rank must fetch and compute, op by op, from the ops' contracts.

Counted is what a step cannot do without: weights, and the keys it reads, once each, and the useful
floating-point operations. Activations are not counted: those of a decode step fit into a GPU's
cache, and fused kernels would not write them. So ops that only touch activations cost nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from tetrad.core.arch import MlaArch, ModelArch
from tetrad.core.keys import ACTIVATION, KeyFormat, index_bytes, latent_bytes, num_expanded
from tetrad.core.ranks import Ranks
from tetrad.kernels.absorb.contract import CONTRACT as ABSORB
from tetrad.kernels.contract import Case, Contract, case, num_keys, num_rows, ragged_pairs
from tetrad.kernels.experts.contract import CONTRACT as EXPERTS
from tetrad.kernels.head_linear.contract import CONTRACT as HEAD_LINEAR
from tetrad.kernels.index_score.contract import CONTRACT as INDEX_SCORE
from tetrad.kernels.linear.contract import CONTRACT as LINEAR
from tetrad.kernels.mla.contract import CONTRACT as MLA
from tetrad.kernels.router.contract import CONTRACT as ROUTER

Lens = tuple[tuple[int, int], ...]
"""(query_len, kv_len) of each sequence."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """A step in which every sequence computes as many tokens."""

    batch: int
    """Sequences of the whole deployment."""
    context: int
    """Keys that each holds, the new ones among them."""
    key_bytes: int = 2
    """Of one number in the cache, where keys have the activations' type."""
    query_len: int = 1
    """Tokens that each computes: one decodes, more are a chunk of a prompt."""
    keys: KeyFormat = ACTIVATION
    """How keys are cached."""

    def sequences(self, ranks: Ranks) -> int:
        """Those that a rank attends for."""
        return -(-self.batch // ranks.attn_dp)

    def rows(self, ranks: Ranks) -> int:
        """Tokens that a rank attends for."""
        return self.sequences(ranks) * self.query_len

    def lens(self, ranks: Ranks) -> Lens:
        """(query_len, kv_len) of each of a rank's sequences."""
        return ((self.query_len, self.context),) * self.sequences(ranks)


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of an op, and how many like it a step has."""

    part: str
    """Of the model: attention, indexer, dense, moe, head."""
    op: str
    """As the contract is named."""
    what: str
    """Which of the part's calls."""
    flops: float
    """Useful ones, of one call."""
    bytes: float
    """Weights and keys that one call must read."""
    count: int


_WITHOUT_ROWS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "linear": {"T": 0},
        "router": {"T": 0},
        "head_linear": {"T": 0},
        "absorb": {"T": 0},
        "mla": {"H": 0},
        "index_score": {"X": 0},
    }
)
"""What leaves of a case its weights or keys alone, so that the contract says what those take."""


def stored_bytes(contract: Contract, shape: Case, key_bytes: int) -> float:
    """Those of a contract's bytes that are weights or keys."""
    if contract.name == "experts":
        return contract.bytes(shape, 0)
    bare = replace(shape, values={**shape.values, **_WITHOUT_ROWS[contract.name]})
    if contract.name == "index_score":
        each = index_bytes(shape["keys"], shape["I"], key_bytes)
        return float(num_keys(shape["lens"]) * each)
    if contract.name == "mla":
        # Rows of one prompt may share what they read.
        each = latent_bytes(shape["keys"], shape["C"], shape["R"], key_bytes)
        once = num_keys(shape["lens"]) * each
        return min(contract.bytes(bare, key_bytes), float(once))
    return contract.bytes(bare, key_bytes)


def step_calls(arch: ModelArch, ranks: Ranks, load: StepLoad) -> tuple[OpCall, ...]:
    """Every call of a step on one rank of `ranks`, of the model with shapes `arch`."""
    mine = ranks.arch_of(arch)
    listing = _Listing(load)
    num_dense = min(mine.moe.first_dense_layers, mine.num_layers)
    num_full = len(mine.indexer.full_layers)
    parts: tuple[tuple[int, Callable[..., Iterator[OpCall]]], ...] = (
        (num_full, listing.full_front),
        (mine.num_layers - num_full, listing.shared_front),
        (mine.num_layers, listing.attention),
        (num_full, listing.indexer),
        (num_dense, listing.dense),
        (mine.num_layers - num_dense, listing.moe),
        (int(ranks.is_last_stage), listing.head),
    )
    return tuple(
        replace(call, count=num_layers)
        for num_layers, calls in parts
        for call in calls(mine, ranks)
        if num_layers
    )


@dataclass(frozen=True, slots=True)
class _Listing:
    load: StepLoad

    def _call(self, part: str, contract: Contract, what: str, **values: Any) -> OpCall:
        shape = case(what, **values)
        num_bytes = stored_bytes(contract, shape, self.load.key_bytes)
        return OpCall(part, contract.name, what, contract.flops(shape), num_bytes, 1)

    def _linear(self, part: str, what: str, rows: int, out: int, width: int) -> OpCall:
        return self._call(part, LINEAR, what, T=rows, out=out, width=width, format="bf16")

    def _front(self, what: str, out: int, arch: ModelArch, ranks: Ranks) -> OpCall:
        rows = self.load.rows(ranks)
        return self._call(
            "attention", ROUTER, what, T=rows, out=out, width=arch.hidden, format="bf16"
        )

    def full_front(self, arch: ModelArch, ranks: Ranks) -> Iterator[OpCall]:
        """All that multiplies a layer's input where there is an indexer, choice or not."""
        mla, index = arch.mla, arch.indexer
        out = mla.q_lora_rank + mla.latent_dim + index.head_dim + index.num_heads
        yield self._front("q_a, kv_a, index keys and weights", out, arch, ranks)

    def shared_front(self, arch: ModelArch, ranks: Ranks) -> Iterator[OpCall]:
        """The same where there is none."""
        yield self._front("q_a, kv_a", arch.mla.q_lora_rank + arch.mla.latent_dim, arch, ranks)

    def attention(self, arch: ModelArch, ranks: Ranks) -> Iterator[OpCall]:
        """Products behind the latents, keys absorbed on both sides, and the attention itself."""
        mla, rows, part = arch.mla, self.load.rows(ranks), "attention"
        heads, topk = mla.num_heads, arch.indexer.topk
        yield self._linear(
            part, "q_b", rows, heads * (mla.nope_dim + mla.rope_dim), mla.q_lora_rank
        )
        yield self._linear(part, "o", rows, arch.hidden, heads * mla.v_dim)
        lens = self.load.lens(ranks)
        query_lens, kv_lens = ([pair[side] for pair in lens] for side in (0, 1))
        if num_expanded(query_lens, kv_lens, topk) == len(lens):
            yield self._expanded(mla, lens)
            return
        yield self._call(
            part, ABSORB, "absorbed keys",
            T=rows, H=heads, N=mla.nope_dim, C=mla.kv_lora_rank, R=mla.rope_dim,
        )  # fmt: skip
        yield self._call(
            part, HEAD_LINEAR, "absorbed values",
            T=rows, H=heads, W=mla.kv_lora_rank, O=mla.v_dim,
        )  # fmt: skip
        yield self._call(
            part, MLA, "latents", lens=lens, H=heads,
            C=mla.kv_lora_rank, R=mla.rope_dim, topk=topk if self.load.context > topk else 0,
            keys=self.load.keys,
        )  # fmt: skip

    def _expanded(self, mla: MlaArch, lens: Lens) -> OpCall:
        """Keys and values of all heads, and attention over them, by torch's own functions."""
        expanded = mla.nope_dim + mla.v_dim
        widths = mla.kv_lora_rank * expanded * num_rows(lens)
        pairs = ragged_pairs(lens) * (expanded + mla.rope_dim)
        key = latent_bytes(self.load.keys, mla.kv_lora_rank, mla.rope_dim, self.load.key_bytes)
        num_bytes = 2.0 * mla.num_heads * mla.kv_lora_rank * expanded + num_keys(lens) * key
        flops = 2.0 * mla.num_heads * (widths + pairs)
        return OpCall("attention", "other", "expanded keys and values", flops, num_bytes, 1)

    def indexer(self, arch: ModelArch, ranks: Ranks) -> Iterator[OpCall]:
        """Queries and scores, where there is a choice."""
        index, rows, part = arch.indexer, self.load.rows(ranks), "indexer"
        if self.load.context <= index.topk:
            return
        width = index.num_heads * index.head_dim
        yield self._linear(part, "queries", rows, width, arch.mla.q_lora_rank)
        yield self._call(
            part, INDEX_SCORE, "index keys", lens=self.load.lens(ranks),
            X=index.num_heads, I=index.head_dim, keys=self.load.keys,
        )  # fmt: skip

    def dense(self, arch: ModelArch, ranks: Ranks) -> Iterator[OpCall]:
        """A dense MLP."""
        rows, width = self.load.rows(ranks), arch.dense_intermediate
        yield self._linear("dense", "gate and up", rows, 2 * width, arch.hidden)
        yield self._linear("dense", "down", rows, arch.hidden, width)

    def moe(self, arch: ModelArch, ranks: Ranks) -> Iterator[OpCall]:
        """Router and shared expert of own rows, the rank's experts of all rows."""
        moe, rows = arch.moe, self.load.rows(ranks)
        shared, local = moe.shared_intermediate, moe.num_experts // ranks.ep
        yield self._call(
            "moe", ROUTER, "router, shared gate and up",
            T=rows, out=moe.num_experts + 2 * shared, width=arch.hidden, format="bf16",
        )  # fmt: skip
        yield self._linear("moe", "shared down", rows, arch.hidden, shared)
        yield self._call(
            "moe", EXPERTS, f"{local} experts", T=rows * ranks.attn_dp, K=moe.experts_per_token,
            E=local, used=local, D=arch.hidden, F=moe.intermediate, format="nvfp4",
            down_format="nvfp4", shared=False, residual=False, dropped=1.0 - 1.0 / ranks.ep,
        )  # fmt: skip

    def head(self, arch: ModelArch, ranks: Ranks) -> Iterator[OpCall]:
        """The rank's rows of the output head, for the last row of each sequence."""
        rows = self.load.sequences(ranks) * ranks.attn_dp
        yield self._call(
            "head", ROUTER, "output head",
            T=rows, out=arch.vocab // ranks.tp, width=arch.hidden, format="bf16",
        )  # fmt: skip
