"""The engine process of `--load-format null`: like `worker.py`, but without waiting for torch."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tetrad.core.config import ServeConfig
from tetrad.core.messages import EngineProgress
from tetrad.engine.engine import Engine
from tetrad.engine.null import load_null
from tetrad.engine.process import main
from tetrad.engine.without_effect import without_effect_on_null


def load(config: ServeConfig, on_progress: Callable[[EngineProgress], None]) -> Engine:
    """The engine, and what was asked of it in vain."""
    for sentence in without_effect_on_null(config):
        on_progress(EngineProgress("note", sentence))
    return load_null(config, on_progress)


if __name__ == "__main__":
    sys.exit(main(load))
