"""What a person reads on stderr while the server starts and ends."""

from __future__ import annotations

import os
from typing import Any, TextIO

import tetrad
from tetrad.core.messages import EngineProgress
from tetrad.engine.client import NOTE
from tetrad.server.service import Service


class Console:
    """Lines on a stream; on a terminal, progress rewrites its line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._phase = ""
        self._rewrites = stream.isatty()
        self._is_open = False
        """Whether the last line still waits for its end."""

    def say(self, text: str) -> None:
        """One line."""
        self._write(("\n" if self._is_open else "") + text + "\n")
        self._is_open = False

    def error(self, text: str) -> None:
        """One line that says what is wrong."""
        self.say(f"error: {text}")

    def progress(self, progress: EngineProgress) -> None:
        """A new phase is a new line; its details are shown where they can rewrite it. A note is a
        line by itself, and no phase."""
        if progress.phase == NOTE:
            self.say(f"  {NOTE} {progress.detail}")
        elif progress.phase != self._phase:
            self._phase = progress.phase
            self.say(f"  {progress.phase} {progress.detail}".rstrip())
        elif self._rewrites:
            self._write(f"\r  {progress.phase} {progress.detail}\x1b[K")
            self._is_open = True

    def ready(self, service: Service, url: str) -> None:
        """What is served, on what, within which limits, by which kernels, and where."""
        info = service.engine.info
        lines = [
            f"Tetrad {tetrad.__version__} serves {service.model.name} at {url}",
            *_facts(info),
            *_sampling(service.model.defaults.told),
            *_processes(service.config.api_workers or 1),
            f"  ready in {service.startup_s:.1f} s; Ctrl-C ends it",
        ]
        self.say("\n".join(lines))

    def _write(self, text: str) -> None:
        """Whoever read along may have left, or the disk may be full: the server goes on."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            # What is left in the buffer, and whatever else writes there, must find a reader.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        except OSError:
            pass


def _facts(info: dict[str, Any]) -> list[str]:
    device, memory = info["device"], info["memory"]
    if device["kind"] == "null":
        return [
            *(f"  engine   {sentence}" for sentence in info["memory_statement"]),
            _limits(info),
        ]
    stored = ", ".join(_held(name, held) for name, held in info["weights"].items())
    lines = [
        f"  device   {device['name']} ({device['kind']}, {_size(device['memory_bytes'])}), "
        f"{info['dtype']}",
        f"  weights  {_size(memory['weight_bytes'])} in {_load(info)}: {stored}",
        f"  cache    {info['cache_sentence']}, keys in {info['kv_cache_dtype']}",
        *(f"  memory   {sentence}" for sentence in info["memory_statement"]),
        _limits(info),
    ]
    return lines + _kernels(info["backends"])


def _limits(info: dict[str, Any]) -> str:
    return (
        f"  limits   {info['context_length']} tokens a request, "
        f"{info['max_running_requests']} requests at once"
    )


def _processes(num_workers: int) -> list[str]:
    """Nothing to say of one."""
    return [] if num_workers == 1 else [f"  api      {num_workers} processes share the port"]


def _sampling(told: str) -> list[str]:
    """Nothing to say of what OpenAI's API promises."""
    return [f"  sampling {told}"] if told else []


def _load(info: dict[str, Any]) -> str:
    """How long loading took, and how fast files were read, conversions not counted."""
    rate = info["read_gb_per_s"]
    return f"{info['load_s']:.1f} s" + ("" if rate is None else f", read at {rate:.2f} GB/s")


def _held(name: str, held: dict[str, int]) -> str:
    """Memory of one format; also its size in the checkpoint where it is another, which is none for
    what was made of a tied model's table."""
    memory, stored = _size(held["memory_bytes"]), _size(held["stored_bytes"])
    if not held["stored_bytes"]:
        return f"{memory} {name} (of the tied table)"
    return f"{memory} {name}" + (f" (stored in {stored})" if memory != stored else "")


def _kernels(backends: list[dict[str, Any]]) -> list[str]:
    """Ops by backend; then each sentence once, with the backends that it keeps away."""
    chosen: dict[str, list[str]] = {}
    known: dict[str, list[str]] = {}
    kept_away: dict[str, dict[str, list[str]]] = {}
    for choice in backends:
        chosen.setdefault(choice["backend"], []).append(choice["op"])
        for backend in (choice["backend"], *choice["refusals"]):
            known.setdefault(backend, []).append(choice["op"])
        for backend, reason in choice["refusals"].items():
            kept_away.setdefault(reason, {}).setdefault(backend, []).append(choice["op"])

    def named(backend: str, ops: list[str]) -> str:
        return backend if ops == known[backend] else f"{backend} for {', '.join(ops)}"

    return [
        *(f"  kernels  {backend}: {', '.join(names)}" for backend, names in chosen.items()),
        *(
            f"           not {', '.join(named(*each) for each in its.items())}: {reason}"
            for reason, its in kept_away.items()
        ),
    ]


def _size(num_bytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes / 1e3:.3g} kB"
