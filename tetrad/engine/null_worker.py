"""The engine process of `--load-format null`: as `worker.py`, without waiting for torch."""

from __future__ import annotations

import sys

from tetrad.engine.null import load_null
from tetrad.engine.process import main

if __name__ == "__main__":
    sys.exit(main(load_null))
