"""The results of a step as one message to each API process: plain tokens as two columns, the rest
as full outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

import numpy as np

from tetrad.core.messages import FIRST_WORKER, EngineStats, StepOutputs
from tetrad.core.request import Request, RequestOutput
from tetrad.engine.gains import StepGain

MOST_LOGPROBS = 4096
"""Of one message, but for the last output in it: some 2 ms of an API process to read."""


class Shares:
    """Which API process each live request came from."""

    def __init__(self) -> None:
        self._workers: dict[str, int] = {}

    def begin(self, request: Request) -> None:
        """The engine has taken `request`."""
        self._workers[request.rid] = request.worker

    def end(self, rid: str) -> None:
        """It has ended; an unknown one is ignored."""
        self._workers.pop(rid, None)

    def owner(self, rid: str) -> int:
        """Of a request that may be unknown."""
        return self._workers.get(rid, FIRST_WORKER)

    def of(self, worker: int) -> list[str]:
        """The live requests of an API process."""
        return [rid for rid, its in self._workers.items() if its == worker]

    def messages(
        self, gain: StepGain, workers: Set[int], stats: EngineStats
    ) -> Iterator[tuple[int, StepOutputs]]:
        """A message to each of `workers`: what its requests got, and the figures that all show."""
        full: dict[int, list[RequestOutput]] = {worker: [] for worker in workers}
        for output in gain.outputs:
            full[self.owner(output.rid)].append(output)
            if output.finish is not None:
                self.end(output.rid)
        numbers, token_ids = gain.numbers.astype(np.uint32), gain.token_ids.astype(np.int32)
        for worker, outputs in full.items():
            its = (gain.workers == worker).nonzero()[0]
            columns = numbers.take(its).tobytes(), token_ids.take(its).tobytes()
            first, *others = _parts(outputs)
            yield worker, StepOutputs(first, stats, *columns)
            for part in others:
                yield worker, StepOutputs(part, stats)


def _parts(outputs: Iterable[RequestOutput]) -> Iterator[list[RequestOutput]]:
    """For messages of their own, each of which is read in one go."""
    part: list[RequestOutput] = []
    num_logprobs = 0
    for output in outputs:
        part.append(output)
        num_logprobs += sum(len(each.top) + 1 for each in output.logprobs)
        if num_logprobs >= MOST_LOGPROBS:
            yield part
            part, num_logprobs = [], 0
    yield part
