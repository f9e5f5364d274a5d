"""`tetrad serve [MODEL]`."""

from __future__ import annotations

from tetrad.cli.flags import verb
from tetrad.core.config import ServeConfig


def _serve(config: ServeConfig) -> int:
    """Run the server until it is told to end; returns its exit code."""
    from tetrad.server.process.launch import run

    return run(config)


serve = verb(ServeConfig, _serve, positional=("model",))
