"""The engine's side of following grammars: masks of allowed tokens, whatever a grammar costs.

Each row has its time. If the followers' process spends it without coming further, the answer that
it worked for is given up; a new process is told of the others and goes on. If it ends by itself, as
when the system is short of memory, nobody is to blame at first: all is tried anew. Only an answer
for which it was at work both times is given up.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tetrad.grammar.compiler import Compiled, Compiler
from tetrad.grammar.layout import ENDED, GIVEN_UP, HEADER_WORDS, NOBODY, WORD_BYTES, mask_words
from tetrad.grammar.wire import channel, memory_file, receive, send

_log = logging.getLogger(__name__)

CPU_LIMIT_S = 0.5
"""Processor time without progress. A row takes some 50 µs, reading a grammar up to 0.2 s."""
WALL_LIMIT_S = 10.0
LOOK_MS = 20
PIECE_TOKENS = 2048
"""A new process is told of a long answer in pieces, which messages hold and after each of which it
has come further."""
MAX_LOADED = 64
"""Grammars that the process holds though nobody follows them."""


class LostError(Exception):
    """The process ended."""


class StuckError(LostError):
    """It does not come further."""


@dataclass
class Answer:
    """What a new process must know of one that is constrained."""

    compiled: Compiled
    token_ids: list[int] = field(default_factory=list)
    was_worked_for: bool = False
    """Was it, when a process ended?"""


class MaskMaker:
    """Follows grammars for up to `most_rows` answers of one step."""

    def __init__(self, compiler: Compiler, vocab: int, most_rows: int) -> None:
        self._compiler = compiler
        self._num_bytes = (HEADER_WORDS + most_rows * mask_words(vocab)) * WORD_BYTES
        self._words = memoryview(b"").cast("i")
        """Header and rows, once somebody needs them."""
        self._descriptor = -1
        self._end: socket.socket | None = None
        self._pid = 0
        self._answers: dict[int, Answer] = {}
        self._given_up: dict[int, int] = {}
        """What became of answers that are not closed yet."""
        self._loaded: dict[int, None] = {}
        """Keys of grammars that the process holds, the one opened longest ago first."""
        self._unread: set[int] = set()
        """Those of them that it is still reading."""
        self._was_ended = False
        """Did the last process end while it worked for nobody?"""
        self._next_number = 0
        self._mark = (0, 0.0, 0.0)
        """The count when progress was last seen, and processor and clock time then."""

    @property
    def rows(self) -> memoryview:
        """The words of all rows, one row after another."""
        return self._words[HEADER_WORDS:]

    @property
    def keys(self) -> frozenset[int]:
        """Grammars that are followed, or held."""
        return frozenset(a.compiled.key for a in self._answers.values()) | self._loaded.keys()

    def prepare(self, compiled: Compiled) -> bool:
        """Have the process read a grammar, which takes a while if it is large; True once it can be
        opened without a wait."""
        try:
            if self._end is None:
                self._start()
            self._load(compiled)
            self._take_news()
        except LostError as error:
            self._begin_anew(error)
            return False
        return compiled.key not in self._unread

    def open(self, compiled: Compiled) -> int:
        """Follow a grammar from its start; returns the number that the answer is known by."""
        number, self._next_number = self._next_number, self._next_number + 1
        self._answers[number] = answer = Answer(compiled)
        with contextlib.suppress(LostError):  # masks will find out
            self._introduce(number, answer)
        return number

    def close(self, number: int) -> None:
        """Nobody asks for it any more."""
        self._given_up.pop(number, None)
        known = self._answers.pop(number, None) is not None
        if known and self._end is not None:
            with contextlib.suppress(LostError):
                self._tell(["close", number])

    def fill(self, wanted: Sequence[tuple[int, list[int]]]) -> list[int]:
        """Fill a row for each (number, tokens since the last time); blocks. Returns what became of
        each; those that were given up are closed."""
        states: dict[int, int] = {}
        rows = [(row, number, ids) for row, (number, ids) in enumerate(wanted)]
        while left := [row for row in rows if row[1] in self._answers]:
            try:
                done = self._ask(left)
            except LostError as error:
                self._begin_anew(error)
                continue
            for (_, number, ids), state in zip(left, done, strict=True):
                states[number] = state
                self._was_ended = False
                self._answers[number].token_ids += ids
            break
        return [states.get(number, self._given_up.get(number, ENDED)) for number, _ in wanted]

    def stop(self) -> None:
        """End the process."""
        if self._end is not None:
            self._kill()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _ask(self, rows: list[tuple[int, int, list[int]]]) -> list[int]:
        self._mark = (self._words[1], _cpu_s(self._pid), time.monotonic())
        self._tell(["masks", rows])
        while True:
            if (states := self._heard(self._receive())) is not None:
                return states

    def _heard(self, message: list[Any]) -> list[int] | None:
        """Take a message in; what it says of rows, if it does."""
        match message:
            case ["pid", int(pid)]:
                self._pid = pid
            case ["loaded", int(key)]:
                self._unread.discard(key)
            case ["done", states]:
                return list(states)
        return None

    def _take_news(self) -> None:
        """What has come, without a wait."""
        assert self._end is not None
        self._compiler.look()
        try:
            while True:
                self._heard(receive(self._end)[0])
        except BlockingIOError:
            pass
        except (EOFError, OSError):
            raise LostError from None

    def _start(self) -> None:
        self._end, theirs = channel()
        self._end.setblocking(False)
        self._pid, self._loaded, self._unread = 0, {}, set()
        if self._descriptor < 0:
            self._descriptor = memory_file("masks", self._num_bytes)
            self._words = memoryview(mmap.mmap(self._descriptor, self._num_bytes)).cast("i")
        self._words[0] = NOBODY
        self._compiler.follow(theirs.detach(), os.dup(self._descriptor))
        for number, answer in list(self._answers.items()):
            self._introduce(number, answer)

    def _introduce(self, number: int, answer: Answer) -> None:
        if self._end is None:
            self._start()  # introduces everybody
            return
        key = answer.compiled.key
        self._load(answer.compiled)
        self._tell(["open", number, key, answer.compiled.is_json])
        for start in range(0, len(answer.token_ids), PIECE_TOKENS):
            self._tell(["read", number, answer.token_ids[start : start + PIECE_TOKENS]])
        self._drop_idle()

    def _load(self, compiled: Compiled) -> None:
        key = compiled.key
        if key not in self._loaded:
            self._unread.add(key)
            self._tell(["load", key], [compiled.descriptor])
        self._loaded.pop(key, None)
        self._loaded[key] = None

    def _drop_idle(self) -> None:
        followed = {answer.compiled.key for answer in self._answers.values()}
        idle = [key for key in self._loaded if key not in followed]
        for key in idle[: max(0, len(idle) - MAX_LOADED)]:
            self._tell(["drop", key])
            del self._loaded[key]

    def _tell(self, message: list[Any], descriptors: Sequence[int] = ()) -> None:
        if self._end is None:
            self._start()
        assert self._end is not None
        while True:
            try:
                send(self._end, message, descriptors)
            except BlockingIOError:
                self._wait(select.POLLOUT)
            except OSError:
                raise LostError from None
            else:
                return

    def _receive(self) -> list[Any]:
        assert self._end is not None
        while True:
            try:
                return receive(self._end)[0]
            except BlockingIOError:
                self._wait(select.POLLIN)
            except (EOFError, OSError):
                raise LostError from None

    def _wait(self, event: int) -> None:
        """Until the channel is ready, or a moment. Raises LostError when time is up."""
        assert self._end is not None
        self._compiler.look()
        poll = select.poll()
        poll.register(self._end, event)
        if poll.poll(LOOK_MS):
            return
        count, cpu_s, clock_s = self._words[1], _cpu_s(self._pid), time.monotonic()
        if count != self._mark[0] or cpu_s < self._mark[1]:
            self._mark = (count, cpu_s, clock_s)
        elif cpu_s - self._mark[1] > CPU_LIMIT_S or clock_s - self._mark[2] > WALL_LIMIT_S:
            raise StuckError

    def _begin_anew(self, error: LostError) -> None:
        """End the process, and give up whoever is to blame; if the second in a row was at work for
        nobody, everybody."""
        number = self._words[0]
        self._kill()
        how = "got stuck" if isinstance(error, StuckError) else "ended"
        _log.warning("The process that follows grammars %s; another is started.", how)
        answer = self._answers.get(number)
        if answer is None:
            if self._was_ended:
                self._answers.clear()
        elif isinstance(error, StuckError):
            self._give_up(number, GIVEN_UP, TOO_SLOW)
        elif answer.was_worked_for:
            self._give_up(number, ENDED, ENDS_IT)
        else:
            answer.was_worked_for = True
        self._was_ended = answer is None

    def _give_up(self, number: int, state: int, reason: str) -> None:
        """Refuse its grammar from now on."""
        self._compiler.refuse(self._answers.pop(number).compiled.key, reason)
        self._given_up[number] = state

    def _kill(self) -> None:
        assert self._end is not None
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._end.setblocking(True)
            with contextlib.suppress(EOFError, OSError):
                while True:  # until it is gone, and writes no more
                    receive(self._end)
        self._end.close()
        self._end = None


TOO_SLOW = "it takes too long to follow"
ENDS_IT = "the process that follows it ended twice while at work for the same answer"


def _cpu_s(pid: int) -> float:
    """Processor time of another process; 0 when it is gone or not known."""
    if not pid:
        return 0.0
    try:
        return time.clock_gettime((~pid << 3) | 2)  # Linux's clock of a process
    except OSError:
        return 0.0
