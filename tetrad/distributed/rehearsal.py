"""A rank without the others: what they would send is stood in for, what would be sent is counted.

Gathered rows are a buffer: others' rows, drawn once, then the own, which the layers write there.
What comes out is the rank's part of every sum, so the text of a rehearsal means nothing; its
shapes, its kernels and its memory are those of the rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tetrad.core.arch import ModelArch, MoeArch
from tetrad.core.ranks import Ranks
from tetrad.distributed.collectives import ExpertExchange

Routing = Literal["random", "skewed"]
"""How the others' tokens choose experts: by Gaussian scores, or by scores to which every expert
adds a Gaussian bias of its own."""


@dataclass
class Traffic:
    """What the rank would have received since the count began."""

    num_bytes: dict[str, float] = field(default_factory=dict)
    """Collective → bytes."""
    num_calls: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, num_bytes: float) -> None:
        """Enter one call."""
        self.num_bytes[name] = self.num_bytes.get(name, 0.0) + num_bytes
        self.num_calls[name] = self.num_calls.get(name, 0) + 1

    @property
    def total_bytes(self) -> float:
        return sum(self.num_bytes.values())


class Rehearsal:
    """`Collectives` of one rank that is alone. Rows are the group's own, at most `most_rows`."""

    def __init__(
        self,
        ranks: Ranks,
        arch: ModelArch,
        *,
        most_rows: int,
        routing: Routing,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.ranks = ranks
        self.most_rows = most_rows
        self.routing = routing
        self.seed = seed
        self.device = device
        self.traffic = Traffic()
        self._num_exchanges = 0
        rows = torch.randn(
            ranks.attn_dp * most_rows, arch.hidden, generator=self._generator(), device=device
        )
        self._rows = rows.to(dtype)
        """Others' first, as large as a norm leaves them; then the own."""
        num_received = 0 if ranks.is_first_stage else most_rows
        received = torch.randn(
            num_received, arch.hidden, generator=self._generator(), device=device
        )
        self._received = received.to(dtype)
        """What the stage before leaves of each row."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """x: the others' parts are missing from the sum."""
        parts = self.ranks.attn_tp
        if parts > 1:
            self.traffic.add("all_reduce", 2 * x.nbytes * (parts - 1) / parts)
        return x

    def exchange(self, arch: ModelArch) -> ExpertExchange:
        """Each layer's with draws of its own."""
        self._num_exchanges += 1
        return RehearsedExchange(self, arch.moe, self._generator(self._num_exchanges))

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Own rows behind drawn ones."""
        if self.ranks.attn_dp == 1:
            return rows
        self.traffic.add("all_gather", (self.ranks.attn_dp - 1) * rows.nbytes)
        return self.with_own(self._rows, rows)

    def join_vocab(self, logits: Tensor) -> Tensor:
        """What this rank computed for the other groups stands in for what their ranks computed for
        its own rows: there is as much of either."""
        ranks = self.ranks
        if ranks.tp == 1:
            return logits
        num_rows, width = len(logits) // ranks.attn_dp, logits.shape[1]
        parts = logits.view(ranks.attn_dp, num_rows, width).flip(0).transpose(0, 1)
        joined = parts.reshape(num_rows, ranks.attn_dp * width).repeat(1, ranks.attn_tp)
        self.traffic.add("join_vocab", joined.nbytes * (ranks.tp - 1) / ranks.tp)
        return joined

    def receive(self, num_rows: int) -> Tensor:
        """Drawn rows."""
        rows = self._received[:num_rows]
        self.traffic.add("receive", rows.nbytes)
        return rows

    def send(self, hidden: Tensor) -> None:
        """Nowhere; priced where it is received."""

    def with_own(self, buffer: Tensor, own: Tensor) -> Tensor:
        """A view of `buffer`: others' rows, then `own`, which are copied into it."""
        view = self.view(buffer, len(own))
        view[-len(own) :].copy_(own)
        return view

    def view(self, buffer: Tensor, num_own: int) -> Tensor:
        """Of as many drawn rows as the other groups have, and room for `num_own` behind."""
        assert num_own <= self.most_rows, (num_own, self.most_rows)
        num_others = self.ranks.attn_dp - 1
        begin = num_others * (self.most_rows - num_own)
        return buffer[begin : num_others * self.most_rows + num_own]

    def _generator(self, number: int = 0) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed + number)


class RehearsedExchange:
    """One layer's. The others' tokens have chosen beforehand, and nobody else reads what the own
    ones choose."""

    counts_all = False

    def __init__(self, rehearsal: Rehearsal, moe: MoeArch, generator: torch.Generator) -> None:
        self._stage = rehearsal
        held = rehearsal.ranks.held(moe.num_experts)
        num_rows = rehearsal.ranks.attn_dp * rehearsal.most_rows
        local = local_ids(moe.num_experts, held, rehearsal.device)
        self._ids = local[draw_choices(moe, num_rows, rehearsal.routing, generator)]
        weights = torch.rand(self._ids.shape, generator=generator, device=rehearsal.device) + 0.5
        self._weights = weights * (moe.scaling / weights.sum(1, keepdim=True))

    def own(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Behind the drawn ones."""
        rows, ids, weights = self._views(num_rows)
        return rows[-num_rows:], weights[-num_rows:], ids[-num_rows:]

    def dispatch(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """As an all-gather would leave them, own rows last."""
        num_bytes = sum(part.nbytes for part in self.own(num_rows))
        others = self._stage.ranks.attn_dp - 1
        self._stage.traffic.add("dispatch", others * num_bytes)
        return self._views(num_rows)

    def _views(self, num_own: int) -> tuple[Tensor, Tensor, Tensor]:
        view = self._stage.view
        rows = view(self._stage._rows, num_own)
        return rows, view(self._ids, num_own), view(self._weights, num_own)

    def combine(self, y: Tensor) -> Tensor:
        """The rank's own part of its own rows; priced as a reduce-scatter over all ranks and, where
        ranks share a group, an all-gather among them."""
        ranks = self._stage.ranks
        own = y[-(len(y) // ranks.attn_dp) :]
        scattered = y.nbytes * (ranks.tp - 1) / ranks.tp
        gathered = own.nbytes * (ranks.attn_tp - 1) / ranks.attn_tp
        self._stage.traffic.add("combine", scattered + gathered)
        return own


def local_ids(num_experts: int, held: range, device: torch.device) -> Tensor:
    """int64 [E]: the number within `held` of each of all experts, -1 for those not in it."""
    table = torch.full((num_experts,), -1, device=device)
    table[held.start : held.stop] = torch.arange(len(held), device=device)
    return table


def draw_choices(
    moe: MoeArch, num_rows: int, routing: Routing, generator: torch.Generator
) -> Tensor:
    """int64 [num_rows, K]: K different experts of all for each row."""
    device = generator.device
    bias = torch.randn(moe.num_experts, generator=generator, device=device)
    scores = torch.randn(num_rows, moe.num_experts, generator=generator, device=device)
    if routing == "skewed":
        scores += bias
    return scores.topk(moe.experts_per_token, dim=-1).indices
