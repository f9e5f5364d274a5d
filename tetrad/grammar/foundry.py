"""The grammar process: `python -m tetrad.grammar.foundry --socket N --source JSON`.

It reads the vocabulary once and then only forks: a child for each grammar to compile, with limits
on time and memory, and the process that follows grammars. So none of them takes time to start,
and whatever a grammar does to one of them, the next begins in a sound state.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import selectors
import signal
import socket
import sys
from collections import deque
from dataclasses import dataclass

import msgspec
import xgrammar

from tetrad.grammar import compiling, following
from tetrad.grammar.vocabulary import VocabularySource, read_vocabulary
from tetrad.grammar.wire import memory_file, receive, send

MAX_CHILDREN = 8
"""More than processors, so that what takes long shares them with what does not."""
MAX_REASON_BYTES = 4096
PR_SET_PDEATHSIG = 1
"""Linux's `prctl`."""
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Signals that a grammar may bring upon the library; others come from outside."""


@dataclass(frozen=True)
class Job:
    """A grammar that a child compiles."""

    number: int
    pid: int
    result: int
    """Descriptor of the memory that it writes to."""


class Foundry:
    """Serves one engine."""

    def __init__(self, engine: socket.socket, info: xgrammar.TokenizerInfo) -> None:
        self._engine = engine
        self._info = info
        self._selector = selectors.DefaultSelector()
        self._waiting: deque[tuple[int, str, str]] = deque()
        self._jobs: dict[int, Job] = {}
        self._followers: list[int] = []
        """Process ids, of those that ended before too until the next is started."""

    def run(self) -> None:
        """Until the engine is gone."""
        self._selector.register(self._engine, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._engine:
                    try:
                        message, descriptors = receive(self._engine)
                    except EOFError:
                        return
                    self._obey(message, descriptors)
                else:
                    assert isinstance(key.fileobj, int)
                    self._end(key.fileobj)
            self._begin_jobs()

    def _obey(self, message: list[object], descriptors: list[int]) -> None:
        match message:
            case ["compile", int(number), str(kind), str(text)]:
                self._waiting.append((number, kind, text))
            case ["follow"]:
                self._follow(*descriptors)
            case _:
                raise ValueError(f"the grammar process does not know {message[0]!r}")

    def _follow(self, end: int, masks: int) -> None:
        self._followers = [pid for pid in self._followers if os.waitpid(pid, os.WNOHANG)[0] == 0]
        pid = os.fork()
        if pid == 0:
            self._become_other()
            os._exit(following.main(self._info, end, masks))
        self._followers.append(pid)
        os.close(end)
        os.close(masks)

    def _begin_jobs(self) -> None:
        while self._waiting and len(self._jobs) < MAX_CHILDREN:
            number, kind, text = self._waiting.popleft()
            result = memory_file("grammar")
            reading, writing = os.pipe()
            parent, pid = os.getpid(), os.fork()
            if pid == 0:
                _end_with(parent)
                self._become_other()
                os._exit(compiling.main(self._info, kind, text, result, writing))
            os.close(writing)
            self._jobs[reading] = Job(number, pid, result)
            self._selector.register(reading, selectors.EVENT_READ)

    def _become_other(self) -> None:
        """What a child does first: nobody must wait for it in vain when this process ends, and
        what the library prints is no log of ours, so that it need not take half a second of the
        processor for the stack when it crashes."""
        self._engine.close()
        for number in CRASHES:
            signal.signal(number, signal.SIG_DFL)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)

    def _end(self, reading: int) -> None:
        """A child said why not, or is done, or was ended."""
        reason = os.read(reading, MAX_REASON_BYTES).decode()
        self._selector.unregister(reading)
        os.close(reading)
        job = self._jobs.pop(reading)
        _, status = os.waitpid(job.pid, 0)
        is_ours = False
        if status:
            reason, is_ours = _epitaph(status)
        message = ["compiled", job.number, reason, is_ours]
        send(self._engine, message, () if reason else (job.result,))
        os.close(job.result)


def _end_with(parent: int) -> None:
    """In a child: nobody wants what it compiles once its parent is gone, however that ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _epitaph(status: int) -> tuple[str, bool]:
    """Why a child ended that did not say so itself, and whether its grammar is not to blame: then
    it is a sentence of its own."""
    if not os.WIFSIGNALED(status):
        return compiling.MEMORY_REASON, False
    number = os.WTERMSIG(status)
    if number == signal.SIGPROF:
        return f"compiling it takes longer than {compiling.CPU_LIMIT_S:g} s", False
    if number == signal.SIGALRM:
        busy = f"took {compiling.WALL_LIMIT_S:g} s because the processors are busy with others"
        return f"Compiling the grammar {busy}; try again.", True
    name = signal.Signals(number).name
    if number in CRASHES:
        return f"compiling it crashes ({name})", False
    return (
        f"The process that compiled the grammar was ended from outside ({name}); try again.",
        True,
    )


def main() -> int:
    """Serve until the engine is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="tetrad.grammar.foundry")
    parser.add_argument("--socket", required=True, type=int, metavar="DESCRIPTOR")
    parser.add_argument("--source", required=True)
    arguments = parser.parse_args()
    source = msgspec.json.decode(arguments.source, type=VocabularySource)
    info = xgrammar.TokenizerInfo(
        read_vocabulary(source),
        xgrammar.VocabType.RAW,
        vocab_size=source.size,
        stop_token_ids=list(source.end_ids),
    )
    with socket.socket(fileno=arguments.socket) as engine:
        Foundry(engine, info).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
