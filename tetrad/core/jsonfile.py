"""Reading a JSON file that must hold an object: data, never executed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tetrad.core.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError when it holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value
