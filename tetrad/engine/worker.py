"""The engine process: `python -m tetrad.engine.worker --config-json TEXT --socket FOLDER`."""

from __future__ import annotations

import sys

from tetrad.engine.load import load_engine
from tetrad.engine.process import main

if __name__ == "__main__":
    sys.exit(main(load_engine))
