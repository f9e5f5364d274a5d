"""What the log looks like."""

from __future__ import annotations

import logging
import sys

from tetrad.core.config import ServeConfig
from tetrad.server.telemetry.reporter import set_up_access_log


def set_up_logging(config: ServeConfig, speaker: str = "") -> None:
    """Lines on stderr; `speaker` begins what one of several processes says."""
    logging.basicConfig(
        level=config.log_level.upper(),
        format=f"%(asctime)s {speaker}%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    set_up_access_log()
    # uvicorn's own announcements say less than ours.
    quiet = logging.INFO if config.log_level == "debug" else logging.ERROR
    logging.getLogger("uvicorn").setLevel(quiet)
