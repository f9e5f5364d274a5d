"""Profiling of the engine's steps with torch, as a trace file in the operator's folder."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tetrad.core.errors import ConfigError, UserError

MOST_STEPS = 1000
"""A profile ends by itself then: each step leaves thousands of events in memory."""

_log = logging.getLogger(__name__)


class TorchProfiler:
    """At most one profile at a time. Its methods belong to the thread that runs the steps."""

    def __init__(self, folder: Path | None) -> None:
        """Raises ConfigError when `folder` cannot be made."""
        self._folder = folder
        self._running: profile | None = None
        self._steps_left = 0
        self._last = ""
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--profile-dir {folder}: {error.strerror}.") from None

    def start(self, num_steps: int | None, /) -> None:
        """Record from now on, for so many steps or until told to stop. Raises UserError."""
        if self._folder is None:
            raise UserError(
                "Nothing says where a profile may be written; start the server with --profile-dir."
            )
        if self._running is not None:
            raise UserError("A profile is running already; stop it with /stop_profile.")
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._running = profile(activities=activities, record_shapes=True)
        self._steps_left = min(num_steps or MOST_STEPS, MOST_STEPS)
        self._running.start()

    def stepped(self) -> None:
        """A step is over."""
        if self._running is not None:
            self._steps_left -= 1
            if self._steps_left <= 0:
                try:
                    self._write()
                except UserError as error:
                    _log.error("%s", error)

    def stop(self) -> str:
        """End it; returns the path of the trace, also of one that has ended by itself since the
        last call. Raises UserError."""
        if self._running is not None:
            self._write()
        path, self._last = self._last, ""
        if not path:
            raise UserError("No profile is running; start one with /start_profile.")
        return path

    def _write(self) -> None:
        assert self._folder is not None
        assert self._running is not None
        running, self._running = self._running, None
        running.stop()
        stamp = time.strftime("%Y%m%d-%H%M%S")
        path = self._folder / f"tetrad-{stamp}-{time.monotonic_ns()}.trace.json.gz"
        try:
            running.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise UserError(f"The profile could not be written to {path}: {error}.") from None
        self._last = str(path)
        _log.info("a profile of the engine lies at %s", path)
