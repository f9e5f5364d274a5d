"""The engine's side of compiling: ask, look now and then, keep what came.

Nothing here waits. What was compiled stays in memory that belongs to nobody else, known by its
descriptor; what was refused is remembered too, so that it is refused at once the next time, but not
failures of this server.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from tetrad.grammar.layout import JSON_KIND
from tetrad.grammar.vocabulary import VocabularySource
from tetrad.grammar.wire import channel, receive, send

_log = logging.getLogger(__name__)

MAX_KEPT = 128
"""Compiled grammars, besides those in use."""
MAX_WAITING = 256
ENDED = "The process that compiles grammars ended; the server's log says why. Try again."


@dataclass(frozen=True)
class Compiled:
    """A grammar to follow."""

    key: int
    descriptor: int
    """Of the memory that holds it, serialised."""
    is_json: bool = False
    """Are its texts JSON from end to end?"""


@dataclass(frozen=True)
class Refused:
    """Why there is none."""

    reason: str
    is_ours: bool = False
    """Not the grammar is to blame but this server."""


class Compiler:
    """Owns the grammar process, which is started when it is first needed."""

    module: ClassVar[str] = "tetrad.grammar.foundry"

    def __init__(self, source: VocabularySource, environment: Mapping[str, str]) -> None:
        self._source = source
        # Threads of a library would not survive a fork.
        self._environment = {**environment, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process: subprocess.Popen[bytes] | None = None
        self._end: socket.socket | None = None
        self._to_send: deque[tuple[list[object], tuple[int, ...]]] = deque()
        self._json_keys: set[int] = set()
        self._keys: dict[bytes, int] = {}
        """Digest of a grammar → its key; the one asked for longest ago first."""
        self._outcomes: dict[int, Compiled | Refused] = {}
        self._retired: list[Compiled] = []
        """Refused after all, but answers may still be under way."""
        self._next_key = 0

    @property
    def num_waiting(self) -> int:
        """Grammars whose outcome is not known."""
        return len(self._keys) - len(self._outcomes)

    def start(self) -> None:
        """Start the process, which takes seconds to be ready, if it does not run."""
        if self._process is not None:
            return
        self._end, theirs = channel()
        self._end.setblocking(False)
        source = msgspec.json.encode(self._source).decode()
        command = [sys.executable, "-P", "-m", self.module]
        with theirs:
            self._process = subprocess.Popen(
                [*command, "--socket", str(theirs.fileno()), "--source", source],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=self._environment,
            )

    def ask(self, kind: str, text: str) -> int | None:
        """Key of a grammar, whose outcome is known at once or later; None if too many wait."""
        digest = hashlib.blake2b(f"{kind}:{text}".encode(), digest_size=16).digest()
        key = self._keys.pop(digest, None)
        if key is None:
            if self.num_waiting >= MAX_WAITING:
                return None
            key, self._next_key = self._next_key, self._next_key + 1
            self._to_send.append((["compile", key, kind, text], ()))
            if kind == JSON_KIND:
                self._json_keys.add(key)
            self.start()
        self._keys[digest] = key
        return key

    def outcome(self, key: int) -> Compiled | Refused | None:
        """None as long as it is not known."""
        return self._outcomes.get(key)

    def refuse(self, key: int, reason: str) -> None:
        """A grammar that compiled turned out not to be usable."""
        outcome = self._outcomes.get(key)
        if isinstance(outcome, Compiled):
            self._retired.append(outcome)
        self._outcomes[key] = Refused(reason)

    def follow(self, end: int, masks: int) -> None:
        """Have a process follow grammars: `end` is its end of a channel, `masks` its memory. Both
        are taken over."""
        self._to_send.append((["follow"], (end, masks)))
        self.start()

    def look(self) -> None:
        """Take in what has come, send what waits."""
        if self._end is None:
            return
        try:
            self._send()
            while True:
                self._take(*receive(self._end))
        except BlockingIOError:
            pass
        except (EOFError, OSError):
            self._lost()

    def stop(self) -> None:
        """End the process; what it had forked ends by itself."""
        if self._end is not None and self._process is not None:
            self._end.close()
            self._process.kill()
            self._process.wait()
            self._process = self._end = None

    def _send(self) -> None:
        assert self._end is not None
        while self._to_send:
            message, descriptors = self._to_send[0]
            send(self._end, message, descriptors)
            self._to_send.popleft()
            for descriptor in descriptors:
                os.close(descriptor)

    def _take(self, message: list[object], descriptors: list[int]) -> None:
        match message:
            case ["compiled", int(key), str(reason), bool(is_ours)]:
                is_json = key in self._json_keys
                self._json_keys.discard(key)
                self._outcomes[key] = (
                    Refused(reason, is_ours) if reason else Compiled(key, descriptors[0], is_json)
                )
                if is_ours:
                    _log.error(reason)
            case _:
                raise ValueError(f"the engine does not know {message[0]!r}")

    def _lost(self) -> None:
        """Whoever waits is told so; the next who asks starts a new one."""
        _log.error("The process that compiles grammars ended; it is started anew when needed.")
        self.stop()
        for _, descriptors in self._to_send:
            for descriptor in descriptors:
                os.close(descriptor)
        self._to_send.clear()
        for key in self._keys.values():
            self._outcomes.setdefault(key, Refused(ENDED, is_ours=True))

    def forget(self, in_use: Set[int]) -> None:
        """Let go of the oldest grammars, but not of those `in_use`; and of failures of ours."""
        idle = [pair for pair in self._keys.items() if pair[1] in self._outcomes.keys() - in_use]
        num_old = len(idle) - MAX_KEPT
        for place, (digest, key) in enumerate(idle):
            outcome = self._outcomes[key]
            if place < num_old or (isinstance(outcome, Refused) and outcome.is_ours):
                del self._keys[digest], self._outcomes[key]
                if isinstance(outcome, Compiled):
                    os.close(outcome.descriptor)
        for compiled in [one for one in self._retired if one.key not in in_use]:
            self._retired.remove(compiled)
            os.close(compiled.descriptor)
