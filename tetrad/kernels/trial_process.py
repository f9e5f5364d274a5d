"""A process that tries kernels for another one: jobs go in as pickles, answers come out as lines of
JSON."""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any

COMMAND = (sys.executable, "-m", "tetrad.kernels.trial_child")
START_S = 120.0
"""For a process to import torch and begin."""

Answer = dict[str, Any]


class LostError(Exception):
    """The process ended, or did not come back, before its job was done; says how."""

    def __init__(self, sentence: str, *, is_late: bool = False) -> None:
        super().__init__(sentence)
        self.is_late = is_late


class Process:
    """One such process. Raises LostError when it does not start."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        # Beside others: a pool of threads in each waits more than it computes.
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
                env=environment,
            )  # fmt: skip
        except OSError as error:
            self._errors.close()
            raise LostError(f"it does not start: {error}") from error
        assert self._process.stdout is not None
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._reader = threading.Thread(
            target=_read, args=(self._process.stdout, self._lines), daemon=True
        )
        self._reader.start()
        try:
            self._until("ready", START_S, lambda _said: None)
        except LostError:
            self.close()
            raise

    def ask(self, job: object, patience_s: float, hear: Callable[[Answer], None]) -> Answer:
        """Do one job; `hear` gets what the process says on the way. Raises LostError also when it
        says nothing for `patience_s`."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(pickle.dumps(job))
            self._process.stdin.flush()
        return self._until("done", patience_s, hear)

    def kill(self) -> None:
        """End what it does; whoever waits for it hears that it is lost."""
        self._process.kill()

    def close(self) -> None:
        """End it, and let go of all it held."""
        self.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()

    def _until(self, key: str, patience_s: float, hear: Callable[[Answer], None]) -> Answer:
        """What it says with this key. What libraries print while they are imported is passed
        over."""
        while True:
            try:
                line = self._lines.get(timeout=patience_s)
            except queue.Empty:
                sentence = f"it did not come back within {patience_s:g} s"
                raise LostError(sentence, is_late=True) from None
            if line is None:
                raise LostError(self._end())
            with suppress(ValueError):
                said = json.loads(line)
                if isinstance(said, dict):
                    if key in said:
                        return said
                    hear(said)

    def _end(self) -> str:
        code = self._process.wait()
        if code < 0:
            return f"its process got {signal.Signals(-code).name}"
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        return f"its process ended: {(last or [f'exit code {code}'])[0][:300]}"


def _read(output: IO[bytes], lines: queue.Queue[bytes | None]) -> None:
    for line in output:
        lines.put(line)
    lines.put(None)
