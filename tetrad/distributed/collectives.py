"""What one rank exchanges with the others, as the layers ask for it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tetrad.core.arch import ModelArch
from tetrad.core.ranks import ALONE, Ranks


class ExpertExchange(Protocol):
    """Tokens of all groups to the experts of one layer, and sums back. n rows are a group's own, N
    those of all groups."""

    counts_all: bool
    """Whether own rows' experts are written by their numbers among all; else among those held, -1
    for the others'."""

    def own(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where whoever computes them writes the own rows [n, D], their slots' weights [n, K] and
        experts [n, K], before `dispatch`."""
        ...

    def dispatch(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Send the `num_rows` own rows.

        Returns the rows [N, D] of all groups, the slots' experts [N, K] counted within this rank
        (-1: another rank's) and the slot weights [N, K].
        """
        ...

    def combine(self, y: Tensor) -> Tensor:
        """[N, D], this rank's part of each row's sum, to [n, D], the own rows' sums over ranks."""
        ...


class Collectives(Protocol):
    """One rank's side of a layout."""

    ranks: Ranks

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks that share a layer's heads and columns. x is not used again."""
        ...

    def exchange(self, arch: ModelArch) -> ExpertExchange:
        """That of one layer; called once for each, in order."""
        ...

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Own rows [n, D] to those of all groups [N, D]."""
        ...

    def join_vocab(self, logits: Tensor) -> Tensor:
        """Logits of all groups' rows for this rank's tokens [N, V / tp] to the own rows' [n, V]."""
        ...

    def receive(self, num_rows: int) -> Tensor:
        """Hidden states [n, D] of the step's rows from the stage before."""
        ...

    def send(self, hidden: Tensor) -> None:
        """Hidden states [n, D] of the step's rows to the stage behind."""
        ...


class Solo:
    """One rank that holds everything: nothing to say, nobody to hear."""

    ranks = ALONE

    def all_reduce(self, x: Tensor) -> Tensor:
        """x."""
        return x

    def exchange(self, arch: ModelArch) -> ExpertExchange:
        """Never asked for: there is one group."""
        raise NotImplementedError

    def gather_rows(self, rows: Tensor) -> Tensor:
        """rows."""
        return rows

    def join_vocab(self, logits: Tensor) -> Tensor:
        """logits."""
        return logits

    def receive(self, num_rows: int) -> Tensor:
        """Never asked for: there is one stage."""
        raise NotImplementedError

    def send(self, hidden: Tensor) -> None:
        """Never asked for: there is one stage."""
        raise NotImplementedError
