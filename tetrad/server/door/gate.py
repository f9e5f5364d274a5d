"""How many requests may wait, and whose.

`--max-queued-requests` and `--max-queued-tokens` are limits of the whole server, checked over all
API processes. When one of them is reached and there are several API keys, a key that has no more
than its equal share of the limit waiting still gets in: nobody is shut out by what others send. So
up to twice the limit may wait, and who is refused is told whether the server is full (503) or the
key has had its share (429).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tetrad.core.config import ServeConfig
from tetrad.core.errors import CapacityError
from tetrad.server.engine_port import EnginePort
from tetrad.server.shared.tally import FIRST_OF_KEYS, OPEN, UNANSWERED, UNANSWERED_TOKENS, Tally


class Gate:
    """Counts engine requests in, or refuses them."""

    def __init__(self, config: ServeConfig, tally: Tally, key_names: Sequence[str]) -> None:
        self._config = config
        self._tally = tally
        self._columns = {name: FIRST_OF_KEYS + 2 * i for i, name in enumerate(("", *key_names))}
        self._num_keys = len(key_names)

    def let_in(self, engine: EnginePort, key_name: str, prompt_lens: Sequence[int]) -> Admission:
        """Raises CapacityError when they may not come in."""
        column = self._columns[key_name]
        if self._config.max_queued_requests is None and self._config.max_queued_tokens is None:
            return Admission(self._tally, column, prompt_lens)
        with self._tally.exclusive():
            for limit in self._limits(engine, column, prompt_lens):
                self._check(limit, key_name)
            return Admission(self._tally, column, prompt_lens)

    def _limits(self, engine: EnginePort, column: int, prompt_lens: Sequence[int]) -> list[_Limit]:
        found, num = [], len(prompt_lens)
        total = self._tally.total
        if (most := self._config.max_queued_requests) is not None:
            own = total(column) + num
            found.append(_Limit("requests", most, self._queued(engine, num), own))
        if (most := self._config.max_queued_tokens) is not None and total(UNANSWERED):
            tokens = sum(prompt_lens)
            all_tokens = int(total(UNANSWERED_TOKENS)) + tokens
            found.append(_Limit("tokens", most, all_tokens, total(column + 1) + tokens))
        return found

    def _check(self, limit: _Limit, key_name: str) -> None:
        if limit.queued <= limit.most:
            return
        unit = limit.unit if limit.queued != 1 else limit.unit.removesuffix("s")
        sentence = f"{limit.queued} {unit} would wait and --max-queued-{limit.unit} is {limit.most}"
        if self._num_keys < 2:
            raise CapacityError(f"{sentence}; try again later.")
        share = max(1, limit.most // self._num_keys)
        if limit.own > share:
            raise CapacityError(
                f"{sentence}; {int(limit.own)} of them would be of key {key_name}, whose share is "
                f"{share}; try again later.",
                is_share=True,
            )

    def _queued(self, engine: EnginePort, num_requests: int) -> int:
        """Requests that would wait if `num_requests` more came: those beyond the engine's slots,
        and everyone new when the engine's memory makes even admitted requests wait."""
        num_slots: int = engine.info["max_running_requests"]
        beyond = int(self._tally.total(OPEN)) + num_requests - num_slots
        unanswered = int(self._tally.total(UNANSWERED))
        waiting = min(engine.stats.waiting_requests, unanswered)
        return max(beyond, waiting + num_requests if waiting else 0)


@dataclass(frozen=True, slots=True)
class _Limit:
    """One of the two, and what would wait: in all, and of the key."""

    unit: str
    most: int
    queued: int
    own: float


class Admission:
    """The engine requests of one HTTP request, as counted by the tally."""

    def __init__(self, tally: Tally, column: int, prompt_lens: Sequence[int]) -> None:
        """`column`: the first of its key."""
        self._tally = tally
        self._column = column
        self._waiting = dict(enumerate(prompt_lens))
        self._num_requests = len(prompt_lens)
        tally.add(OPEN, self._num_requests)
        self._count(self._num_requests, sum(prompt_lens))

    def first_token(self, index: int) -> None:
        """One of the requests got its first token."""
        self._count(-1, -self._waiting.pop(index))

    def leave(self) -> None:
        """The HTTP request is over."""
        self._tally.add(OPEN, -self._num_requests)
        self._count(-len(self._waiting), -sum(self._waiting.values()))

    def _count(self, num_requests: int, num_tokens: int) -> None:
        self._tally.add(UNANSWERED, num_requests)
        self._tally.add(UNANSWERED_TOKENS, num_tokens)
        self._tally.add(self._column, num_requests)
        self._tally.add(self._column + 1, num_tokens)
