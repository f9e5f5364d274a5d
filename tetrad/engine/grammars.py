"""Requests whose answers must match a grammar: they wait outside the scheduler until it is
compiled; then each of their steps gets a mask of allowed tokens.

    begin ──compile, elsewhere──▶ ready ──▶ scheduler ──▶ masks, tokens, masks, … ──▶ forget

No step waits for a compilation. A step's mask depends on the token of the previous step, so it is
computed between the launch of the model and that of the sampler, once that token is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tetrad.core.errors import CapacityError, RequestError
from tetrad.core.plan import StepPlan
from tetrad.core.request import Grammar, Request, RequestOutput
from tetrad.grammar.compiler import Compiled, Refused
from tetrad.grammar.layout import ALLOWED, DEAD_END, ENDED, GIVEN_UP, REJECTED

Phase = Literal["first", "reasoning", "matching"]

FAILURES = {
    DEAD_END: "The model's vocabulary has no token with which this answer could go on to match its "
    "grammar.",
    REJECTED: "The answer has a token that its grammar does not allow; this is a fault of the "
    "server, whose log may say more.",
    GIVEN_UP: "The answer's grammar takes too long to follow, so the request was ended.",
    ENDED: "The process that follows grammars ended twice in a row; the server's log says more. "
    "Send the request again.",
}


class Foundry(Protocol):
    """Compiles: `grammar.compiler.Compiler`, or a stand-in of tests."""

    @property
    def num_waiting(self) -> int: ...
    def start(self) -> None: ...
    def ask(self, kind: str, text: str) -> int | None: ...
    def look(self) -> None: ...
    def outcome(self, key: int) -> Compiled | Refused | None: ...
    def forget(self, in_use: frozenset[int]) -> None: ...
    def stop(self) -> None: ...


class Maker(Protocol):
    """Makes masks: `grammar.masks.MaskMaker`, or a stand-in of tests."""

    @property
    def rows(self) -> memoryview: ...
    @property
    def keys(self) -> frozenset[int]: ...
    def prepare(self, compiled: Compiled) -> bool: ...
    def open(self, compiled: Compiled) -> int: ...
    def close(self, number: int) -> None: ...
    def fill(self, wanted: list[tuple[int, list[int]]]) -> list[int]: ...
    def stop(self) -> None: ...


@dataclass
class _Answer:
    """One that is generated."""

    grammar: Grammar
    number: int
    phase: Phase
    token_ids: list[int] = field(default_factory=list)
    """That its grammar has not read yet."""

    def take(self, token_id: int) -> None:
        """One more token. Reasoning is not the grammar's."""
        grammar = self.grammar
        if self.phase == "first":
            self.phase = "reasoning" if token_id == grammar.open_id else "matching"
            if self.phase == "reasoning":
                return
        if self.phase == "matching":
            self.token_ids.append(token_id)
        elif token_id in (grammar.close_id, grammar.call_id):
            self.phase = "matching"
            if token_id == grammar.call_id:
                self.token_ids.append(token_id)


@dataclass(frozen=True)
class Masks:
    """What one step's sampler must allow."""

    sampled_rows: tuple[int, ...]
    """Of the rows that sample, those that are constrained."""
    words: memoryview
    """One row for each, then more that mean nothing."""
    also: tuple[tuple[int, int], ...]
    """(row of `words`, token id) that is allowed besides."""


