"""The model that ships inside the package."""

from __future__ import annotations

from pathlib import Path

NAME = "abacus"
"""What the embedded model may be called instead of naming its folder."""


def embedded_model() -> Path:
    """Folder of Abacus, the tiny GLM-5 that can add."""
    return Path(__file__).parent / NAME


def model_folder(model: Path | None) -> Path:
    """The folder that is meant: the embedded model where none is named, or its name is and nothing
    here is called so."""
    is_embedded = model is None or (str(model) == NAME and not model.exists())
    return embedded_model() if model is None or is_embedded else model
