"""What a step gave, as one message to each API process.

Most of it is plain: one more token of a request of which all else is known there. These travel as
two columns of numbers, the others as they are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field

from tetrad.core.messages import FIRST_WORKER, EngineStats, StepOutputs
from tetrad.core.request import Request, RequestOutput


@dataclass(slots=True)
class _Known:
    """A live request, and what its API process was told of it last."""

    worker: int
    number: int
    told: RequestOutput | None = None

    def lets_guess(self, output: RequestOutput) -> bool:
        """Whether all of `output` but its token is as it was told last."""
        told = self.told
        return (
            told is not None
            and output.finish is None
            and len(output.token_ids) == 1
            and not output.logprobs
            and not output.queue_s
            and output.num_preemptions == told.num_preemptions
            and output.cached_tokens == told.cached_tokens
            and output.prompt_tokens == told.prompt_tokens
        )


@dataclass(slots=True)
class _Share:
    """What one API process gets."""

    full: list[RequestOutput] = field(default_factory=list)
    in_full: set[str] = field(default_factory=set)
    """Whose: what comes behind that must not overtake it."""
    numbers: array[int] = field(default_factory=lambda: array("I"))
    tokens: array[int] = field(default_factory=lambda: array("i"))


class Shares:
    """Which API process each live request came from."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def begin(self, request: Request, worker: int) -> None:
        """The engine has taken `request`."""
        self._known[request.rid] = _Known(worker, request.number)

    def end(self, rid: str) -> None:
        """It has ended; an unknown one is ignored."""
        self._known.pop(rid, None)

    def owner(self, rid: str) -> int:
        """Of a request that may be unknown."""
        known = self._known.get(rid)
        return FIRST_WORKER if known is None else known.worker

    def of(self, worker: int) -> list[str]:
        """The live requests of an API process."""
        return [rid for rid, known in self._known.items() if known.worker == worker]

    def messages(
        self, outputs: Iterable[RequestOutput], workers: Set[int], stats: EngineStats
    ) -> Iterator[tuple[int, StepOutputs]]:
        """A message to each of `workers`: what its requests got, and the figures that all show."""
        shares = {worker: _Share() for worker in workers}
        for output in outputs:
            known = self._known.get(output.rid)
            share = shares[FIRST_WORKER if known is None else known.worker]
            if known is not None and output.rid not in share.in_full and known.lets_guess(output):
                share.numbers.append(known.number)
                share.tokens.append(output.token_ids[0])
                continue
            share.full.append(output)
            share.in_full.add(output.rid)
            if known is not None:
                known.told = output
            if output.finish is not None:
                self.end(output.rid)
        for worker, share in shares.items():
            columns = share.numbers.tobytes(), share.tokens.tobytes()
            yield worker, StepOutputs(share.full, stats, *columns)