class Grammars:
    """All constrained requests of an engine."""

    def __init__(self, foundry: Foundry, maker: Maker) -> None:
        self._foundry = foundry
        self._maker = maker
        self._waiting: dict[str, tuple[Request, int]] = {}
        self._answers: dict[str, _Answer] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._waiting)

    def __contains__(self, own_rid: str) -> bool:
        """Does a request of this name wait for its grammar?"""
        return any(request.own_rid == own_rid for request, _ in self._waiting.values())

    def start(self) -> None:
        """Begin to start what compiles, so that the first who needs it waits less."""
        self._foundry.start()

    def begin(self, request: Request) -> None:
        """Have its grammar compiled. Raises CapacityError when too many wait for theirs."""
        grammar = request.sampling.grammar
        assert grammar is not None
        key = self._foundry.ask(grammar.kind, grammar.text)
        if key is None:
            raise CapacityError("Too many new grammars wait to be compiled; try again later.")
        self._waiting[request.rid] = (request, key)

    def ready(self) -> list[tuple[Request, RequestError | CapacityError | None]]:
        """Those who need not wait any more, with the reason if they are refused."""
        if not self._waiting:
            return []
        self._foundry.look()
        found = []
        for request, key in list(self._waiting.values()):
            outcome = self._foundry.outcome(key)
            if isinstance(outcome, Compiled) and not self._maker.prepare(outcome):
                continue
            if outcome is not None:
                del self._waiting[request.rid]
                found.append((request, self._open(request, outcome)))
        in_use = frozenset(key for _, key in self._waiting.values())
        self._foundry.forget(in_use | self._maker.keys)
        return found

    def _open(
        self, request: Request, outcome: Compiled | Refused
    ) -> RequestError | CapacityError | None:
        grammar = request.sampling.grammar
        assert grammar is not None
        if isinstance(outcome, Refused):
            if outcome.is_ours:
                return CapacityError(outcome.reason)
            name = grammar.field
            return RequestError(f"{name} cannot be used: {outcome.reason}.", param=name)
        phase: Phase = "matching"
        if grammar.close_id is not None:
            phase = "reasoning" if grammar.open_id is None else "first"
        self._answers[request.rid] = _Answer(grammar, self._maker.open(outcome), phase)
        return None

    def forget(self, rid: str) -> None:
        """The request ended, or is not wanted any more. An unknown rid is ignored."""
        self._waiting.pop(rid, None)
        if answer := self._answers.pop(rid, None):
            self._maker.close(answer.number)

    def end(self, rid: str | None) -> list[str]:
        """Forget those who wait and are named so, or all who wait; returns who they are."""
        waiting = [request for request, _ in self._waiting.values()]
        ended = [one.rid for one in waiting if rid is None or one.is_named(rid)]
        for one in ended:
            del self._waiting[one]
        return ended

    def take(self, outputs: Iterable[RequestOutput]) -> None:
        """What a step gave each request."""
        if not self._answers:
            return
        for output in outputs:
            answer = self._answers.get(output.rid)
            if answer is None:
                continue
            if output.finish is not None:
                self.forget(output.rid)
                continue
            for token_id in output.token_ids:
                answer.take(token_id)

    def concern(self, plan: StepPlan) -> bool:
        """Does the plan sample for one of them?"""
        return bool(self._answers) and any(
            work.rid in self._answers for work in plan.sequences if work.sample
        )

    def masks(self, plan: StepPlan) -> tuple[Masks | None, dict[str, str]]:
        """What the plan's sampler must allow, when all tokens before it are taken in; and who
        cannot go on, with the reason."""
        rids = [work.rid for work in plan.sequences if work.sample]
        rows = [
            (row, rid, answer)
            for row, rid in enumerate(rids, len(plan.decodes))
            if (answer := self._answers.get(rid)) and answer.phase != "reasoning"
        ]
        if not rows:
            return None, {}
        states = self._maker.fill([(answer.number, answer.token_ids) for _, _, answer in rows])
        for _, _, answer in rows:
            answer.token_ids = []
        failed = {
            rid: FAILURES[state]
            for (_, rid, _), state in zip(rows, states, strict=True)
            if state != ALLOWED
        }
        also = tuple(
            (place, answer.grammar.open_id)
            for place, (_, _, answer) in enumerate(rows)
            if answer.phase == "first" and answer.grammar.open_id is not None
        )
        return Masks(tuple(row for row, _, _ in rows), self._maker.rows, also), failed

    def stop(self) -> None:
        """End the processes."""
        self._maker.stop()
        self._foundry.stop()
