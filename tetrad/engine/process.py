"""What makes a process an engine process: its arguments, its signals, its tie to its parent.

`EngineClient` starts it with a pipe as standard input. When the pipe closes, the parent is gone and
the process exits. Signals from a terminal or service manager are handled by the parent: it drains
its requests and then sends `Shutdown`.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import sys
import threading

from tetrad.core.config import ServeConfig
from tetrad.core.errors import EngineDiedError
from tetrad.core.stacks import show_stacks_when_asked
from tetrad.engine.loop import EngineLoop, Load


def main(load: Load) -> int:
    """Serve what `load` makes of the configuration until told to end; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    show_stacks_when_asked()
    parser = argparse.ArgumentParser(prog="tetrad.engine.worker")
    parser.add_argument("--config-json", required=True, type=ServeConfig.model_validate_json)
    parser.add_argument("--socket", required=True, metavar="FOLDER")
    arguments = parser.parse_args()
    watch = threading.Thread(
        target=_end_with_parent, args=(arguments.socket,), name="parent watch", daemon=True
    )
    watch.start()
    config: ServeConfig = arguments.config_json
    logging.basicConfig(level=config.log_level.upper(), format="%(levelname)s %(message)s")
    return EngineLoop(arguments.socket).run(config, load)


def _end_with_parent(folder: str) -> None:
    """Blocks until the pipe closes, then ends the process whatever it is doing. The parent could
    not clean up: the folder of the sockets goes with it."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(EngineDiedError.exit_code)
