"""All ranks of a layout in one process: a thread each, which meet to exchange."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tetrad.core.arch import ModelArch
from tetrad.core.ranks import Ranks
from tetrad.distributed.rehearsal import local_ids

CPU = torch.device("cpu")


@dataclass
class Meeting:
    """Where all ranks of a layout lay something down and read what the others laid."""

    size: int
    laid: list[Any] = field(init=False)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.laid = [None] * self.size
        self.barrier = threading.Barrier(self.size, timeout=60)

    def swap(self, rank: int, value: Any) -> list[Any]:
        self.laid[rank] = value
        self.barrier.wait()
        found = list(self.laid)
        self.barrier.wait()
        return found


@dataclass
class ThreadCollectives:
    """`Collectives` that really exchange."""

    ranks: Ranks
    meeting: Meeting
    """Of the ranks of one stage."""
    inboxes: list[queue.Queue[Tensor]]
    """Of all ranks, for what the stage before hands on."""

    def swap(self, value: Any) -> list[Any]:
        return self.meeting.swap(self.ranks.rank % self.ranks.tp, value)

    def receive(self, num_rows: int) -> Tensor:
        rows = self.inboxes[self.ranks.rank].get(timeout=60)
        assert len(rows) == num_rows
        return rows

    def send(self, hidden: Tensor) -> None:
        self.inboxes[self.ranks.rank + self.ranks.tp].put(hidden)

    def of_groups(self, value: Any) -> list[Any]:
        return self.swap(value)[:: self.ranks.attn_tp]

    def all_reduce(self, x: Tensor) -> Tensor:
        first = self.ranks.attn_group * self.ranks.attn_tp
        return torch.stack(self.swap(x)[first : first + self.ranks.attn_tp]).sum(0)

    def exchange(self, arch: ModelArch) -> ThreadExchange:
        return ThreadExchange(self, arch)

    def gather_rows(self, rows: Tensor) -> Tensor:
        return torch.cat(self.of_groups(rows)) if self.ranks.attn_dp > 1 else rows

    def join_vocab(self, logits: Tensor) -> Tensor:
        joined = torch.cat(self.swap(logits), dim=1)
        return joined.chunk(self.ranks.attn_dp)[self.ranks.attn_group]


@dataclass
class ThreadExchange:
    others: ThreadCollectives
    arch: ModelArch
    counts_all: bool = True
    laid: tuple[Tensor, Tensor, Tensor] | None = None

    def own(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        if self.laid is None or len(self.laid[0]) != num_rows:
            slots = torch.empty(num_rows, self.arch.moe.experts_per_token)
            rows = torch.empty(num_rows, self.arch.hidden)
            self.laid = rows, slots, torch.empty_like(slots, dtype=torch.int64)
        return self.laid

    def dispatch(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        found = self.others.of_groups(self.own(num_rows))
        rows, all_weights, all_ids = (torch.cat(parts) for parts in zip(*found, strict=True))
        ranks = self.others.ranks
        num_experts = self.arch.moe.num_experts
        table = local_ids(num_experts, ranks.held(num_experts), CPU)
        return rows, table[all_ids], all_weights

    def combine(self, y: Tensor) -> Tensor:
        total = torch.stack(self.others.swap(y)).sum(0)
        return total.chunk(self.others.ranks.attn_dp)[self.others.ranks.attn_group]


def run_all(layout: Ranks, program: Callable[[ThreadCollectives], Any]) -> list[Any]:
    """What `program` returns on each rank of `layout`."""
    meetings = [Meeting(layout.tp) for _ in range(layout.pp)]
    inboxes: list[queue.Queue[Tensor]] = [queue.Queue() for _ in range(layout.size)]
    results: list[Any] = [None] * layout.size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        here = Ranks(layout.tp, layout.ep, layout.pp, layout.attn_dp, rank)
        try:
            others = ThreadCollectives(here, meetings[here.stage], inboxes)
            results[rank] = program(others)
        except BaseException as error:  # noqa: BLE001  # raised again below
            errors.append(error)
            meetings[here.stage].barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(layout.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
