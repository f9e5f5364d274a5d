"""All ranks of a layout in one process: a thread each, which meet to exchange."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tetrad.core.arch import MoeArch
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

    def exchange(self, moe: MoeArch) -> ThreadExchange:
        return ThreadExchange(self, moe)

    def gather_rows(self, rows: Tensor) -> Tensor:
        return torch.cat(self.of_groups(rows)) if self.ranks.attn_dp > 1 else rows

    def join_vocab(self, logits: Tensor) -> Tensor:
        joined = torch.cat(self.swap(logits), dim=1)
        return joined.chunk(self.ranks.attn_dp)[self.ranks.attn_group]


@dataclass
class ThreadExchange:
    others: ThreadCollectives
    moe: MoeArch

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = self.others.of_groups((x, ids, weights))
        rows, all_ids, all_weights = (torch.cat(parts) for parts in zip(*found, strict=True))
        ranks = self.others.ranks
        table = local_ids(self.moe.num_experts, ranks.held(self.moe.num_experts), CPU)
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
