"""The model that ships inside the package."""

from __future__ import annotations

from pathlib import Path


def embedded_model() -> Path:
    """Folder of Abacus, the tiny GLM-5 that can add."""
    return Path(__file__).parent / "abacus"
